// Making elements. Text goes in as text, never as markup: names come from files of strangers.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** The mark of a domain: a shape and a word, so that colour is never the only carrier. */
const DOMAINS = {
  in: ["●", "trained on this device, operator, type and protocol together, and sizes like these"],
  near: ["◐", "one of device, operator, type, protocol or size is new to the model, or the combination is"],
  out: ["○", "a guess: never trained on, or several new things at once"],
};

export const DOMAIN_ORDER = Object.keys(DOMAINS);

export function domainMark(domain) {
  const [sign, meaning] = DOMAINS[domain] ?? ["–", ""];
  return html("span", { class: `domain ${domain ?? ""}`, title: meaning },
    html("span", { "aria-hidden": "true" }, sign), ` ${domain ?? "none"}`);
}

/** An item's error with its hint, as one paragraph. */
export function errorText(error) {
  return html("span", { class: "fault" }, error.message ?? String(error),
    error.hint ? html("span", { class: "hint" }, ` ${error.hint}`) : null);
}

/** A table's head; names of columns that hold words rather than figures begin with a blank. */
export function tableHead(names, attributes = {}) {
  return html("thead", {}, html("tr", {}, ...names.map((name) =>
    html("th", { scope: "col", class: name.startsWith(" ") ? "text" : null, ...attributes }, name.trim()))));
}
