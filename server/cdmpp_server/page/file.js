// The ONNX file: dropped anywhere on the page, or chosen by its button; and the sizes that it leaves open.

import { find, html } from "./dom.js";
import { dynamicDimensions, isBatch } from "./onnx.js";

/** Sizes that a dynamic dimension starts with. */
const START = { batch: 1, other: 128 };

/** Wire the field; `changed(loaded)` is called with true when a file can be asked about. */
export function fileField(changed) {
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
      fault = { message: `${file.name} is not an ONNX file, or it is cut short.`, hint: "Export it anew; the format is ONNX, not a checkpoint." };
    }
    const size = file.size < 2 ** 20 ? `${Math.ceil(file.size / 1024)} KiB` : `${(file.size / 2 ** 20).toFixed(1)} MiB`;
    text.textContent = `${file.name}, ${size}. Drop or choose another`;
    box.replaceChildren(...names.map((name, i) => html("label", { for: `dim-${i}` }, name,
      html("input", { id: `dim-${i}`, type: "number", min: 1, step: 1, value: isBatch(name) ? START.batch : START.other, "data-name": name }))));
    changed(true);
  }

  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => take(input.files[0]));
  // The whole page takes a file: nobody has to hit the field, and a miss does not leave the page.
  const over = (event, inside) => {
    event.preventDefault();
    document.body.classList.toggle("over", inside);
  };
  document.addEventListener("dragover", (event) => over(event, true));
  document.addEventListener("dragleave", (event) => over(event, false));
  document.addEventListener("drop", (event) => {
    over(event, false);
    take(event.dataTransfer.files[0]);
  });

  /** {bytes, dims}; throws what is missing. */
  function read() {
    if (!bytes) throw { message: "No file has been chosen.", hint: "Drop an ONNX file on this page, or choose one." };
    if (fault) throw fault;
    const dims = {};
    for (const field of box.querySelectorAll("input")) {
      const size = Number(field.value);
      if (!Number.isInteger(size) || size < 1) throw { message: `${field.dataset.name} is not a whole number from 1.` };
      dims[field.dataset.name] = size;
    }
    return { bytes, dims };
  }
  return { read };
}
