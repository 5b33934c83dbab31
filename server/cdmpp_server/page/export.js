// Export of a figure: its values as CSV or JSON, the drawing as PNG.

import { html } from "./dom.js";

/** Presentation attributes that make a drawing independent of the style sheet. */
const PROPERTIES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap",
  "stroke-linejoin", "stroke-opacity", "opacity", "font-family", "font-size", "font-weight"];
const SCALE = 2;

/** CSV of records with equal keys; texts with commas, quotes or line ends are quoted. */
export function csv(records) {
  const names = Object.keys(records[0] ?? {});
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [names, ...records.map((r) => names.map((name) => r[name]))].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

/** The drawing as a PNG blob, at twice its size, on the ground of the page. */
async function png(drawing) {
  const copy = drawing.cloneNode(true);
  const sources = [drawing, ...drawing.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(sources[i]);
    for (const name of PROPERTIES) node.setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const address = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: SCALE * image.width, height: SCALE * image.height });
    const context = canvas.getContext("2d");
    context.fillStyle = getComputedStyle(drawing.closest(".panel")).backgroundColor;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done) => canvas.toBlob(done, "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

function save(blob, name) {
  const address = URL.createObjectURL(blob);
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Buttons for the figure `name`; `values()` gives {records, json}, or null while there is nothing to export. */
export function exportButtons(name, values) {
  const kinds = {
    CSV: ({ records }) => new Blob([csv(records)], { type: "text/csv" }),
    JSON: ({ json }) => new Blob([JSON.stringify(json, null, 1)], { type: "application/json" }),
    PNG: () => {
      const drawing = document.querySelector(`#${name} svg`);
      return drawing && png(drawing);
    },
  };
  return Object.entries(kinds).map(([kind, make]) => html("button", { type: "button", class: "quiet",
    "aria-label": `Export this figure as ${kind}`,
    onclick: async () => {
      const shown = values(), blob = shown && await make(shown);
      if (blob) save(blob, `cdmpp-${name}.${kind.toLowerCase()}`);
    } }, kind));
}
