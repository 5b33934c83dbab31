// Field of the ONNX file, which may be dropped anywhere on the page, and of its dynamic dimensions. A dropped
// config.json belongs to the form of language models.

import { find, html, numberOf } from "./dom.js";
import { dynamicDimensions, isBatch } from "./onnx.js";

/** Initial sizes of dynamic dimensions. */
const START = { batch: 1, other: 128 };

/** Set up the field; `changed(true)` is called when a file has been loaded, `json(file)` with a JSON file. */
export function fileField(changed, json) {
  const input = find("file"), button = find("drop"), text = find("drop-text"), box = find("dims");
  let bytes = null, fault = null;

  async function take(file) {
    if (!file) return;
    bytes = file;
    fault = null;
    let names = [];
    try {
      names = dynamicDimensions(new Uint8Array(await file.arrayBuffer()));
    } catch {
      fault = { message: `${file.name} is not an ONNX file, or it is incomplete.`, hint: "Export the model again; the format is ONNX, not a checkpoint." };
    }
    const size = file.size < 2 ** 20 ? `${Math.ceil(file.size / 1024)} KiB` : `${(file.size / 2 ** 20).toFixed(1)} MiB`;
    text.textContent = `${file.name}, ${size}. Drop or select another file`;
    box.replaceChildren(...names.map((name, i) => html("label", { for: `dim-${i}` }, name,
      html("input", { id: `dim-${i}`, type: "number", min: 1, step: 1, value: isBatch(name) ? START.batch : START.other, "data-name": name }))));
    changed(true);
  }

  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => take(input.files[0]));
  // The whole page accepts a dropped file; otherwise the browser would open it and leave the page.
  const over = (event, inside) => {
    event.preventDefault();
    document.body.classList.toggle("over", inside);
  };
  document.addEventListener("dragover", (event) => over(event, true));
  document.addEventListener("dragleave", (event) => over(event, false));
  document.addEventListener("drop", (event) => {
    over(event, false);
    const dropped = event.dataTransfer.files[0];
    if (dropped?.name.endsWith(".json")) json(dropped);
    else take(dropped);
  });

  /** Return {bytes, dims}; throws {message, hint} if something is missing. */
  function read() {
    if (!bytes) throw { message: "No file is selected.", hint: "Drop an ONNX file on this page, or select one." };
    if (fault) throw fault;
    const dims = {};
    for (const field of box.querySelectorAll("input")) dims[field.dataset.name] = numberOf(field, field.dataset.name);
    return { bytes, dims };
  }
  return { read };
}
