// Table of the programs on one device, most expensive first.

import { domainMark, errorText, html, tableHead } from "./dom.js";
import { counted, interval, latency, percent } from "./units.js";

const SHOWN = 12;

/** [{program, answer, total}] of one device: predicted programs by cost, then failed ones. */
export function byCost(programs, device) {
  return programs.map((program) => {
    const answer = program.answers.find((a) => a.device === device) ?? {};
    return { program, answer, total: answer.error ? null : program.count * answer.latency_s };
  }).sort((a, b) => (b.total ?? -1) - (a.total ?? -1));
}

function programName(name) {
  const cut = name.indexOf(":");
  if (cut < 0) return [html("b", {}, name)];
  const fields = name.slice(cut + 1).split(",").map((f) => html("span", { class: "field" }, f));
  return [html("b", {}, name.slice(0, cut)), " ", ...fields.flatMap((f) => [f, " "])];
}

function shareBar(share) {
  const bar = html("span", { class: "part", "aria-hidden": "true" }, html("i"));
  // Set by script, because the content security policy forbids style attributes.
  bar.firstChild.style.width = `${100 * share}%`;
  return bar;
}

/**
 * The table; `all` shows every row, `more` is called by the button that shows them. `noun` names the rows. Answers
 * without a domain, such as parts of a language model, have no such column.
 */
export function programTable(result, device, { noun = "program", unit, all, more }) {
  const rows = byCost(result.programs, device);
  const sum = rows.reduce((total, r) => total + (r.total ?? 0), 0);
  const domains = rows.some((r) => r.answer.domain || r.answer.error);
  const shown = all ? rows : rows.slice(0, SHOWN);
  const cell = (label, attributes, ...children) => html("td", { role: "cell", "data-label": label, ...attributes }, ...children);
  const body = shown.map(({ program, answer, total }) => {
    const name = html("th", { scope: "row", role: "rowheader", class: "program" }, ...programName(program.name));
    if (answer.error || total === null) {
      return html("tr", { role: "row" }, name, cell("count", { class: "figure" }, String(program.count)),
        html("td", { role: "cell", colspan: 4 }, errorText(answer.error ?? { message: "no prediction for this device" })));
    }
    const share = sum > 0 ? total / sum : 0;
    return html("tr", { role: "row", "data-program": program.name }, name,
      cell("count", { class: "figure", "data-key": "count" }, String(program.count)),
      cell("each", { class: "figure", "data-key": "each", title: answer.lower_s ? interval(answer.lower_s, answer.upper_s, unit) : null }, latency(answer.latency_s, unit)),
      cell("total", { class: "figure", "data-key": "total" }, latency(total, unit)),
      cell("share", { class: "share" }, shareBar(share), html("span", { class: "figure" }, percent(share))),
      domains ? cell("domain", { class: "reason" }, domainMark(answer.domain, answer.domain_reason),
        answer.domain === "out" ? html("span", { class: "hint" }, answer.domain_reason) : null) : null);
  });
  const table = html("table", { role: "table", class: "programs" },
    html("caption", {}, `${counted(rows.length, noun)} on ${device}, most expensive first`),
    tableHead([noun, "count", "each", "total", "share", ...(domains ? [" domain"] : [])], { role: "columnheader" }),
    html("tbody", { role: "rowgroup" }, ...body));
  const rest = rows.length - shown.length;
  return [html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Latency by ${noun}` }, table),
    rest > 0 ? html("button", { type: "button", class: "quiet", onclick: more }, `Show ${rest} more`) : null,
    unsupported(result.unsupported)].filter(Boolean);
}

function unsupported(list) {
  if (!list.length) return null;
  return html("div", { class: "faults" }, html("p", {}, "Not in the total, because the model has no such operator:"),
    html("ul", {}, ...list.map((u) => html("li", {}, html("b", {}, u.operator), ` (${counted(u.count, "time")}): ${u.reason}`))));
}
