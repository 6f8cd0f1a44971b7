/* One stream of server-sent events for the run on show. */

import { address } from "./api.js";

const KINDS = ["status", "step", "decisions", "ended"];
const AGAIN_MS = [1000, 2000, 5000, 10000];

/**
 * Follow a run. Returns `{on(kind, callback), close(), state}`; `on` returns a function that ends the subscription.
 * Kinds: `status`, `step`, `decisions`, `ended` with the JSON of the server, and `connection` with "connecting",
 * "live", "reconnecting" or "ended".
 */
export function follow(run) {
  const callbacks = new Map();
  let source = null;
  let timer = 0;
  let failures = 0;

  const live = {
    state: "connecting",
    on(kind, callback) {
      if (!callbacks.has(kind)) callbacks.set(kind, new Set());
      callbacks.get(kind).add(callback);
      return () => callbacks.get(kind).delete(callback);
    },
    close() {
      clearTimeout(timer);
      source?.close();
      callbacks.clear();
    },
  };

  function emit(kind, value) {
    for (const callback of [...(callbacks.get(kind) ?? [])]) callback(value);
  }

  function become(state) {
    if (live.state === state) return;
    live.state = state;
    emit("connection", state);
  }

  function open() {
    source = new EventSource(address(["runs", run, "live"]));
    source.onopen = () => {
      failures = 0;
      become("live");
    };
    source.onerror = () => {
      source.close();
      become("reconnecting");
      timer = setTimeout(open, AGAIN_MS[Math.min(failures++, AGAIN_MS.length - 1)]);
    };
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        const value = JSON.parse(event.data || "null");
        if (kind === "ended") become("ended"); // the stream goes on: the run may be resumed
        if (kind === "step" && live.state === "ended") become("live");
        emit(kind, value);
      });
    }
  }

  open();
  return live;
}
