// Answers for a language model: the requests, the table by device, and the parts of one device.

import { call } from "./api.js";
import { domainMark, errorText, html, tableHead } from "./dom.js";
import { latency, interval, threeDigits, whole } from "./units.js";

/** Durations that the bars may show: key of the values, title, and the words after the duration in the headline. */
export const DURATIONS = {
  tpot: ["Time per token", " per token"],
  ttft: ["Time to first token", " to the first token"],
  total: ["Time for all tokens", " for all tokens"],
};

/** Seconds that the page waits for one device. */
const DEADLINE_S = 120;

/** Call `work(item)` for one item after the other: a simulation is over a thousand predictions, and the service bounds what waits. */
export async function inTurn(items, work) {
  for (const item of items) await work(item);
}

/** The answer for one device, or {error} where the service refuses the device or the load, or does not answer in time. */
async function ofDevice(path, json, signal) {
  const deadline = AbortSignal.timeout(1e3 * DEADLINE_S);
  for (;;) {
    try {
      return await call(path, { json, signal: AbortSignal.any([signal, deadline]) });
    } catch (error) {
      if (signal.aborted) throw error;
      if (deadline.aborted) return { error: { code: "timeout", message: `No answer came within ${DEADLINE_S} s`, hint: "reduce the load or the tokens" } };
      if (![429, 503].includes(error.status)) {
        if (![409, 504].includes(error.status)) throw error;
        return { error: { code: error.code, message: error.message, hint: error.hint } };
      }
      await new Promise((done) => setTimeout(done, 1e3 * error.wait_s));
    }
  }
}

/** One simulation of serving at `size` requests in flight, or per second. */
export function simulate({ config, options, byRate }, device, size, signal) {
  return ofDevice("/llm/simulate", { config, device, [byRate ? "rate" : "concurrency"]: size, ...options }, signal);
}

function values(estimate, served) {
  if (served) {
    const bounds = (mean) => [mean, mean * served.relative_lower, mean * served.relative_upper];
    return { tpot: served.tpot_s && bounds(served.tpot_s.mean), ttft: bounds(served.ttft_s.mean),
      total: bounds(served.latency_s.mean), rate: served.throughput_tokens_per_s };
  }
  const bounds = (key) => estimate[`${key}_s`] === null ? null : ["_s", "_lower_s", "_upper_s"].map((end) => estimate[key + end]);
  return { tpot: bounds("tpot"), ttft: bounds("ttft"), total: bounds("total"), rate: estimate.throughput_tokens_per_s };
}

/**
 * Estimate a language model: {workload: text, goals, rows: [{device, estimate, served, values, error}]}.
 *
 * `estimate` is the answer of POST /llm for one batch. With `serving`, `served` is the answer of POST /llm/simulate and
 * gives the values. A batch that does not fit at once can be served, because requests wait: then `estimate` is that of
 * one request. `arrived(result)` is called with the devices so far after each of them.
 */
export async function askEstimates(query, devices, signal, arrived) {
  const { config, options, batch, size, serving, goals } = query, rows = new Map();
  const estimate = async (device, sequences) => {
    const answer = await ofDevice("/llm", { config, devices: [device], batch: sequences, ...options }, signal);
    return answer.error ? answer : answer.answers[0];
  };
  const result = () => {
    const some = devices.map((device) => rows.get(device)).filter(Boolean);
    return { rows: some, goals, workload: workload(query, some) };
  };
  await inTurn(devices, async (device) => {
    let answer = await estimate(device, batch);
    if (answer.error && serving && batch > 1) answer = await estimate(device, 1);
    const served = serving && !answer.error ? await simulate(query, device, size, signal) : null;
    const error = answer.error ?? served?.error;
    rows.set(device, { device, estimate: answer.error ? null : answer, served: error ? null : served, error,
      values: error ? null : values(answer, served) });
    if (!signal.aborted) arrived(result());
  });
  return result();
}

/** Rows as the bars need them: the chosen duration as latency; the first token if there is no other. */
export function durations(rows, chosen) {
  return rows.map(({ device, estimate, error, values: v }) => {
    const [latency_s, lower_s, upper_s] = (v && (v[chosen] ?? v.ttft)) ?? [null, null, null];
    return { device, latency_s, lower_s, upper_s, domain: error ? undefined : estimate.domain, error };
  });
}

/** The duration that `durations` shows. */
export const shownDuration = (rows, chosen) => (rows.some((r) => r.values?.[chosen]) ? chosen : "ttft");

const gigabytes = (bytes) => `${threeDigits(bytes / 1e9)} GB`;

function memory(estimate, served) {
  const { total, device, ...parts } = estimate.memory_bytes;
  const title = Object.entries(parts).map(([name, bytes]) => `${name.replace("_", " ")} ${gigabytes(bytes)}`).join(", ");
  return [html("span", { title }, gigabytes(total)), device ? html("span", { class: "hint" }, `of ${gigabytes(device)}`) : null,
    served && estimate.batch === 1 ? html("span", { class: "hint" }, "one request") : null];
}

