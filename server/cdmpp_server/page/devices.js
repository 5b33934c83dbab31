// List of devices: search and select; devices in the training data are marked.

import { find, html } from "./dom.js";
import { counted } from "./units.js";

/** Listed first and selected initially, if the service knows them: models from 2017 to 2024. */
const USUAL = ["b200", "h100-sxm", "a100-pcie-40gb", "l4", "t4", "v100-pcie-32gb", "mi300x"];
/** Maximum number of devices in one request to /models/predict. */
const MOST = 64;

/** What a status means: predictions of such devices are never "in". */
const STATUS = {
  "stand-in": "figures of a card with this chip: the measurements do not name the board",
  unreleased: "announced hardware: its figures are not final",
};

/** Fill the list; returns {chosen(): names, set(names)}; `changed` is called after each change. */
export function deviceList(devices, changed) {
  const order = (d) => (USUAL.indexOf(d.name) + 1 || 100) + (d.trained ? 0 : 1000 * !USUAL.includes(d.name));
  const rows = [...devices].sort((a, b) => order(a) - order(b)).map((device) => {
    const box = html("input", { type: "checkbox", name: "device", value: device.name });
    const facts = [device.vendor, device.arch, device.link, device.status, ...device.aliases].filter(Boolean);
    const row = html("label", { class: "device" }, box, html("span", { class: "name" }, device.name),
      html("span", { class: "facts" }, [device.vendor, device.arch].filter(Boolean).join(" ")),
      device.trained ? html("span", { class: "trained", title: "the training data has measurements of this device" }, "trained") : null,
      device.status ? html("span", { class: "trained", title: STATUS[device.status] }, device.status) : null);
    return { name: device.name, box, row, text: [device.name, device.kind, ...facts].join(" ").toLowerCase() };
  });
  const list = find("devices"), search = find("device-search"), note = find("device-note");
  list.replaceChildren(...rows.map((r) => r.row));
  const chosen = () => rows.filter((r) => r.box.checked).map((r) => r.name);

  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const r of rows) r.row.hidden = !words.every((w) => r.text.includes(w));
    update();
  }
  function update() {
    const visible = rows.filter((r) => !r.row.hidden).length;
    const matches = search.value ? `; ${counted(visible, "match").replace("matchs", "matches")}` : "";
    note.textContent = `${chosen().length} of ${rows.length} selected${matches}`;
  }
  function change() {
    const many = chosen().length;
    // Unselect the devices beyond the limit, and show a note.
    for (const r of rows.filter((r) => r.box.checked).slice(MOST)) r.box.checked = false;
    update();
    if (many > MOST) note.textContent = `at most ${MOST} devices can be selected`;
    changed();
  }
  list.addEventListener("change", change);
  search.addEventListener("input", show);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      search.value = "";
      show();
    }
    if (event.key !== "Enter") return;
    // Enter selects the first match, because a search is usually for one device.
    event.preventDefault();
    const match = rows.find((r) => !r.row.hidden && !r.box.checked);
    if (match && search.value) {
      match.box.checked = true;
      search.value = "";
      show();
      change();
    }
  });
  find("device-none").addEventListener("click", () => {
    for (const r of rows) r.box.checked = false;
    change();
  });
  const set = (names) => {
    for (const r of rows) r.box.checked = names.includes(r.name);
    show();
  };
  set(USUAL);
  return { chosen, set };
}
