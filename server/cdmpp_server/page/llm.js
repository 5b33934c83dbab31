// Form of a language model: its config.json, the workload, the engine and the layout.

import { find, html, numberOf } from "./dom.js";

const FIRST = "llama-3.1-8b";
/** A longer configuration is not part of links. */
const LINK_LIMIT = 1500;

/** Value of a field before it is edited. */
const initial = (field) => field.defaultValue ?? field.options[0].value;

function readConfig(text) {
  let config = null;
  try {
    config = JSON.parse(text);
  } catch {
    // Not JSON: the message is that of any other text without an object.
  }
  if (config?.constructor === Object) return config;
  throw { message: "config.json is not a JSON object.", hint: "Paste the whole file, from { to }, or select an example." };
}

/**
 * Set up the form; `examples` are configurations by name, `changed` is called after an example or a file is loaded.
 *
 * Returns {load(file), read(), restore(parameters of a link)}.
 */
export function languageModel(examples, changed) {
  const select = find("llm-example"), text = find("config"), input = find("config-file");
  const fields = [...find("llm-part").querySelectorAll("[data-field]")];
  const written = (name) => JSON.stringify(examples[name], null, 2);
  const name = () => Object.keys(examples).find((n) => text.value === written(n));

  // Select the example in the list only while the text equals it.
  const sync = () => (select.value = name() ?? "");
  function set(value) {
    text.value = value;
    sync();
  }
  async function load(file) {
    if (!file) return;
    set(await file.text());
    changed();
  }

  select.replaceChildren(html("option", { value: "" }, "select an example"),
    ...Object.keys(examples).map((n) => html("option", { value: n }, n)));
  select.onchange = () => {
    if (!select.value) return;
    set(written(select.value));
    changed();
  };
  text.oninput = sync;
  find("config-open").onclick = () => input.click();
  input.onchange = () => {
    load(input.files[0]);
    input.value = "";
  };

  /** The query, with `link`, its parameters; throws {message, hint} if a field is invalid. */
  function read() {
    const options = {};
    for (const field of fields) {
      const value = field.type === "number" && field.value ? numberOf(field, field.dataset.name) : field.value;
      if (value !== "") options[field.dataset.field] = value;
      else if (initial(field)) throw { message: `${field.dataset.name} has no value.` };
    }
    const { load: kind, sequences, rate, ttft_goal, tpot_goal, ...layout } = options, config = readConfig(text.value);
    const byRate = kind === "rate";
    if (byRate && !rate) throw { message: "Requests per second has no value.", hint: "Enter the rate at which requests arrive." };
    return { mode: "llm", config, byRate, size: byRate ? rate : sequences, batch: byRate ? 1 : sequences, serving: kind !== "batch",
      goals: { ttft: ttft_goal / 1e3, tpot: tpot_goal / 1e3 }, options: layout, link: link(config) };
  }

  /** Parameters of a link: the example or a short configuration, and the fields that were changed. */
  function link(config) {
    const changedFields = fields.filter((f) => f.value !== initial(f)).map((f) => [f.dataset.field, f.value]);
    const whole = JSON.stringify(config);
    const source = name() ? { model: name() } : whole.length <= LINK_LIMIT ? { config: whole } : {};
    return { ...source, ...Object.fromEntries(changedFields) };
  }

  function restore(parameters) {
    const config = parameters.get("config");
    try {
      set(config ? JSON.stringify(JSON.parse(config), null, 2) : written(parameters.get("model")) ?? written(FIRST));
    } catch {
      set(config);
    }
    for (const field of fields) {
      field.value = parameters.get(field.dataset.field) ?? initial(field);
      if (field.selectedIndex < 0) field.selectedIndex = 0;
    }
  }

  return { load, read, restore };
}
