// Chart of latency over one size, on two logarithmic axes. A cost that is proportional to the size is a straight
// line; at the flat left end, the launch dominates.

import { domainMark, html, svg, tableHead } from "./dom.js";
import { log, powers, size, tick } from "./scale.js";
import { interval, latency, threeDigits } from "./units.js";

const AXIS = 44, LEFT = 62;
/** Shapes of the marks, which distinguish the lines without colours, scaled by the radius. */
const SHAPES = [
  (r) => `M${-r},0a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0Z`,
  (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}Z`,
  (r) => `M0,${-1.25 * r}L${1.2 * r},${0.9 * r}H${-1.2 * r}Z`,
  (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0Z`,
  (r) => `M0,${1.25 * r}L${1.2 * r},${-0.9 * r}H${-1.2 * r}Z`,
  (r) => cross(r, 0),
  (r) => polygon([0, 1, 2, 3, 4, 5].map((i) => polar(1.15 * r, 60 * i))),
  (r) => cross(r, 45),
];
const polar = (r, degrees) => [r * Math.cos((degrees * Math.PI) / 180), r * Math.sin((degrees * Math.PI) / 180)];
const polygon = (points) => `M${points.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join("L")}Z`;
/** A plus sign of the same area as the other shapes, turned by `turn` degrees. */
const cross = (r, turn) => polygon([0, 90, 180, 270].flatMap((quarter) =>
  [[1.4 * r, quarter - 19], [1.4 * r, quarter + 19], [0.62 * r, quarter + 45]].map(([d, a]) => polar(d, a + turn))));
const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

/** Mark of the i-th line, for legends and tables. */
export function seriesMark(i) {
  return svg("svg", { width: 26, height: 12, class: `series s${i % 8}`, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, class: "line" }),
    svg("path", { d: SHAPES[i % SHAPES.length](4), class: "mark in", transform: "translate(13,6)" }));
}

/**
 * Frame of a chart with one line per device and the latency upwards: {chart, x, y, labels, width, right, bottom}.
 *
 * `horizontal(from, to)` makes the scale of the other axis, `text(v)` and `vertical(v)` the texts of the ticks. `labels`:
 * whether there is room for the names of the lines.
 */
export function chartFrame(box, series, { title, label, horizontal, text, vertical }) {
  const width = box.clientWidth, height = Math.round(Math.min(440, Math.max(280, width * 0.5))), bottom = height - AXIS;
  const labels = width >= 620 && series.length <= 10;
  const right = labels ? Math.min(180, 18 + 7 * Math.max(...series.map((s) => s.device.length))) : 14;
  const points = series.flatMap((s) => s.points);
  const x = horizontal(LEFT + 8, width - right - 8);
  const y = log(Math.min(...points.map((p) => p.lower_s)), Math.max(...points.map((p) => p.upper_s)),
    bottom, 8, Math.floor(height / 44));

  const chart = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", class: "curve", "aria-label": label });
  for (const value of y.ticks) {
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: width - right, y1: y.at(value), y2: y.at(value) }),
      svg("text", { class: "tick", x: LEFT - 8, y: y.at(value) + 4, "text-anchor": "end" }, vertical(value)));
  }
  for (const value of x.ticks) {
    chart.append(svg("line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: 8, y2: bottom }),
      svg("text", { class: "tick", x: x.at(value), y: bottom + 18, "text-anchor": "middle" }, text(value)));
  }
  chart.append(svg("text", { class: "title", x: (LEFT + width - right) / 2, y: height - 6, "text-anchor": "middle" }, title));
  return { chart, x, y, labels, width, right, bottom };
}

/** Band of the intervals; `place(point, key)` gives the position of one of its values. */
export function intervalBand({ index, points }, place) {
  const upper = points.map((p) => place(p, "upper_s")), lower = points.map((p) => place(p, "lower_s"));
  return svg("path", { class: `band series s${index % 8}`, d: `${path([...upper, ...lower.reverse()])}Z` });
}

/** Line and marks of a device; `title(point)`, if given, is the text of a mark under the pointer. */
export function seriesLine({ device, index, points }, place, title = null) {
  return svg("g", { class: `series s${index % 8}` }, title ? null : svg("title", {}, device),
    svg("path", { class: "line", d: path(points.map((p) => place(p, "fitted_s"))) }),
    ...points.map((p) => svg("path", { class: `mark ${p.domain}`, d: SHAPES[index % SHAPES.length](3.6),
      transform: `translate(${place(p, "latency_s").map((v) => v.toFixed(1)).join(",")})` }, title ? svg("title", {}, title(p)) : null)));
}

