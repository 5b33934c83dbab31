// Chart of total latency by device: bars from zero on a linear scale, points on a logarithmic scale, which has
// no zero. Whiskers show the interval. Both fill and text show the domain.

import { domainMark, html, svg, tableHead } from "./dom.js";
import { linear, log, tick } from "./scale.js";
import { interval, latency } from "./units.js";

const NARROW = 560, BAR = 16, AXIS = 30;

/** Fill patterns of the domains "near" and "out", for print and for readers who do not see colours. */
function patterns() {
  const stripe = svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 6, height: 6, class: "near soft" }), svg("rect", { width: 3.4, height: 6, class: "near" }));
  const dots = svg("pattern", { id: "dots", width: 6, height: 6, patternUnits: "userSpaceOnUse" },
    svg("rect", { width: 6, height: 6, class: "out soft" }), svg("circle", { cx: 3, cy: 3, r: 1.7, class: "out" }));
  return svg("defs", {}, stripe, dots);
}

const SIGNS = { in: "●", near: "◐", out: "○" };
const FILLS = { near: "url(#hatch)", out: "url(#dots)" };

/**
 * Draw the chart into `box`.
 *
 * `devices`: [{device, latency_s, lower_s, upper_s, domain}], without devices that have no latency;
 * `options`: {title, scale: "linear" | "log", unit, chosen, pick(device)}.
 */
export function drawBars(box, devices, { title, scale, unit, chosen, pick }) {
  const width = box.clientWidth, narrow = width < NARROW;
  const rows = [...devices].sort((a, b) => a.latency_s - b.latency_s);
  const label = narrow ? 0 : Math.min(200, 14 + 7.6 * Math.max(...rows.map((r) => r.device.length)));
  const values = narrow ? 0 : 176;
  const rowHeight = narrow ? 50 : 34, height = rows.length * rowHeight + AXIS;
  const from = label + 8, to = width - values - 14;
  const highest = Math.max(...rows.map((r) => r.upper_s)), lowest = Math.min(...rows.map((r) => r.lower_s));
  const wanted = Math.max(2, Math.floor((to - from) / 78));
  const axis = scale === "linear" ? linear(highest, from, to, wanted) : log(lowest, highest, from, to, wanted);
  const fixed = unit === "auto" && scale === "linear" ? latency(axis.top).split(" ")[1] : unit;

  const chart = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", class: "bars",
    "aria-label": `${title}, ${rows.length} devices, fastest first: ${rows.map((r) => `${r.device} ${latency(r.latency_s, unit)}, ${r.domain ?? "no domain"}`).join("; ")}` }, patterns());
  for (const value of axis.ticks) {
    const x = axis.at(value);
    chart.append(svg("line", { class: "grid", x1: x, x2: x, y1: 0, y2: height - AXIS + 4 }),
      svg("text", { class: "tick", x, y: height - 8, "text-anchor": x > width - 24 ? "end" : "middle" }, tick(value, fixed)));
  }
  rows.forEach((row, i) => chart.append(bar(row, i)));
  box.replaceChildren(chart);

  function bar(row, i) {
    const top = i * rowHeight, middle = top + (narrow ? 33 : rowHeight / 2);
    const [x, low, high] = [row.latency_s, row.lower_s, row.upper_s].map((v) => axis.at(v));
    const group = svg("g", { class: row.device === chosen ? "row chosen" : "row", onclick: () => pick(row.device) },
      svg("rect", { class: "band", x: 0, y: top + 1, width, height: rowHeight - 2, rx: 6 }));
    const start = scale === "linear" ? axis.at(0) : from;
    if (scale === "linear") {
      group.append(svg("rect", { class: row.domain === "in" ? "in" : null, x: start, y: middle - BAR / 2, rx: 2, height: BAR,
        width: Math.max(1, x - start), fill: FILLS[row.domain] }));
    } else {
      group.append(svg("line", { class: `stem ${row.domain ?? ""}`, x1: start, x2: x, y1: middle, y2: middle }));
    }
    group.append(svg("line", { class: "whisker", x1: low, x2: high, y1: middle, y2: middle }),
      ...[low, high].map((v) => svg("line", { class: "whisker", x1: v, x2: v, y1: middle - 5, y2: middle + 5 })));
    if (scale === "log") {
      group.append(svg("circle", { class: `dot ${row.domain ?? ""}`, cx: x, cy: middle, r: 6 }));
    }
    const time = latency(row.latency_s, unit);
    const name = (attributes) => svg("text", { class: "name", ...attributes }, row.device);
    const mark = svg("tspan", { class: `domain ${row.domain ?? ""}` }, row.domain ? `${SIGNS[row.domain]} ${row.domain}` : "");
    if (narrow) {
      group.append(name({ x: 8, y: top + 18 }),
        svg("text", { class: "value", x: width - 8, y: top + 18, "text-anchor": "end" }, `${time}  `, mark));
    } else {
      group.append(name({ x: label, y: middle + 4.5, "text-anchor": "end" }),
        svg("text", { class: "value", x: width - values + 66, y: middle + 4.5, "text-anchor": "end" }, time),
        svg("text", { class: "bounds", x: width - values + 76, y: middle - 1.5 }, interval(row.lower_s, row.upper_s, unit)),
        svg("text", { class: "bounds", x: width - values + 76, y: middle + 11.5 }, mark));
    }
    group.append(svg("title", {}, `${row.device}: ${time}, ${interval(row.lower_s, row.upper_s, unit)}, ${row.domain ?? "no domain"}`));
    return group;
  }
}

/** The values of the chart as a table. */
export function barsTable(devices, unit) {
  const rows = [...devices].sort((a, b) => (a.latency_s ?? Infinity) - (b.latency_s ?? Infinity)).map((d) =>
    html("tr", { "data-device": d.device },
      html("th", { scope: "row" }, d.device),
      html("td", { class: "figure", "data-key": "latency" }, latency(d.latency_s, unit)),
      html("td", { class: "figure", "data-key": "interval" }, interval(d.lower_s, d.upper_s, unit)),
      html("td", {}, domainMark(d.domain)),
      html("td", { class: "figure" }, `${d.launches_predicted} of ${d.launches}`)));
  return html("table", {},
    tableHead(["device", "latency", "interval", " domain", "launches"]),
    html("tbody", {}, ...rows));
}
