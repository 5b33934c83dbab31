// Controller of the page: reads the form, sends one query at a time, updates the three views.

import { call } from "./api.js";
import { askCurve, askModel, askOperators, curveAxes } from "./ask.js";
import { barsTable, drawBars } from "./bars.js";
import { showCurve, shownCurve } from "./curves.js";
import { deviceList } from "./devices.js";
import { DOMAIN_ORDER, domainLegend, domainMark, errorText, find, html } from "./dom.js";
import { DURATIONS, askEstimates, durations, estimateRecords, estimateTable, parts, remarks, shownDuration } from "./estimates.js";
import { exportButtons } from "./export.js";
import { fileField } from "./file.js";
import { keyForm } from "./key.js";
import { languageModel } from "./llm.js";
import { askLoad, drawLoad, loadAxes, loadReadout, loadRecords } from "./load.js";
import { FORMS, example, readOperators } from "./operators.js";
import { programTable } from "./programs.js";
import { watch } from "./service.js";
import { counted, interval, latency, threeDigits } from "./units.js";

/** The initial query: one encoder layer of BERT-base over a batch of sentences. */
const LAYER = `# encoder layer of BERT-base, 128 tokens per sentence
tokens = 1024
4 × linear:m=tokens,n=768,k=768,bias=true
linear:m=tokens,n=3072,k=768,bias=true
linear:m=tokens,n=768,k=3072,bias=true
bmm:batch=ceil(tokens/128)*12,m=128,n=128,k=64
bmm:batch=ceil(tokens/128)*12,m=128,n=64,k=128
softmax:rows=ceil(tokens/128)*1536,cols=128
gelu:rows=tokens,cols=3072
2 × layernorm:rows=tokens,cols=768
2 × add:rows=tokens,cols=768`;
const MEANING = {
  kernel: "kernel (device only)", graph: "graph (captured)", eager: "eager (from the host)",
};

let support, devices, file, model, result = null, query = null, options = null, running = null;
/** Mode of the result. */
let shownMode = null;
let view = { device: null, picked: null, all: false };
/** Axis and size of a link, until the first curve is shown. */
let linked = {};

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const unit = () => find("unit").value;
/** Whether the result is that of a language model, and the duration that it shows. */
const isModel = () => Boolean(result.rows);
const duration = () => shownDuration(result.rows, find("duration").value);

function alarm(refusal) {
  const box = find("alert");
  box.hidden = !refusal;
  box.replaceChildren(...(refusal ? [errorText(refusal)] : []));
}

/** Show results of the selected mode only: not those of another mode, nor old ones below an error. */
function showResults() {
  find("results").classList.toggle("empty", !result || shownMode !== chosen("mode"));
}

/** Take an answer, or a part of it, and show it. */
function take(answer) {
  result = answer;
  shownMode = query.mode;
  if (isModel()) result.devices = durations(result.rows, find("duration").value);
  view = { ...view, device: pickDevice(result), all: false };
  showResults();
  show();
}

/** Read the form as a query; throws {message, hint} if something is missing, and shows faults beside the field. */
function readForm() {
  const mode = chosen("mode"), names = devices.chosen();
  find("text-faults").replaceChildren();
  if (!names.length) throw { message: "No device is selected.", hint: "Select one in the list, or search for it." };
  options = { devices: names, protocol: find("protocol").value, framework: find("framework").value };
  if (mode === "llm") return model.read();
  if (mode === "model") {
    const { bytes, dims } = file.read();
    return { mode, file: bytes, dims };
  }
  const read = readOperators(find("text").value, support);
  find("text-faults").replaceChildren(...read.faults.map((f) => html("li", {}, `line ${f.line}: ${f.message}`)));
  find("text").setAttribute("aria-invalid", String(read.faults.length > 0));
  if (!read.entries.length) throw { message: "There is no operator to predict.", hint: "Enter one, or select an example." };
  return { mode, ...read };
}

const ASK = {
  operators: (signal) => askOperators(query.entries, options, signal),
  model: (signal) => askModel(query.file, query.dims, options, signal),
  llm: (signal) => askEstimates(query, options.devices, signal, take),
};

