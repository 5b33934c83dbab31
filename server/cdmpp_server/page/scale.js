// Axes of the charts: positions of values, and ticks.

import { latency, threeDigits } from "./units.js";

/** A linear scale from 0 to at least `high`; ticks at 1, 2 or 5 times a power of ten. */
export function linear(high, from, to, wanted = 5) {
  const rough = high / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((s) => s * power >= rough) * power;
  const top = Math.ceil(high / step - 1e-9) * step;
  const ticks = Array.from({ length: Math.round(top / step) + 1 }, (_, i) => i * step);
  return { at: (v) => from + ((to - from) * v) / top, ticks, top };
}

/** A logarithmic scale that holds `low` and `high`. */
export function log(low, high, from, to, wanted = 6) {
  const [a, b] = [Math.log10(low), Math.log10(high)];
  // A margin on both sides, even if all values are equal.
  const margin = Math.max(0.04 * (b - a), 0.06), bottom = a - margin, top = b + margin;
  const at = (v) => from + ((to - from) * (Math.log10(v) - bottom)) / (top - bottom);
  const inside = (v) => Math.log10(v) >= bottom && Math.log10(v) <= top;
  const decades = Array.from({ length: Math.ceil(top) - Math.floor(bottom) + 1 }, (_, i) => Math.floor(bottom) + i);
  const choose = (steps, every = 1) => decades.filter((d) => d % every === 0)
    .flatMap((d) => steps.map((s) => s * 10 ** d)).filter(inside);
  // The densest set of ticks with at most the wanted number.
  const sets = [[[1, 2, 3, 5]], [[1, 2, 5]], [[1, 3]], [[1]], [[1], 2], [[1], 3]].map((s) => choose(...s));
  return { at, ticks: sets.find((s) => s.length <= wanted) ?? sets.at(-1) };
}

/** Powers of two among `values`' range, thinned until they fit. */
export function powers(values, from, to, least = 34) {
  const [low, high] = [Math.log2(values[0]), Math.log2(values.at(-1))];
  const span = Math.max(high - low, 1e-9);
  const at = (v) => (high === low ? (from + to) / 2 : from + ((to - from) * (Math.log2(v) - low)) / span);
  const every = Math.max(1, Math.ceil(least / ((to - from) / span)));
  const ticks = [];
  for (let p = Math.ceil(low); p <= high; p++) if ((p - Math.ceil(low)) % every === 0) ticks.push(2 ** p);
  return { at, ticks: ticks.length ? ticks : [values[0]] };
}

/** Text of a tick, such as "10 µs"; a selected unit is kept. */
export function tick(seconds, unit) {
  const text = seconds === 0 ? "0" : latency(seconds, unit);
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

/** Text of a size: 1, 512, 8192, 16 Ki, 1 Mi, because most sizes are powers of two. */
export function size(value) {
  for (const [scale, prefix] of [[2 ** 30, "Gi"], [2 ** 20, "Mi"], [2 ** 10, "Ki"]]) {
    if (value > 8192 && value >= scale && value % scale === 0) return `${threeDigits(value / scale).replace(/\.0+$/, "")} ${prefix}`;
  }
  return String(value);
}
