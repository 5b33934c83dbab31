// Queries to the service; operators and ONNX files give results of one form:
// {model_id, devices: [{device, latency_s, lower_s, upper_s, domain, launches, launches_predicted}],
//  programs: [{name, count, answers: [{device, latency_s, ...} | {device, error}]}], unsupported: [...]}.

import { call } from "./api.js";
import { monotone } from "./curve.js";
import { DOMAIN_ORDER } from "./dom.js";
import { isBatch } from "./onnx.js";
import { axesOf, curveQuery } from "./operators.js";

/** Sizes of the axis for an ONNX file; each needs an upload. */
const ONNX_SIZES = [1, 2, 4, 8, 16, 32, 64];

/** Domain of a sum by the shares of its time, as cdmpp.model.domain.score.label_of_total. */
function domainOf(answers) {
  const seconds = (domain) => answers.reduce((s, a) => s + (a.domain === domain ? a.count * a.latency_s : 0), 0);
  const [inside, , outside] = DOMAIN_ORDER.map(seconds);
  const all = DOMAIN_ORDER.map(seconds).reduce((s, part) => s + part, 0);
  return inside >= 0.9 * all ? "in" : outside <= 0.1 * all ? "near" : "out";
}

/** Sums over the predicted launches; null if there is none. */
function totals(device, programs) {
  const answers = programs.map((p) => ({ count: p.count, ...p.answers.find((a) => a.device === device) }));
  const good = answers.filter((a) => !a.error);
  const sum = (key) => (good.length ? good.reduce((total, a) => total + a.count * a[key], 0) : null);
  const launches = (list) => list.reduce((total, a) => total + a.count, 0);
  return { device, latency_s: sum("latency_s"), lower_s: sum("lower_s"), upper_s: sum("upper_s"),
    domain: good.length ? domainOf(good) : undefined, launches: launches(answers), launches_predicted: launches(good) };
}

/** Predict operators by POST /predict. */
export async function askOperators(entries, { devices, protocol, framework }, signal) {
  const items = entries.flatMap(({ program }) => devices.map((device) =>
    ({ program, device, protocol, ...(framework && { framework }) })));
  const answer = await call("/predict", { json: { items }, signal });
  const programs = entries.map((entry, i) => {
    const answers = devices.map((device, j) => ({ device, ...answer.results[i * devices.length + j] }));
    // A failed item has no name: use the text of the operator.
    const name = answers.find((a) => a.name)?.name ?? operatorText(entry.program);
    return { name, count: entry.count, answers };
  });
  return { model_id: answer.model_id, programs, unsupported: [], devices: devices.map((d) => totals(d, programs)) };
}

function operatorText({ operator, ...fields }) {
  return `${operator}:${Object.entries(fields).map(([k, v]) => `${k}=${v}`).join(",")}`;
}

function upload(file, dims, { devices, protocol, framework }, signal) {
  const query = new URLSearchParams(devices.map((device) => ["device", device]));
  query.set("protocol", protocol);
  if (framework) query.set("framework", framework);
  for (const [name, size] of Object.entries(dims)) query.append("dim", `${name}=${size}`);
  return call(`/models/predict?${query}`, { bytes: file, signal });
}

/** Predict an ONNX file by POST /models/predict. */
export const askModel = upload;

/** Possible axes of the query's curve: [{name, value}]. */
export function curveAxes(query, support) {
  if (query.mode === "operators") return axesOf(query, support);
  const axes = Object.entries(query.dims).map(([name, value]) => ({ name, value }));
  return [...axes.filter((a) => isBatch(a.name)), ...axes.filter((a) => !isBatch(a.name))];
}

/** The curve over `axis`: {series: [{device, index, points}], faults: [{device, x, error}]}. */
export async function askCurve(query, axis, options, support, signal) {
  const points = query.mode === "operators"
    ? await operatorCurve(query, axis, options, support, signal)
    : await modelCurve(query, axis, options, signal);
  const good = points.filter((p) => !p.error);
  const series = options.devices.map((device, index) => ({ device, index, points: good.filter((p) => p.device === device) }));
  return { series: series.filter((s) => s.points.length), faults: points.filter((p) => p.error) };
}

async function operatorCurve(query, axis, { devices, protocol, framework }, support, signal) {
  const { programs, axes, name } = curveQuery(query, axis, devices.length, support);
  const json = { programs, axes, devices, protocol, ...(framework && { framework }) };
  const answer = await call("/curve", { json, signal });
  return answer.points.map((p) => ({ ...p, x: p.at[name] }));
}

async function modelCurve({ file, dims }, axis, options, signal) {
  const sizes = [...new Set([...ONNX_SIZES, axis.value])].sort((a, b) => a - b);
  const answers = [];
  // One at a time: the service has few processes that read files, and other clients use them too.
  for (const size of sizes) answers.push(await upload(file, { ...dims, [axis.name]: size }, options, signal));
  return options.devices.flatMap((device) => {
    const row = sizes.map((x, i) => ({ x, ...answers[i].devices.find((d) => d.device === device) }));
    const good = row.filter((p) => p.latency_s > 0);
    const fitted = monotone(good.map((p) => p.latency_s));
    return good.map((p, i) => ({ ...p, fitted_s: fitted[i] }));
  });
}