async function predict() {
  running?.abort();
  const controller = (running = new AbortController());
  const results = find("results");
  alarm(null);
  try {
    query = readForm();
    results.setAttribute("aria-busy", "true");
    find("go").textContent = "Predicting …";
    take(await ASK[query.mode](controller.signal));
    saveQuery();
    await curve(controller.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    controller.abort();
    result = null;
    showResults();
    alarm(error);
  } finally {
    if (running === controller) {
      results.removeAttribute("aria-busy");
      find("go").textContent = "Predict";
    }
  }
}

/** Predict, and scroll to the results if the form fills the screen. */
async function ask() {
  await predict();
  const top = find("results").getBoundingClientRect().top;
  if (top > window.innerHeight * 0.6) find("results").scrollIntoView();
}

const predicted = () => result.devices.filter((d) => d.latency_s > 0);

/** Predicted devices, those that the model knows best first, then by latency. */
function trusted(list) {
  const rank = (d) => (d.domain ? DOMAIN_ORDER.indexOf(d.domain) : DOMAIN_ORDER.length);
  return list.filter((d) => d.latency_s > 0).sort((a, b) => rank(a) - rank(b) || a.latency_s - b.latency_s);
}

function pickDevice(answer) {
  // The device of the headline, unless the user has selected another one.
  return answer.devices.some((d) => d.device === view.picked) ? view.picked : (trusted(answer.devices)[0] ?? answer.devices[0]).device;
}

const title = () => (isModel() ? DURATIONS[duration()][0] : "Total latency by device");

/** Answers by device, of the sums and of their programs. */
const answers = () => [...result.devices, ...(result.programs ?? []).flatMap((p) => p.answers)];

function show() {
  const good = predicted();
  headline(good);
  find("device").replaceChildren(...result.devices.map((d) => html("option", { selected: d.device === view.device }, d.device)));
  find("bars-table").replaceChildren(isModel() ? estimateTable(result, unit()) : barsTable(result.devices, unit()));
  find("domains").replaceChildren(...domainLegend(answers().map((a) => a.domain)));
  find("total-title").textContent = title();
  find("cost-title").textContent = isModel() ? "Latency by part of the model" : "Latency by program";
  find("workload").textContent = result.workload ?? "";
  find("remarks").replaceChildren(...(isModel() ? remarks(result.rows) : imageWarning()));
  find("bars-key").hidden = !good.length;
  find("duration-label").hidden = !isModel();
  drawTotals();
  showPrograms();
}

/** The known error of image networks, for an ONNX file with convolutions. */
function imageWarning() {
  if (shownMode !== "model" || !result.programs.some((p) => p.name.startsWith("conv"))) return [];
  return [html("li", {}, "This file has convolutions. Totals of image networks have errors of 27 to 44 %, because they only sum the latencies of single launches.")];
}

function headline(good) {
  const box = find("headline");
  if (!good.length) {
    const fault = answers().find((a) => a.error)?.error;
    box.replaceChildren("No prediction is possible. ", fault ? errorText(fault) : "");
    return;
  }
  const best = trusted(good)[0], others = good.filter((d) => d !== best).sort((a, b) => a.latency_s - b.latency_s);
  const [fastest, slowest] = [others[0], others.at(-1)];
  const incomplete = good.some((d) => d.launches_predicted < d.launches);
  box.replaceChildren(
    html("strong", { id: "fastest" }, latency(best.latency_s, unit())), `${isModel() ? DURATIONS[duration()][1] : ""} on ${best.device} `, domainMark(best.domain), " ",
    html("span", { class: "bounds" }, interval(best.lower_s, best.upper_s, unit())),
    slowest?.latency_s > best.latency_s ? `, ${threeDigits(slowest.latency_s / best.latency_s)} times as fast as ${slowest.device}` : "", ".",
    fastest?.latency_s < best.latency_s ? html("span", { class: "hint" },
      ` ${fastest.device} may be faster (${latency(fastest.latency_s, unit())}), but this prediction is less certain: `, domainMark(fastest.domain), ".") : "",
    incomplete ? html("span", { class: "hint" }, " The sum omits programs that could not be predicted, see below.") : "");
}

function drawTotals() {
  const good = predicted(), box = find("bars");
  if (!good.length) return box.replaceChildren();
  if (!box.clientWidth) return;
  drawBars(box, good, { title: title(), scale: chosen("scale"), unit: unit(), chosen: view.device, pick: choose });
}

function choose(device) {
  view = { device, picked: device, all: false };
  find("device").value = device;
  drawTotals();
  showPrograms();
}

function showPrograms() {
  const more = () => {
    view.all = true;
    showPrograms();
    find("programs").querySelectorAll("tbody tr")[12]?.scrollIntoView({ block: "nearest" });
  };
  const table = { unit: unit(), all: view.all, more };
  if (!isModel()) return find("programs").replaceChildren(...programTable(result, view.device, table));
  const { estimate, served, error } = result.rows.find((r) => r.device === view.device);
  find("programs").replaceChildren(...(estimate
    ? [served && html("p", { class: "note" }, `One batch of ${estimate.batch}, without a queue.`),
      ...programTable(parts(estimate), view.device, { ...table, noun: "part" })].filter(Boolean)
    : [html("p", {}, errorText(error))]));
}

const NO_CURVE = {
  operators: "These operators share no size. Define one as a variable, such as tokens = 1024, and use it: m=tokens.",
  model: "Every dimension of this model is fixed. Export it with a dynamic batch dimension to get a curve.",
  llm: "Select concurrency or requests per second as load, and more than one answer token, to simulate an engine that serves requests.",
};
const CURVE_KEY = {
  size: find("curve-key").textContent,
  llm: "Marks: 1, 2, 4, … concurrent requests, or parts of the rate, filled if in domain, hollow if near, faint if out. Band: 80 % interval. "
    + "Values are means over requests. More tokens per second at the same time per token is better.",
};

async function curve(signal) {
  const llm = query.mode === "llm", axes = llm ? loadAxes(query) : curveAxes(query, support), select = find("axis");
  const kept = axes.find((a) => a.name === (linked.axis ?? select.value)) ?? axes[0];
  select.replaceChildren(...axes.map((a) => html("option", { selected: a === kept }, a.name)));
  find("axis-label").hidden = llm || axes.length === 0;
  find("curve-title").textContent = llm ? "Time per token against throughput" : kept ? `Latency over ${kept.name}` : "Latency over size";
  find("curve-key").textContent = CURVE_KEY[llm ? "llm" : "size"];
  find("curve-part").hidden = true;
  const note = find("curve-note");
  if (!kept) {
    note.textContent = NO_CURVE[query.mode];
    return;
  }
  note.textContent = "…";
  try {
    const at = Number(linked.at ?? kept.value);
    const draw = ({ series }) => showCurve(series, { axis: kept.name, at, unit, ...(llm && { draw: drawLoad, table: loadReadout }) });
    const arrived = (part, load) => {
      draw(part);
      note.textContent = `simulating ${kept.name} = ${load} …`;
    };
    const whole = llm ? await askLoad(query, result.rows, signal, arrived) : await askCurve(query, kept, options, support, signal);
    const { faults } = whole;
    draw(whole);
    linked = {};
    const fault = faults[0];
    note.replaceChildren(...(fault ? [`${counted(faults.length, "point")} could not be predicted, such as ${kept.name} = ${fault.x} on ${fault.device}: `, errorText(fault.error)] : []));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    note.replaceChildren("No curve is available: ", errorText(error));
  }
}

/** Parameters of the query; a file has none, because a link cannot hold it. */
function queryState() {
  if (query.mode === "llm") return { mode: "llm", devices: options.devices.join(","), ...query.link };
  const state = { devices: options.devices.join(","), protocol: options.protocol, framework: options.framework };
  if (query.mode === "operators") state.text = find("text").value;
  return state;
}

/** Store the query in the URL, so that it can be bookmarked and shared. */
function saveQuery() {
  history.replaceState(null, "", `#${new URLSearchParams(queryState())}`);
}

/** Link to the query and to what the page shows of it: scale, unit, device, axis and size. */
async function copyLink() {
  if (!result) return;
  const curve = find("curve-part").hidden ? null : shownCurve();
  const state = { ...queryState(), scale: chosen("scale"), unit: unit(), device: view.device,
    ...(isModel() && { duration: duration() }), ...(curve && { axis: curve.axis, at: curve.at }) };
  history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  const note = find("link-note");
  try {
    await navigator.clipboard.writeText(location.href);
    const missing = query.mode === "model" ? "the ONNX file" : query.mode === "llm" && !(query.link.model || query.link.config) ? "config.json, which is too long" : null;
    note.textContent = missing ? `Copied; the link does not hold ${missing}.` : "Copied.";
  } catch {
    note.textContent = "The browser does not allow copying: copy the address of this page.";
  }
}

/** Select the example in the list only while the text equals it. */
function syncExample() {
  find("example").value = find("text").value === LAYER ? "layer" : "";
}

function restoreQuery() {
  const state = new URLSearchParams(location.hash.slice(1));
  find("text").value = state.get("text") ?? LAYER;
  syncExample();
  if (state.get("mode") === "llm") setMode("llm");
  model.restore(state);
  find("duration").value = state.get("duration") in DURATIONS ? state.get("duration") : "tpot";
  if (state.get("devices")) devices.set(state.get("devices").split(","));
  find("protocol").value = state.get("protocol") ?? support.default_protocol;
  find("framework").value = state.get("framework") ?? "";
  if (state.get("unit")) find("unit").value = state.get("unit");
  const scale = document.querySelector(`input[name=scale][value=${CSS.escape(state.get("scale") ?? "linear")}]`);
  if (scale) scale.checked = true;
  view = { ...view, picked: state.get("device") };
  linked = { axis: state.get("axis") ?? undefined, at: state.get("at") ?? undefined };
  for (const id of ["protocol", "framework"]) if (find(id).selectedIndex < 0) find(id).selectedIndex = 0;
}

function fillChoices() {
  const option = (value, text) => html("option", { value }, text);
  find("protocol").replaceChildren(...support.protocols.map((p) => option(p, MEANING[p] ?? p)));
  find("framework").replaceChildren(option("", "unknown"), ...support.frameworks.map((f) => option(f, f)));
  find("example").replaceChildren(option("", "select an example"), option("layer", "encoder layer of BERT-base"),
    html("optgroup", { label: "operators" }, ...Object.keys(support.operators).sort().map((o) => option(o, o))),
    html("optgroup", { label: "further forms" }, ...Object.keys(FORMS).map((o) => option(o, o))));
  find("example").onchange = ({ target }) => {
    if (!target.value) return;
    find("text").value = target.value === "layer" ? LAYER : FORMS[target.value] ?? example(target.value, support, find("protocol").value);
    predict();
  };
}

/** Show the fields of a mode; without `mode`, of the selected one. */
function setMode(mode = chosen("mode")) {
  document.querySelector(`input[name=mode][value=${mode}]`).checked = true;
  for (const name of Object.keys(ASK)) find(`${name}-part`).hidden = name !== mode;
  showResults();
  find("kernel-options").hidden = mode === "llm";
  find("values").open = mode === "llm";
}

function listen() {
  find("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  find("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
  });
  find("text").addEventListener("input", syncExample);
  for (const radio of document.getElementsByName("mode")) radio.addEventListener("change", () => setMode());
  find("scale").addEventListener("change", () => result && drawTotals());
  find("unit").addEventListener("change", () => {
    if (!result) return;
    show();
    document.dispatchEvent(new CustomEvent("unit-changed"));
  });
  find("duration").replaceChildren(...Object.entries(DURATIONS).map(([value, [name]]) => html("option", { value }, name.toLowerCase().replace("time ", ""))));
  find("duration").addEventListener("change", () => {
    if (!result?.rows) return;
    result.devices = durations(result.rows, find("duration").value);
    show();
  });
  find("device").addEventListener("change", ({ target }) => choose(target.value));
  find("axis").addEventListener("change", () => curve(running.signal).catch(() => {}));
  new ResizeObserver(() => result && drawTotals()).observe(find("bars"));
  find("link").addEventListener("click", copyLink);
  document.querySelector("[data-figure=bars]").replaceChildren(...exportButtons("bars", () => result && {
    records: isModel() ? estimateRecords(result.rows) : result.devices.map(({ device, latency_s, lower_s, upper_s, domain, launches, launches_predicted }) =>
      ({ device, latency_s, lower_s, upper_s, domain, launches, launches_predicted })),
    json: { query: queryState(), ...result },
  }));
  document.querySelector("[data-figure=curve]").replaceChildren(...exportButtons("curve", () => {
    const curve = find("curve-part").hidden ? null : shownCurve();
    return curve && {
      records: isModel() ? loadRecords(curve.series, curve.axis) : curve.series.flatMap((s) => s.points.map(({ x, latency_s, lower_s, upper_s, fitted_s, domain }) =>
        ({ device: s.device, [curve.axis]: x, latency_s, lower_s, upper_s, fitted_s, domain }))),
      json: { query: queryState(), ...curve },
    };
  }));
  keyForm(start);
}

/** Load operators and devices, then predict the initial query. */
async function start() {
  alarm(null);
  try {
    const [supported, list, examples] = await Promise.all([call("/support"), call("/devices"), call("/page/models.json")]);
    support = supported;
    model = languageModel(examples, modelLoaded);
    devices = deviceList(list.devices, () => {});
    fillChoices();
    restoreQuery();
    await predict();
  } catch (error) {
    alarm(error);
  }
}

function modelLoaded() {
  setMode("llm");
  predict();
}

file = fileField((loaded) => {
  setMode("model");
  if (loaded) predict();
}, (config) => model?.load(config));
listen();
setMode();
start();
watch();
