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
 * Draw the chart into `box`.
 *
 * `series`: [{device, index, points: [{x, latency_s, lower_s, upper_s, fitted_s, domain}]}], without errors;
 * `options`: {axis: name of the size, unit, at: the selected size, read(x)}.
 */
export function drawCurve(box, series, { axis, unit, at, read }) {
  const width = box.clientWidth, height = Math.round(Math.min(440, Math.max(280, width * 0.5)));
  const labels = width >= 620 && series.length <= 10;
  const longest = Math.max(...series.map((s) => s.device.length));
  const right = labels ? Math.min(180, 18 + 7 * longest) : 14;
  const points = series.flatMap((s) => s.points);
  const sizes = [...new Set(points.map((p) => p.x))].sort((a, b) => a - b);
  const x = powers(sizes, LEFT + 8, width - right - 8, width < 560 ? 46 : 40);
  const y = log(Math.min(...points.map((p) => p.lower_s)), Math.max(...points.map((p) => p.upper_s)),
    height - AXIS, 8, Math.floor(height / 44));

  const chart = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", class: "curve",
    "aria-label": `Latency over ${axis} from ${sizes[0]} to ${sizes.at(-1)} for ${series.length} devices; the slider below selects a size` });
  for (const value of y.ticks) {
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: width - right, y1: y.at(value), y2: y.at(value) }),
      svg("text", { class: "tick", x: LEFT - 8, y: y.at(value) + 4, "text-anchor": "end" }, tick(value, unit)));
  }
  for (const value of x.ticks) {
    chart.append(svg("line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: 8, y2: height - AXIS }),
      svg("text", { class: "tick", x: x.at(value), y: height - AXIS + 18, "text-anchor": "middle" }, size(value)));
  }
  chart.append(svg("text", { class: "title", x: (LEFT + width - right) / 2, y: height - 6, "text-anchor": "middle" }, axis));
  const cursor = svg("line", { class: "cursor", x1: x.at(at), x2: x.at(at), y1: 8, y2: height - AXIS });
  chart.append(...series.map(band), cursor, ...series.map(line));
  if (labels) chart.append(...ends());
  // The pointer selects a size; the slider does the same for keyboards.
  chart.addEventListener("pointermove", (event) => {
    const px = event.clientX - chart.getBoundingClientRect().left;
    read(sizes.reduce((best, s) => (Math.abs(x.at(s) - px) < Math.abs(x.at(best) - px) ? s : best)));
  });
  box.replaceChildren(chart);
  return (value) => ["x1", "x2"].forEach((end) => cursor.setAttribute(end, x.at(value)));

  function band({ index, points: row }) {
    const upper = row.map((p) => [x.at(p.x), y.at(p.upper_s)]), lower = row.map((p) => [x.at(p.x), y.at(p.lower_s)]);
    return svg("path", { class: `band series s${index % 8}`, d: `${path([...upper, ...lower.reverse()])}Z` });
  }
  function line({ device, index, points: row }) {
    return svg("g", { class: `series s${index % 8}` }, svg("title", {}, device),
      svg("path", { class: "line", d: path(row.map((p) => [x.at(p.x), y.at(p.fitted_s)])) }),
      ...row.map((p) => svg("path", { class: `mark ${p.domain}`, d: SHAPES[index % SHAPES.length](3.6),
        transform: `translate(${x.at(p.x).toFixed(1)},${y.at(p.latency_s).toFixed(1)})` })));
  }
  function ends() {
    const labelled = series.map((s) => ({ ...s, y: y.at(s.points.at(-1).fitted_s) })).sort((a, b) => a.y - b.y);
    // Move overlapping names apart, then move the column back into the chart.
    for (let i = 1; i < labelled.length; i++) labelled[i].y = Math.max(labelled[i].y, labelled[i - 1].y + 15);
    const over = Math.max(0, (labelled.at(-1)?.y ?? 0) - (height - AXIS));
    return labelled.map((s) => svg("text", { class: `end series s${s.index % 8}`, x: width - right, y: s.y - over + 4 }, s.device));
  }
}

/** Values at the selected size: one row per device. */
export function readout(series, x, axis, unit) {
  const rows = series.map((s) => ({ ...s, point: s.points.find((p) => p.x === x) })).filter((s) => s.point)
    .sort((a, b) => a.point.latency_s - b.point.latency_s);
  return html("table", {},
    tableHead(["device", "latency", " domain", "interval", "monotone fit", `${axis} per second`]),
    html("tbody", {}, ...rows.map(({ device, index, point: p }) => html("tr", { "data-device": device },
      html("th", { scope: "row" }, seriesMark(index), ` ${device}`),
      html("td", { class: "figure", "data-key": "latency" }, latency(p.latency_s, unit)),
      html("td", {}, domainMark(p.domain)),
      html("td", { class: "figure" }, interval(p.lower_s, p.upper_s, unit)),
      html("td", { class: "figure" }, latency(p.fitted_s, unit)),
      html("td", { class: "figure" }, perSecond(x / p.fitted_s))))));
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
