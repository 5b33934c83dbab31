// Status of the service: readiness, metrics, and errors against reported measurements.

import { call } from "./api.js";
import { find, html, tableHead } from "./dom.js";
import { counted, latency, percent, whole } from "./units.js";

const EVERY_MS = 5000;

/** Samples of Prometheus' text format: [{name, labels, value}]. */
export function samples(text) {
  const parsed = [];
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +([^ ]+)/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, k, v]) => [k, v]));
    parsed.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return parsed;
}

/** Sum of a metric's samples with the given labels; undefined if there is none. */
export function sum(list, name, labels = {}) {
  const matching = list.filter((s) => s.name === name && Object.entries(labels).every(([k, v]) => s.labels[k] === v));
  return matching.length ? matching.reduce((total, s) => total + s.value, 0) : undefined;
}

let before = null;

function cards(list) {
  // POST only: the page's own status requests would dominate the numbers.
  const posts = { method: "POST" };
  const requests = sum(list, "cdmpp_request_seconds_count", posts) ?? 0, now = performance.now();
  const rate = before && requests >= before.requests ? (1000 * (requests - before.requests)) / (now - before.now) : undefined;
  before = { requests, now };
  const mean = requests ? sum(list, "cdmpp_request_seconds_sum", posts) / requests : undefined;
  const hits = sum(list, "cdmpp_cache_hits_total") ?? 0, lookups = hits + (sum(list, "cdmpp_cache_misses_total") ?? 0);
  const items = sum(list, "cdmpp_items_total") ?? 0, out = sum(list, "cdmpp_items_total", { domain: "out" }) ?? 0;
  return [
    ["requests", whole(requests), rate === undefined ? "since the start" : `${rate.toFixed(1)} per second now`],
    ["response time", latency(mean), "mean since the start"],
    ["items", whole(items), items ? `${percent(out / items)} out of domain` : "none predicted yet"],
    ["cache hits", lookups ? percent(hits / lookups) : "–", `${whole(hits)} of ${whole(lookups)} look-ups`],
    ["waiting", whole(sum(list, "cdmpp_queue_rows") ?? 0), "rows in the queue"],
    ["measurements", whole(sum(list, "cdmpp_observations_total") ?? 0), "latencies reported back"],
  ].map(([label, value, note]) => html("div", { class: "card" },
    html("dt", {}, label), html("dd", { "data-key": label }, value, html("small", {}, note))));
}

/** Bar of a bias from the middle: left: faster than predicted; right: slower. */
function biasBar(bias) {
  const bar = html("span", { class: "bias", "aria-hidden": "true" }, html("i"));
  const part = Math.min(1, Math.abs(bias) / 0.5) * 50;
  // Set by script, because the content security policy forbids style attributes.
  bar.firstChild.style.width = `${part}%`;
  bar.firstChild.style.left = bias < 0 ? `${50 - part}%` : "50%";
  return bar;
}

function drift(devices) {
  if (!devices.length) {
    return html("p", { class: "note" }, "No measurement has been reported yet. ", html("code", {}, "POST /observe"),
      " accepts measurements, and this table then shows the error of the predictions.");
  }
  const signed = (v) => `${v >= 0 ? "+" : "−"}${percent(Math.abs(v))}`;
  const several = new Set(devices.map((d) => d.model_id)).size > 1;
  const rows = devices.map((d) => html("tr", { "data-device": d.device },
    html("th", { scope: "row" }, d.device, several ? html("small", { class: "hint" }, ` ${d.model_id}`) : null), html("td", { class: "figure" }, whole(d.count)),
    html("td", { class: "figure" }, percent(d.mape)),
    html("td", { class: "figure" }, biasBar(d.bias), ` ${signed(d.bias)}`),
    html("td", { class: "figure" }, percent(d.coverage)),
    html("td", {}, d.drifting ? html("span", { class: "badge bad" }, "▲ drifting") : html("span", { class: "badge" }, "steady"))));
  return html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Drift by device" }, html("table", {},
    html("caption", {}, `${counted(devices.length, "device")} with measurements`),
    tableHead(["device", "measurements", "error", "bias", "in interval", " state"]),
    html("tbody", {}, ...rows)));
}

async function ready() {
  const pill = find("ready");
  let state, model;
  try {
    model = (await call("/readyz")).model_id;
    state = "ready";
  } catch (refusal) {
    state = refusal.status === 0 ? "unreachable" : "not ready";
    pill.title = [refusal.message, refusal.hint].join(" ").trim();
  }
  pill.className = `pill ${state.replace(" ", "-")}`;
  pill.textContent = state;
  if (model) {
    pill.title = "the golden prediction succeeded";
    find("model").textContent = model;
  }
}

async function part(id, path, options, draw) {
  if (!find(id)) return;
  try {
    find(id).replaceChildren(...[draw(await call(path, options))].flat());
  } catch (refusal) {
    find(id).replaceChildren(html("p", { class: "note" }, [refusal.message, refusal.hint].join(" ")));
  }
}

async function refresh() {
  await Promise.all([
    ready(),
    part("cards", "/metrics", { text: true }, (text) => cards(samples(text))),
    part("drift", "/observe", {}, (answer) => drift(answer.devices)),
  ]);
}

/** Show the status now and every few seconds while the page is visible; returns a function that refreshes it. */
export function watch() {
  let timer = null;
  const go = async () => {
    timer = null;
    await refresh();
    if (document.visibilityState === "visible" && timer === null) timer = setTimeout(go, EVERY_MS);
  };
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible" && timer === null) go();
  });
  go();
  return refresh;
}
