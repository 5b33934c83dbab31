// Serving under load: time between tokens against throughput, one line per device and one mark per concurrency.

import { chartFrame, endLabels, intervalBand, readoutTable, seriesLine } from "./curve.js";
import { inTurn, rate, simulate } from "./estimates.js";
import { log, tick } from "./scale.js";
import { interval, latency, percent } from "./units.js";

/** Loads of the curve below the query's: powers of two, or parts of the rate. */
function smallerLoads({ size, byRate }) {
  if (byRate) return [8, 4, 2].map((part) => Number((size / part).toPrecision(3)));
  const sizes = [];
  for (let n = 1; n < size; n *= 2) sizes.push(n);
  return sizes;
}

/** Axis of the curve: none for one batch, or where there is no time between tokens. */
export function loadAxes({ serving, size, byRate, options }) {
  return serving && options.output > 1 ? [{ name: byRate ? "requests per second" : "concurrency", value: size }] : [];
}

function point(device, x, served, domain) {
  if (served.error) return { device, x, error: served.error };
  const mean = served.tpot_s.mean;
  return { device, x, domain, served, latency_s: mean, fitted_s: mean, lower_s: mean * served.relative_lower, upper_s: mean * served.relative_upper };
}

/**
 * The curve in the form of `askCurve`; `rows` have the highest load. `arrived(curve, load)` is called with the points so
 * far, before those of each smaller load.
 */
export async function askLoad(query, rows, signal, arrived) {
  const devices = rows.filter((r) => r.estimate);
  const points = devices.map((r) => point(r.device, query.size, r.served ?? r, r.estimate.domain));
  const curve = () => {
    const good = points.filter((p) => !p.error).sort((a, b) => a.x - b.x);
    const series = rows.map(({ device }, index) => ({ device, index, points: good.filter((p) => p.device === device) }));
    return { series: series.filter((s) => s.points.length), faults: points.filter((p) => p.error) };
  };
  for (const size of smallerLoads(query)) {
    arrived(curve(), size);
    await inTurn(devices, async ({ device, estimate }) =>
      points.push(point(device, size, await simulate(query, device, size, signal), estimate.domain)));
  }
  return curve();
}

/** Draw the chart into `box`; parameters are those of `drawCurve`. */
export function drawLoad(box, series, { axis, unit, at, read }) {
  const points = series.flatMap((s) => s.points), rates = points.map((p) => p.served.throughput_tokens_per_s);
  const label = `Time per token against tokens per second for ${series.length} devices, ${axis} from `
    + `${Math.min(...points.map((p) => p.x))} to ${Math.max(...points.map((p) => p.x))}; the slider below selects a ${axis}`;
  const { chart, x, y, labels, bottom } = chartFrame(box, series, { title: "tokens per second", label,
    horizontal: (from, to) => log(Math.min(...rates), Math.max(...rates), from, to, Math.max(2, Math.floor((to - from) / 70))),
    text: (value) => rate(value).replace(/\.0+$/, ""), vertical: (value) => tick(value, unit) });
  const place = (p, key) => [x.at(p.served.throughput_tokens_per_s), y.at(p[key])];
  const nextTo = (p, [left, top] = place(p, "latency_s")) => [left + 10, top];
  const lines = series.map((s) => seriesLine(s, place, (p) =>
    `${s.device}, ${axis} ${p.x}: ${latency(p.latency_s, unit)}, ${rate(p.served.throughput_tokens_per_s)} tokens/s`));
  chart.append(...series.map((s) => intervalBand(s, place)), ...lines);
  if (labels) chart.append(...endLabels(series, (s) => nextTo(s.points.at(-1)), bottom));
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), pointer = [event.clientX - box.left, event.clientY - box.top];
    const distance = (p) => Math.hypot(...place(p, "latency_s").map((v, i) => v - pointer[i]));
    read(points.reduce((best, p) => (distance(p) < distance(best) ? p : best)).x);
  });
  box.replaceChildren(chart);
  const move = (value) => series.forEach((s, i) => lines[i].querySelectorAll(".mark").forEach((mark, j) =>
    mark.classList.toggle("chosen", s.points[j].x === value)));
  move(at);
  return move;
}

/** Values at the selected concurrency: one row per device, most tokens per second first. */
export function loadReadout(series, x, axis, unit) {
  return readoutTable(series, x, (a, b) => b.served.throughput_tokens_per_s - a.served.throughput_tokens_per_s, [
    { name: "per token", key: "tpot", value: (p) => latency(p.latency_s, unit) },
    { name: "interval", value: (p) => interval(p.lower_s, p.upper_s, unit) },
    ...["p50", "p99"].map((end) => ({ name: end, key: `tpot-${end}`, value: (p) => latency(p.served.tpot_s[end], unit) })),
    { name: "first token", key: "ttft", value: (p) => latency(p.served.ttft_s.mean, unit) },
    ...["p50", "p99"].map((end) => ({ name: end, key: `ttft-${end}`, value: (p) => latency(p.served.ttft_s[end], unit) })),
    { name: "queue", value: (p) => latency(p.served.queue_s.mean, unit) },
    { name: "tokens/s", key: "rate", value: (p) => rate(p.served.throughput_tokens_per_s) },
    ...(series.some((s) => s.points[0].served.gpus > 1)
      ? [{ name: "per GPU", value: (p) => rate(p.served.throughput_tokens_per_s_per_gpu) }] : []),
    { name: "cache", value: (p) => percent(p.served.cache_share) }]);
}

/** Points for the CSV export. */
export function loadRecords(series, axis) {
  return series.flatMap((s) => s.points.map(({ x, domain, latency_s, lower_s, upper_s, served }) => ({
    device: s.device, [axis]: x, tpot_s: latency_s, tpot_lower_s: lower_s, tpot_upper_s: upper_s, tpot_p50_s: served.tpot_s.p50,
    tpot_p99_s: served.tpot_s.p99, ttft_s: served.ttft_s.mean, ttft_p50_s: served.ttft_s.p50, ttft_p99_s: served.ttft_s.p99,
    latency_s: served.latency_s.mean, queue_s: served.queue_s.mean, throughput_tokens_per_s: served.throughput_tokens_per_s,
    gpus: served.gpus, cache_share: served.cache_share, preemptions: served.preemptions, domain })));
}
