// Page of plans: the example of a kind, its picture, and the plan in five sentences.

import { call } from "./api.js";
import { errorText, find, html } from "./dom.js";
import { keyForm } from "./key.js";

let kinds = [];
/** Aborts the request before, so that a slow answer does not replace a later one. */
let running = null;

const chosen = () => kinds.find(({ kind }) => kind === find("kind").value);

function show(fault) {
  find("alert").hidden = !fault;
  find("alert").replaceChildren(...(fault ? [errorText(fault)] : []));
}

/** The request of the text field; throws {message, hint}. */
function request() {
  try {
    return JSON.parse(find("request").value);
  } catch (error) {
    throw { message: `The request is not JSON: ${error.message}`, hint: "choose the kind again for its example" };
  }
}

async function plan() {
  running?.abort();
  running = new AbortController();
  const { path, kind } = chosen();
  find("results").setAttribute("aria-busy", "true");
  try {
    const { figure, ...answer } = await call(`${path}?figure=svg`, { json: request(), signal: running.signal });
    URL.revokeObjectURL(find("figure").src);
    find("figure").src = URL.createObjectURL(new Blob([figure], { type: "image/svg+xml" }));
    find("figure").alt = `Figure of the plan: ${answer.summary[0]}`;
    find("summary").replaceChildren(...answer.summary.map((line) => html("li", {}, line)));
    find("answer").textContent = JSON.stringify(answer, null, 1);
    find("plan").hidden = false;
    show(null);
    history.replaceState(null, "", `#${kind}`);
  } catch (fault) {
    if (fault.name === "AbortError") return;
    find("plan").hidden = true;
    show(fault);
  }
  find("results").setAttribute("aria-busy", "false");
}

function choose() {
  const { example, summary } = chosen();
  find("kind-note").textContent = summary;
  find("request").value = JSON.stringify(example, null, 1);
  plan();
}

async function load() {
  try {
    ({ kinds } = await call("/plans"));
  } catch (fault) {
    show(fault);
    return;
  }
  find("kind").replaceChildren(...kinds.map(({ kind }) => html("option", {}, kind)));
  const wanted = location.hash.slice(1);
  find("kind").value = kinds.some(({ kind }) => kind === wanted) ? wanted : "pipeline";
  choose();
}

find("kind").addEventListener("change", choose);
find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  plan();
});
keyForm(load);
load();