/** p50 and p99 over the requests, and whether p99 (of one batch: `value_s`) keeps the goal. */
function spread(key, value_s, served, goals, unit) {
  const s = served?.[`${key}_s`], goal_s = goals[key], hint = (text) => html("span", { class: "hint" }, text);
  const kept = (s ? s.p99 : value_s) <= goal_s ? "kept" : "missed";
  return [...(s ? ["p50", "p99"].map((end) => hint(`${end} ${latency(s[end], unit)}`)) : []),
    goal_s > 0 && value_s ? hint(`goal ${latency(goal_s, unit)} ${kept}`) : null];
}

/** The table by device, fastest token first. */
export function estimateTable({ rows, goals }, unit) {
  const time = (bounds) => (bounds ? [latency(bounds[0], unit), html("span", { class: "hint" }, interval(bounds[1], bounds[2], unit))] : "–");
  const order = (row) => (row.values?.tpot ?? row.values?.ttft)?.[0] ?? Infinity;
  const cell = (label, attributes, ...children) => html("td", { role: "cell", "data-label": label, ...attributes }, ...children);
  const body = [...rows].sort((a, b) => order(a) - order(b)).map(({ device, estimate, served, values: v, error }) => {
    const name = html("th", { scope: "row", role: "rowheader" }, device);
    if (error) return html("tr", { role: "row", "data-device": device }, name, html("td", { role: "cell", colspan: 6 }, errorText(error)));
    // The engine is the same in all rows and stands above the table.
    const reason = estimate.domain_reason.replace(/^engine [^;]*; /, ""), [part] = reason.split(": ");
    return html("tr", { role: "row", "data-device": device }, name,
      cell("first token", { class: "figure", "data-key": "ttft" }, time(v.ttft), spread("ttft", v.ttft?.[0], served, goals, unit)),
      cell("per token", { class: "figure", "data-key": "tpot" }, time(v.tpot), spread("tpot", v.tpot?.[0], served, goals, unit)),
      cell("tokens/s", { class: "figure", "data-key": "rate" }, rate(v.rate)),
      cell("memory per GPU", { class: "figure", "data-key": "memory" }, memory(estimate, served)),
      cell("GPUs", { class: "figure", "data-key": "gpus" }, String(estimate.gpus)),
      cell("domain", { class: "reason" }, domainMark(estimate.domain, reason), html("span", { class: "hint" }, part)));
  });
  return html("table", { role: "table", class: "estimates" },
    tableHead(["device", "first token", "per token", "tokens/s", "memory per GPU", "GPUs", " domain"], { role: "columnheader" }),
    html("tbody", { role: "rowgroup" }, ...body));
}

/** Tokens per second: whole from 100 on. */
export const rate = (value) => (value >= 99.95 ? whole(value) : threeDigits(value));

/** What was estimated, such as "llama, 8.03 billion parameters, engine vllm: ...". */
function workload({ size, byRate, serving, options }, rows) {
  const estimate = rows.find((r) => r.estimate)?.estimate;
  const model = estimate ? [`${estimate.model_type}, ${threeDigits(estimate.parameters / 1e9)} billion parameters`] : [];
  const load = byRate ? `${size} requests per second (means, p50 and p99)`
    : serving ? `${whole(size)} concurrent requests (means, p50 and p99)` : `one batch of ${whole(size)}`;
  return [...model, `engine ${options.engine}`, load, `${whole(options.input)} tokens of prompt and ${whole(options.output)} of answer`].join("; ");
}

/** Remarks of the answers, each once, with the devices if it holds for some of them only and does not name them. */
export function remarks(rows) {
  const estimates = rows.filter((r) => r.estimate), found = new Map();
  for (const { device, estimate } of estimates) {
    for (const text of [...estimate.remarks, ...estimate.left_out.map((part) => `not included: ${part}`)]) {
      found.set(text, [...(found.get(text) ?? []), device]);
    }
  }
  return [...found].map(([text, devices]) => html("li", {},
    devices.length < estimates.length && !devices.every((d) => text.includes(d)) ? `${devices.join(", ")}: ${text}` : text));
}

/** Parts of an estimate in the form of programs (programs.js). */
export function parts(estimate) {
  const programs = estimate.parts.map(({ phase, name, operator, count, seconds }) => ({
    name: `${name}:${phase},${operator}`, count, answers: [{ device: estimate.device, latency_s: seconds / count }] }));
  return { programs, unsupported: [] };
}

/** Rows for the CSV export. */
export function estimateRecords(rows) {
  return rows.map(({ device, estimate, served, values: v, error }) => {
    const spread = (name) => ({ [`${name}_p50_s`]: served?.[`${name}_s`]?.p50, [`${name}_p99_s`]: served?.[`${name}_s`]?.p99 });
    const ends = (name, bounds) => ({ [`${name}_s`]: bounds?.[0], [`${name}_lower_s`]: bounds?.[1], [`${name}_upper_s`]: bounds?.[2] });
    return { device, ...ends("ttft", v?.ttft), ...ends("tpot", v?.tpot), ...ends("total", v?.total), ...spread("ttft"), ...spread("tpot"), throughput_tokens_per_s: v?.rate,
      memory_bytes: estimate?.memory_bytes.total, gpus: estimate?.gpus, domain: estimate?.domain,
      domain_reason: estimate?.domain_reason, error: error?.message };
  });
}
