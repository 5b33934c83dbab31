// Talking to the service that served this page, and to nobody else.

const KEY = "cdmpp-api-key";
const FILE_LIMIT = "Its setting max_body_bytes says how large one may be.";

/** A refusal: what the service said, with its hint, or that it could not be reached. */
export class Refusal extends Error {
  constructor(status, code, message, hint = "") {
    super(message);
    Object.assign(this, { status, code, hint });
  }
}

// The key lives as long as the tab.
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

async function refusal(response, path, isFile) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // Not a problem document: a proxy's answer, say.
  }
  const where = path.split("?")[0];
  if (response.status === 404 && (body.code ?? "not_found") === "not_found") {
    return new Refusal(404, "not_found", `This service has no ${where}.`, "A newer one answers it.");
  }
  if (response.status === 401) {
    document.dispatchEvent(new CustomEvent("key-wanted"));
    return new Refusal(401, "unauthorized", "This service asks for an API key.", "Enter it at the foot of this page.");
  }
  if (response.status === 413 && isFile) {
    return new Refusal(413, body.code, "The file is larger than this service takes.", FILE_LIMIT);
  }
  const places = (body.errors ?? []).map((e) => `${e.path}: ${e.message}`).join("; ");
  const detail = [body.detail ?? `${where} was answered ${response.status}`, places].filter(Boolean).join(" – ");
  const wait = response.headers.get("retry-after");
  const hint = [body.hint, wait ? `Try again in ${wait} s.` : ""].filter(Boolean).join(" ");
  return new Refusal(response.status, body.code ?? "http_error", detail, hint);
}

/**
 * One exchange. `json` is sent as JSON, `bytes` as they are; the answer is parsed JSON, or text with `text`.
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
    // Relative to the page: behind a proxy the service may have a path in front.
    response = await fetch(path.slice(1), { method: body === undefined ? "GET" : "POST", headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const large = bytes !== undefined && bytes.size > 2 ** 20;
    throw new Refusal(0, "unreachable", "The service did not answer.", large
      ? `Perhaps the file is too large for it. ${FILE_LIMIT}`
      : "Is it still running?");
  }
  if (!response.ok) throw await refusal(response, path, bytes !== undefined);
  return text ? response.text() : response.json();
}
