// The form of the API key.

import { apiKey } from "./api.js";
import { find } from "./dom.js";

/** Open the form when a request needs a key; `use` is called with each new key. */
export function keyForm(use) {
  document.addEventListener("key-wanted", () => (find("key-part").open = true));
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    apiKey.set(find("key").value.trim());
    use();
  });
}
