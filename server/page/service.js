// The service as it is now: ready or not, what it does, and where measurements leave its predictions.

import { call } from "./api.js";
import { find, html } from "./dom.js";
import { counted, percent, whole } from "./units.js";

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
  const requests = sum(list, "cdmpp_request_seconds_count"), now = performance.now();
  const rate = before && requests >= before.requests ? (1000 * (requests - before.requests)) / (now - before.now) : undefined;
  before = { requests, now };
  const hits = sum(list, "cdmpp_cache_lookups_total", { result: "hit" }) ?? 0;
  const misses = sum(list, "cdmpp_cache_lookups_total", { result: "miss" }) ?? 0;
  const answers = sum(list, "cdmpp_answers_total");
  const out = sum(list, "cdmpp_answers_total", { domain: "out" }) ?? 0;
  return [
    ["requests", requests === undefined ? "–" : whole(requests), rate === undefined ? "since the start" : `${rate.toFixed(1)} a second`],
    ["from the cache", hits + misses ? percent(hits / (hits + misses)) : "–", `${whole(hits)} of ${whole(hits + misses)} items`],
    ["out of domain", answers ? percent(out / answers) : "–", answers === undefined ? "no answer yet" : `${whole(out)} of ${whole(answers)} answers`],
    ["waiting", whole(sum(list, "cdmpp_queue_rows") ?? 0), "rows in the queue"],
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
  const rows = devices.map((d) => html("tr", { "data-device": d.device },
    html("th", { scope: "row" }, d.device), html("td", { class: "figure" }, whole(d.count)),
    html("td", { class: "figure" }, percent(d.mape)),
    html("td", { class: "figure" }, biasBar(d.bias), ` ${signed(d.bias)}`),
    html("td", { class: "figure" }, percent(d.coverage)),
    html("td", {}, d.drifting ? html("span", { class: "badge bad" }, "▲ drifting") : html("span", { class: "badge" }, "steady"))));
  return html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Drift by device" }, html("table", {},
    html("caption", {}, `${counted(devices.length, "device")} with measurements`),
    html("thead", {}, html("tr", {}, ...["device", "measured", "error", "bias", "in interval", "state"].map((t) => html("th", { scope: "col" }, t)))),
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
