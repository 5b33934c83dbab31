// Page of the model's coverage: a matrix of operators and element types by device.

import { call } from "./api.js";
import { domainLegend, find, html } from "./dom.js";
import { keyForm } from "./key.js";
import { counted, percent, whole } from "./units.js";

const ANY_OTHER = "any other device";
/** Sign of a domain in a cell without an error, so that a cell does not depend on its colour. */
const SIGN = { in: "●", near: "◐", out: "○" };

let support = null;

/** Element types as in the text of an operator: "bfloat16,weight_dtype=int4,scaling=block128". */
export function typesText(row) {
  const further = ["weight_dtype", "scaling"].filter((name) => row[name] !== null).map((name) => `${name}=${row[name]}`);
  return [row.dtype, ...further].join(",");
}

export const domainOn = (row, device) => row.domain[device] ?? row.elsewhere;

const isTrained = (row) => Object.values(row.domain).includes("in");

/** Rows and devices that fit the search texts; only rows with training rows, unless `all`. */
export function select(matrix, { operator = "", device = "", all = false }) {
  const fits = (text, words) => words.toLowerCase().split(/[\s,]+/).filter(Boolean).every((word) => text.toLowerCase().includes(word));
  const rows = matrix.rows.filter((row) => (all || isTrained(row)) && fits(`${row.operator} ${typesText(row)}`, operator));
  const devices = matrix.devices.filter((name) => fits(name, device));
  // A device without any cell that differs from other devices says nothing, unless it was searched for.
  return { rows, devices: device ? devices : devices.filter((name) => rows.some((row) => name in row.domain)) };
}

function cell(row, device) {
  const domain = domainOn(row, device), error = row.mape[device], count = row.rows?.[device];
  const facts = [domain, error === undefined ? null : `${percent(error)} error on held-out rows`,
    count === undefined ? null : `${whole(count)} training rows`].filter(Boolean);
  return html("td", { class: domain, "data-device": device, title: `${row.operator} ${typesText(row)} on ${device}: ${facts.join(", ")}` },
    error === undefined ? SIGN[domain] : percent(error));
}

function table({ rows, devices }) {
  const columns = [...devices, ANY_OTHER];
  const head = html("tr", {}, html("th", { scope: "col" }, "operator and types"),
    ...columns.map((name) => html("th", { scope: "col" }, html("span", {}, name))));
  const body = rows.map((row, i) => html("tr", { class: row.operator === rows[i - 1]?.operator ? null : "first", "data-row": `${row.operator} ${typesText(row)}` },
    html("th", { scope: "row" }, row.operator, " ", html("code", {}, typesText(row))), ...columns.map((name) => cell(row, name))));
  return html("table", {}, html("thead", {}, head), html("tbody", {}, ...body));
}

/** What a search without result means. */
function advice({ rows, devices }) {
  const texts = [];
  if (!rows.length && !find("all").checked) texts.push(` No such types were trained: select "untrained types".`);
  if (!devices.length) texts.push(` No device with training rows has such a name: other devices are predicted by their specification (last column).`);
  return texts.join("");
}

function draw() {
  const chosen = select(support.matrix, { operator: find("operator").value, device: find("device").value, all: find("all").checked });
  const inside = chosen.rows.reduce((sum, row) => sum + chosen.devices.filter((name) => domainOn(row, name) === "in").length, 0);
  find("summary").textContent = `${counted(chosen.rows.length, "row")}, ${counted(chosen.devices.length, "device")}, `
    + `${counted(inside, "cell")} in domain. Percentages: mean error on held-out measurements.${advice(chosen)}`;
  find("matrix").replaceChildren(table(chosen));
}

async function load() {
  const alert = find("alert");
  try {
    support = await call("/support");
  } catch (refusal) {
    alert.hidden = false;
    alert.textContent = [refusal.message, refusal.hint].join(" ");
    return;
  }
  alert.hidden = true;
  find("model").textContent = support.model_id;
  find("domains").replaceChildren(...domainLegend(Object.keys(SIGN)));
  find("errors-by").textContent = support.matrix.errors_by === "operator"
    ? "The error table of this model has no element types: an error is that of the operator in all types." : "";
  draw();
}

for (const id of ["operator", "device", "all"]) find(id).addEventListener("input", () => support && draw());
keyForm(load);
load();
