// Formatting of numbers. The service uses seconds; only displayed values are scaled.
// The rule is that of cdmpp/utils/units.py (three significant digits, no exponent), so that the page, the command
// line and the notebooks print equal values equally.

const UNITS = [[1e-9, "ns"], [1e-6, "µs"], [1e-3, "ms"], [1, "s"]];

export function threeDigits(value) {
  if (value === 0) return "0";
  const decimals = Math.min(100, Math.max(0, 2 - Math.floor(Math.log10(value))));
  const text = value.toFixed(decimals);
  // 9.999 rounds to 10.00: four digits. Format the rounded value once more.
  const carried = Math.floor(Math.log10(Number(text))) > Math.floor(Math.log10(value));
  return decimals && carried ? value.toFixed(decimals - 1) : text;
}

/** Scale and name of the unit in which `seconds` has one to three digits before the point. */
export function unitOf(seconds) {
  return UNITS.find(([scale, name]) => seconds / scale < 999.5 || name === "s");
}

/** "31.2 µs"; with `unit` ("s", "ms", "µs"): in that unit. */
export function latency(seconds, unit = "auto") {
  if (!Number.isFinite(seconds) || seconds < 0) return "–";
  if (seconds === 0) return "0 s";
  const [scale, name] = UNITS.find(([, n]) => n === unit) ?? unitOf(seconds);
  return `${threeDigits(seconds / scale)} ${name}`;
}

/** "[29.0, 34.1] µs": both bounds in the unit of the upper one. */
export function interval(lower, upper, unit = "auto") {
  const [scale, name] = UNITS.find(([, n]) => n === unit) ?? unitOf(upper);
  return `[${threeDigits(lower / scale)}, ${threeDigits(upper / scale)}] ${name}`;
}

export function percent(fraction) {
  if (!Number.isFinite(fraction)) return "–";
  const value = 100 * fraction;
  return `${value !== 0 && Math.abs(value) < 9.95 ? value.toFixed(1) : value.toFixed(0)} %`;
}

export function whole(count) {
  return Number.isFinite(count) ? Math.round(count).toLocaleString("en-US") : "–";
}

/** "1 program", "3 programs". */
export function counted(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}
