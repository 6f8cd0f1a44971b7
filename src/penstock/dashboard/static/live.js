/*
 * One stream of server-sent events for the run on show. A browser has six connections for all tabs of one server, so a
 * hidden page holds none, and the page of an ended run only looks now and then whether the run was resumed.
 */

import { address } from "./api.js";
import { OVER } from "./words.js";

const KINDS = ["status", "step", "decisions", "ended"];
const AGAIN_MS = [1000, 2000, 5000, 10000];
const ENDED_AGAIN_MS = 30000;

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
      document.removeEventListener("visibilitychange", turn);
      pause();
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

  function pause() {
    clearTimeout(timer);
    source?.close();
  }

  /** Open the stream of a visible page, and close that of a hidden one. */
  function turn() {
    pause();
    if (!document.hidden) open();
  }

  function open() {
    source = new EventSource(address(["runs", run, "live"]));
    source.onopen = () => {
      failures = 0;
      if (live.state !== "ended") become("live");
    };
    source.onerror = () => {
      pause();
      become("reconnecting");
      timer = setTimeout(open, AGAIN_MS[Math.min(failures++, AGAIN_MS.length - 1)]);
    };
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        const value = JSON.parse(event.data || "null");
        if (kind === "status" && live.state === "ended" && !OVER.has(value.status)) become("live"); // it was resumed
        const isKnown = live.state === "ended" && kind !== "status";
        if (kind === "ended") {
          pause();
          timer = setTimeout(open, ENDED_AGAIN_MS);
          become("ended");
        }
        if (!isKnown) emit(kind, value);
      });
    }
  }

  document.addEventListener("visibilitychange", turn);
  turn();
  return live;
}
