// Requests to the service that served this page.

const KEY = "cdmpp-api-key";
const FILE_LIMIT = "The setting max_body_bytes is the limit.";

/** A refused request: the message and hint of the service, or a connection error. */
export class Refusal extends Error {
  constructor(status, code, message, hint = "") {
    super(message);
    Object.assign(this, { status, code, hint });
  }
}

// The browser keeps the key until the tab is closed.
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

async function refusal(response, path, isFile) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // Not a problem document, for example the response of a proxy.
  }
  const where = path.split("?")[0];
  if (response.status === 404 && (body.code ?? "not_found") === "not_found") {
    return new Refusal(404, "not_found", `This service has no ${where}.`, "A newer version has it.");
  }
  if (response.status === 401) {
    document.dispatchEvent(new CustomEvent("key-wanted"));
    return new Refusal(401, "unauthorized", "This service requires an API key.", "Enter it at the bottom of this page.");
  }
  if (response.status === 413 && isFile) {
    return new Refusal(413, body.code, "The file is larger than this service accepts.", FILE_LIMIT);
  }
  const places = (body.errors ?? []).filter((e) => e.message !== body.detail).map((e) => `${e.path}: ${e.message}`).join("; ");
  const detail = [body.detail ?? `${where} returned status ${response.status}`, places].filter(Boolean).join(" – ");
  const wait = response.headers.get("retry-after");
  const hint = [body.hint, wait ? `retry in ${wait} s` : ""].filter(Boolean).join("; ");
  return Object.assign(new Refusal(response.status, body.code ?? "http_error", detail, hint), { wait_s: Number(wait) || 1 });
}

/**
 * Send one request: `json` as JSON, or `bytes` unchanged. Returns parsed JSON, or text if `text` is set.
 * Throws a Refusal; an aborted request throws the browser's AbortError.
 */
export async function call(path, { json, bytes, text = false, signal } = {}) {
  const headers = {};
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  if (json !== undefined) headers["Content-Type"] = "application/json";
  if (bytes !== undefined) headers["Content-Type"] = "application/octet-stream";
  const body = json !== undefined ? JSON.stringify(json) : bytes;
  let response;
  try {
    // Relative to the page: a proxy may add a path prefix.
    response = await fetch(path.slice(1), { method: body === undefined ? "GET" : "POST", headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const large = bytes !== undefined && bytes.size > 2 ** 20;
    throw new Refusal(0, "unreachable", "The service did not respond.", large
      ? `The file may be too large. ${FILE_LIMIT}`
      : "Check that it is running.");
  }
  if (!response.ok) throw await refusal(response, path, bytes !== undefined);
  return text ? response.text() : response.json();
}
