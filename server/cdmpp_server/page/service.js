// The service as it is now: ready or not, what it does, and where measurements leave its predictions.

import { call } from "./api.js";
import { find, html, tableHead } from "./dom.js";
import { counted, latency, percent, whole } from "./units.js";

const EVERY_MS = 5000;

/** Samples of Prometheus' text format: [{name, labels, value}]. */
export function samples(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +([^ ]+)/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, k, v]) => [k, v]));
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}

/** Sum of a metric's samples, of those with the given labels; undefined where there is none. */
export function sum(list, name, labels = {}) {
  const mine = list.filter((s) => s.name === name && Object.entries(labels).every(([k, v]) => s.labels[k] === v));
  return mine.length ? mine.reduce((total, s) => total + s.value, 0) : undefined;
}

let before = null;

function cards(list) {
  // Questions alone: the page's own looks at the state would drown them.
  const asked = { method: "POST" };
  const requests = sum(list, "cdmpp_request_seconds_count", asked) ?? 0, now = performance.now();
  const rate = before && requests >= before.requests ? (1000 * (requests - before.requests)) / (now - before.now) : undefined;
  before = { requests, now };
  const mean = requests ? sum(list, "cdmpp_request_seconds_sum", asked) / requests : undefined;
  const hits = sum(list, "cdmpp_cache_hits_total") ?? 0, lookups = hits + (sum(list, "cdmpp_cache_misses_total") ?? 0);
  const items = sum(list, "cdmpp_items_total") ?? 0, out = sum(list, "cdmpp_items_total", { domain: "out" }) ?? 0;
  return [
    ["requests", whole(requests), rate === undefined ? "since the start" : `${rate.toFixed(1)} a second now`],
    ["answer time", latency(mean), "mean since the start"],
    ["items", whole(items), items ? `${percent(out / items)} out of domain` : "none predicted yet"],
    ["from the cache", lookups ? percent(hits / lookups) : "–", `${whole(hits)} of ${whole(lookups)} look-ups`],
    ["waiting", whole(sum(list, "cdmpp_queue_rows") ?? 0), "rows in the queue"],
    ["measured", whole(sum(list, "cdmpp_observations_total") ?? 0), "latencies reported back"],
  ].map(([label, value, note]) => html("div", { class: "card" },
    html("dt", {}, label), html("dd", { "data-key": label }, value, html("small", {}, note))));
}

/** A bias as a bar from the middle: left, faster than predicted; right, slower. */
function biasBar(bias) {
  const bar = html("span", { class: "bias", "aria-hidden": "true" }, html("i"));
  const part = Math.min(1, Math.abs(bias) / 0.5) * 50;
  // Through the object model, which the content security policy allows; as an attribute it would not be.
  bar.firstChild.style.width = `${part}%`;
  bar.firstChild.style.left = bias < 0 ? `${50 - part}%` : "50%";
  return bar;
}

function drift(devices) {
  if (!devices.length) {
    return html("p", { class: "note" }, "No measurement has been reported yet. ", html("code", {}, "POST /observe"),
      " takes them, and this table shows how far predictions and measurements part.");
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
    tableHead(["device", "measured", "error", "bias", "in interval", " state"]),
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
    pill.title = "a golden prediction succeeded";
    find("model").textContent = model;
  }
}

async function part(id, path, options, draw) {
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

/** Show the state now and every few seconds, while anybody can see it. */
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
}
