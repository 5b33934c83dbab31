// Panel of the curve: toggles for the lines, and a slider that selects a size.

import { drawCurve, readout, seriesMark } from "./curve.js";
import { find, html } from "./dom.js";
import { size } from "./scale.js";

let state = null, move = null;

/** What the panel shows, for exports and links: {axis, at, series}; null without a curve. */
export const shownCurve = () => state && { axis: state.axis, at: state.sizes[state.place], series: visible() };

const visible = () => state.series.filter((s) => !state.hidden.has(s.device));

function draw() {
  if (!state || !find("curve").clientWidth) return;
  const lines = visible();
  if (!lines.length) return find("curve").replaceChildren();
  move = state.draw(find("curve"), lines, { axis: state.axis, unit: state.unit(), at: state.sizes[state.place], read });
}

function read(value) {
  state.place = state.sizes.indexOf(value);
  find("at").value = state.place;
  update();
  move?.(value);
}

function update() {
  const value = state.sizes[state.place];
  find("at-label").textContent = `${state.axis} = ${value}`;
  find("at").setAttribute("aria-valuetext", `${state.axis} = ${value}`);
  find("readout").replaceChildren(state.table(visible(), value, state.axis, state.unit()));
}

function toggle(device, button) {
  const off = !state.hidden.delete(device);
  if (off) state.hidden.add(device);
  button.setAttribute("aria-pressed", String(!off));
  draw();
  update();
}

/** Show `series` (curve.js); `at` is the size of the query; `draw` and `table` make the chart and the values below it. */
export function showCurve(series, { axis, at, unit, draw: drawn = drawCurve, table = readout }) {
  const sizes = [...new Set(series.flatMap((s) => s.points.map((p) => p.x)))].sort((a, b) => a - b);
  find("curve-part").hidden = sizes.length === 0;
  if (!sizes.length) return;
  state = { series, axis, unit, draw: drawn, table, sizes, place: Math.max(0, sizes.indexOf(at)), hidden: new Set() };
  find("legend").replaceChildren(...series.map((s) => {
    const button = html("button", { type: "button", "aria-pressed": "true" }, seriesMark(s.index), ` ${s.device}`);
    button.addEventListener("click", () => toggle(s.device, button));
    return button;
  }));
  const slider = find("at");
  slider.max = sizes.length - 1;
  slider.value = state.place;
  slider.setAttribute("aria-label", `${axis}, ${size(sizes[0])} to ${size(sizes.at(-1))}`);
  draw();
  update();
}

find("at").addEventListener("input", ({ target }) => read(state.sizes[Number(target.value)]));
document.addEventListener("unit-changed", () => {
  if (!state) return;
  draw();
  update();
});
new ResizeObserver(draw).observe(find("curve"));