/** Names of the lines; `end(series)` is the position of a line's end, `bottom` the lowest position. */
export function endLabels(series, end, bottom) {
  const labelled = series.map((s) => ({ ...s, at: end(s) })).sort((a, b) => a.at[1] - b.at[1]);
  // Move overlapping names apart, then move the column back into the chart.
  for (let i = 1; i < labelled.length; i++) labelled[i].at[1] = Math.max(labelled[i].at[1], labelled[i - 1].at[1] + 15);
  const over = Math.max(0, (labelled.at(-1)?.at[1] ?? 0) - bottom);
  return labelled.map((s) => svg("text", { class: `end series s${s.index % 8}`, x: s.at[0], y: s.at[1] - over + 4 }, s.device));
}

/**
 * Draw the chart into `box`.
 *
 * `series`: [{device, index, points: [{x, latency_s, lower_s, upper_s, fitted_s, domain}]}], without errors;
 * `options`: {axis: name of the size, unit, at: the selected size, read(x)}. Returns a function that moves the selection.
 */
export function drawCurve(box, series, { axis, unit, at, read }) {
  const sizes = [...new Set(series.flatMap((s) => s.points.map((p) => p.x)))].sort((a, b) => a - b);
  const { chart, x, y, labels, width, right, bottom } = chartFrame(box, series, {
    title: axis, text: size, vertical: (value) => tick(value, unit),
    label: `Latency over ${axis} from ${sizes[0]} to ${sizes.at(-1)} for ${series.length} devices; the slider below selects a size`,
    horizontal: (from, to) => powers(sizes, from, to, box.clientWidth < 560 ? 46 : 40) });
  const place = (p, key) => [x.at(p.x), y.at(p[key])];
  const cursor = svg("line", { class: "cursor", x1: x.at(at), x2: x.at(at), y1: 8, y2: bottom });
  chart.append(...series.map((s) => intervalBand(s, place)), cursor, ...series.map((s) => seriesLine(s, place)));
  if (labels) chart.append(...endLabels(series, (s) => [width - right, y.at(s.points.at(-1).fitted_s)], bottom));
  // The pointer selects a size; the slider does the same for keyboards.
  chart.addEventListener("pointermove", (event) => {
    const px = event.clientX - chart.getBoundingClientRect().left;
    read(sizes.reduce((best, s) => (Math.abs(x.at(s) - px) < Math.abs(x.at(best) - px) ? s : best)));
  });
  box.replaceChildren(chart);
  return (value) => ["x1", "x2"].forEach((end) => cursor.setAttribute(end, x.at(value)));
}

/** Table of the values at `x`: one row per device, sorted by `order`; `columns`: [{name, key, value(point)}] after the device. */
export function readoutTable(series, x, order, columns) {
  const rows = series.map((s) => ({ ...s, point: s.points.find((p) => p.x === x) })).filter((s) => s.point)
    .sort((a, b) => order(a.point, b.point));
  return html("table", {},
    tableHead(["device", ...columns.map((c) => c.name)]),
    html("tbody", {}, ...rows.map(({ device, index, point }) => html("tr", { "data-device": device },
      html("th", { scope: "row" }, seriesMark(index), ` ${device}`),
      ...columns.map((c) => html("td", { class: c.name.startsWith(" ") ? null : "figure", "data-key": c.key }, c.value(point)))))));
}

/** Values at the selected size, fastest first. */
export function readout(series, x, axis, unit) {
  return readoutTable(series, x, (a, b) => a.latency_s - b.latency_s, [
    { name: "latency", key: "latency", value: (p) => latency(p.latency_s, unit) },
    { name: " domain", value: (p) => domainMark(p.domain) },
    { name: "interval", value: (p) => interval(p.lower_s, p.upper_s, unit) },
    { name: "monotone fit", value: (p) => latency(p.fitted_s, unit) },
    { name: `${axis} per second`, value: (p) => perSecond(x / p.fitted_s) }]);
}

function perSecond(rate) {
  for (const [scale, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (rate >= scale) return `${threeDigits(rate / scale)} ${prefix}`;
  }
  return threeDigits(rate);
}

/**
 * Non-decreasing least-squares fit of log latency (pool adjacent violators), as in POST /curve. It is used
 * for ONNX files, whose curve needs one request per point.
 */
export function monotone(latencies) {
  const pools = [];
  for (const value of latencies) {
    pools.push({ sum: Math.log(value), count: 1 });
    while (pools.length > 1 && pools.at(-2).sum / pools.at(-2).count > pools.at(-1).sum / pools.at(-1).count) {
      const last = pools.pop();
      pools.at(-1).sum += last.sum;
      pools.at(-1).count += last.count;
    }
  }
  return pools.flatMap(({ sum, count }) => Array(count).fill(Math.exp(sum / count)));
}
