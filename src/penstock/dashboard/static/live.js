/*
 * The stream of server-sent events of the run on show. A browser has six connections for all tabs of one server, so its
 * tabs share a stream: the one that holds a lock reads it and passes events on, and when that tab ends or is hidden,
 * another one gets the lock. A hidden page takes no part, and the stream of an ended run only looks now and then whether
 * the run was resumed. Without a secure context there are no locks, and each page has a stream of its own.
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
  const shared = `penstock.live ${run}`; // name of the lock and of the channel
  const me = String(Math.random());
  const latest = new Map(); // kind -> latest event of our stream
  let source = null;
  let channel = null;
  let leaving = null;
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
      leave();
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

  /** Take part while the page is visible. */
  function turn() {
    leave();
    if (!document.hidden) join();
  }

  function leave() {
    clearTimeout(timer);
    source?.close();
    source = null;
    leaving?.abort(); // ends the lock, or the wait for it
    channel?.close();
    leaving = channel = null;
  }

  function join() {
    if (!navigator.locks || !window.BroadcastChannel) {
      open();
      return;
    }
    channel = new BroadcastChannel(shared);
    channel.onmessage = ({ data: { kind, value, to, from } }) => {
      if (kind !== "joined") {
        if (to === undefined || to === me) hear(kind, value);
      } else if (source) {
        for (const [known, event] of latest) channel.postMessage({ kind: known, value: event, to: from });
      }
    };
    channel.postMessage({ kind: "joined", from: me });
    leaving = new AbortController();
    const { signal } = leaving;
    const hold = () => signal.aborted ? null : new Promise((release) => {
      signal.addEventListener("abort", release);
      open();
    });
    navigator.locks.request(shared, { signal }, hold).catch((error) => {
      if (error.name !== "AbortError") throw error; // the page left before its turn came
    });
  }

  function open() {
    latest.clear();
    source = new EventSource(address(["runs", run, "live"]));
    source.onopen = () => {
      failures = 0;
      tell("connection", "live");
    };
    source.onerror = () => {
      source.close();
      tell("connection", "reconnecting");
      timer = setTimeout(open, AGAIN_MS[Math.min(failures++, AGAIN_MS.length - 1)]);
    };
    for (const kind of KINDS) {
      source.addEventListener(kind, ({ data }) => {
        if (kind === "ended") {
          source.close();
          timer = setTimeout(open, ENDED_AGAIN_MS);
        }
        tell(kind, JSON.parse(data || "null"));
      });
    }
  }

  /** Pass an event of our stream on to the other pages, and take it. */
  function tell(kind, value) {
    latest.set(kind, value);
    if (kind === "status" && !OVER.has(value.status)) latest.delete("ended"); // it was resumed
    channel?.postMessage({ kind, value });
    hear(kind, value);
  }

  /** Take an event, of our stream or of the page that holds it. */
  function hear(kind, value) {
    const hasEnded = live.state === "ended";
    if (kind === "connection") {
      if (!hasEnded || value !== "live") become(value);
      return;
    }
    if (kind === "status" && hasEnded && !OVER.has(value.status)) become("live");
    if (kind === "ended") become("ended");
    if (!hasEnded || kind === "status") emit(kind, value);
  }

  document.addEventListener("visibilitychange", turn);
  turn();
  return live;
}
