/* Requests to the server. Views need not look for warnings in an answer: the frame hears of them here. */

/** An answer that is no success. `message` is meant for a reader; `status` is 0 if there was no answer at all. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

const TIMEOUT_MS = 30_000;
const base = new URL("api/", document.baseURI);

/** Hears `warnings` (detail: list of strings), `indexed` (detail: share or null) and `reached` (detail: boolean). */
export const answers = new EventTarget();
const tell = (kind, detail) => answers.dispatchEvent(new CustomEvent(kind, { detail }));

/** Return the address of a path, given as a string or as parts that are escaped one by one. */
export function address(path, params = {}) {
  const text = Array.isArray(path) ? path.map(encodeURIComponent).join("/") : path.replace(/^\/?(api\/)?/, "");
  const url = new URL(text, base);
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") url.searchParams.append(name, each);
    }
  }
  return url;
}

/**
 * Return the JSON at a path below `/api/`: `get(["runs", run, "status"])` or `get("runs/RUN/status")`. Parameters that
 * are null or empty are left out; a list gives its parameter several times. Raises `ApiError`.
 */
export async function get(path, params = {}, { signal } = {}) {
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  const document_ = await answered(address(path, params), { signal: signal ? AbortSignal.any([signal, limit]) : limit });
  if (document_.warnings?.length) tell("warnings", document_.warnings);
  if ("indexed" in document_) tell("indexed", document_.indexed);
  return document_;
}

/** Post JSON to a path below `/api/`, and return the answer. Raises `ApiError`. */
export async function post(path, body) {
  return answered(address(path), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
}

async function answered(url, options) {
  let response;
  try {
    response = await fetch(url, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error; // the page that asked is gone
    if (error.name !== "TimeoutError") tell("reached", false);
    throw new ApiError(0, error.name === "TimeoutError" ? "The server took too long to answer." : "The server does not answer.");
  }
  tell("reached", true);
  let document_ = null;
  try {
    document_ = await response.json();
  } catch {
    // no JSON: the status says enough
  }
  if (response.ok && document_ !== null) return document_;
  throw new ApiError(response.status, document_?.error?.message ?? `The server answered ${response.status}.`);
}
