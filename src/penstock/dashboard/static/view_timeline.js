/* What each process did when: a Gantt chart to zoom into, facts of a span, and the shares of a window. */

import { append, button, debounced, empty, fill, h, refresh, svg } from "./dom.js";
import { NONE, clock, duration, moment, number, percent, plural } from "./format.js";
import { gantt, spent, working } from "./gantt.js";
import { KINDS, kindOf } from "./words.js";

const FOLLOW_MS = 2000;
const FOLLOW_S = 60;
const INDEX_MS = 1500; // until the window is read again, while the server still reads the files
const MAX_ROWS = 200;

/** Show the timeline of a run. `params` may have `from` and `to`, in seconds since the epoch. */
export async function show(root, { run, api, live, params }) {
  const facts = h("div", { class: "panel", "aria-live": "polite" });
  const shares = h("div", { class: "panel" });
  const rows = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Spans in the window" });
  const kinds = h("div", { class: "kinds", role: "group", "aria-label": "Kinds of spans" });
  const range = h("span", { class: "muted num" });
  const busy = h("span", { class: "muted", role: "status" });
  const hidden = new Set();
  let shown = null;
  let following = false;
  let isOver = false;
  let timer = 0;

  const chart = gantt({
    fetch_: (from, to, width) => api.get(["runs", run, "timeline"], { from, to, width }),
    onchange: (window_, data) => {
      shown = { window: window_, data };
      describe();
    },
    onselect: (found) => fill(facts, factsOf(found, chart, shown)),
    onbusy: (isBusy) => (busy.textContent = isBusy ? "reading…" : ""),
    onerror: (error) => (busy.textContent = error.message),
  });

  const describe = debounced(() => {
    const { window: { from, to }, data } = shown;
    const { begin } = chart.limits();
    const after = from - begin < 0.001 ? "the start" : `${duration(from - begin)} after the start`;
    range.textContent = `${duration(to - from)}, from ${clock(from, 1)} (${after})`;
    refresh(shares, sharesOf(data, from, to));
    if (details.open) refresh(rows, tableOf(data, from, to, chart));
    drawKinds(data);
    const reading = data.indexed !== undefined && data.indexed !== null && data.indexed < 1;
    if (reading) {
      busy.textContent = `reading the files: ${percent(data.indexed)}`;
      again();
    }
  }, 60);

  const again = debounced(async () => {
    if (isOver) return;
    await chart.refetchWhole();
    await chart.refetch();
  }, INDEX_MS);

  const details = h("details", { class: "panel", ontoggle: () => shown && describe() }, h("summary", {}, "Spans of this window as a table"), rows);

  let drawn = "";
  function drawKinds(data) {
    const names = data.kinds ?? [];
    if (drawn === names.join()) return;
    drawn = names.join();
    const order = Object.keys(KINDS);
    const sorted = [...names].sort((a, b) => (order.indexOf(a) + 99) % 99 - (order.indexOf(b) + 99) % 99);
    fill(kinds, sorted.map((kind) => button("", (event) => {
      const isOn = hidden.delete(kind);
      if (!isOn) hidden.add(kind);
      event.currentTarget.setAttribute("aria-pressed", String(isOn));
      chart.hide(kind, !isOn);
    }, { "aria-pressed": String(!hidden.has(kind)), "aria-label": null, title: null, icon: [svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { class: kindOf(kind)[1], width: 10, height: 10, rx: 2 })), kindOf(kind)[0]] })));
  }

  const follow = button("Follow", () => setFollowing(!following), { "aria-pressed": "false", hidden: true });
  function setFollowing(isOn) {
    following = isOn;
    follow.setAttribute("aria-pressed", String(isOn));
    clearTimeout(timer);
    if (isOn) tickOn();
  }
  async function tickOn() {
    if (!following) return;
    if (!document.hidden) {
      try {
        const size = Math.min(chart.window().to - chart.window().from, 600);
        const answer = await api.get(["runs", run, "timeline"], { width: 10 });
        if (!following) return;
        chart.extend(answer.end);
        chart.show(answer.end - size, answer.end, { quiet: true });
        await chart.refetch();
        await chart.refetchWhole();
      } catch (error) {
        busy.textContent = error.message;
      }
    }
    timer = setTimeout(tickOn, FOLLOW_MS);
  }

  const act = (change) => () => {
    setFollowing(false);
    change();
  };
  const tools = h("div", { class: "tools" },
    button("Earlier", act(() => chart.pan(-0.4)), { icon: "◀", class: "icon" }), button("Later", act(() => chart.pan(0.4)), { icon: "▶", class: "icon" }),
    button("Zoom in", act(() => chart.zoom(0.5)), { icon: "+", class: "icon" }), button("Zoom out", act(() => chart.zoom(2)), { icon: "−", class: "icon" }),
    button("Whole run", act(() => chart.show(chart.limits().begin, chart.limits().end))),
    button("Last minute", act(() => chart.show(chart.limits().end - FOLLOW_S, chart.limits().end))),
    button("10 s", act(() => {
      const { from, to } = chart.window();
      chart.show((from + to) / 2 - 5, (from + to) / 2 + 5);
    })),
    button("PNG", () => chart.save(`Timeline of ${run}`), { "aria-label": "PNG of the timeline" }),
    follow, range, busy);
  chart.element.addEventListener("pointerdown", () => setFollowing(false));
  chart.element.addEventListener("wheel", () => setFollowing(false), { passive: true });
  const keys = h("p", { class: "muted", id: "gantt-keys" }, "Drag or arrow keys move, wheel or + and − zoom, 0 shows the whole run. Click a bar, or press N, P, ↑ and ↓, for its facts.");
  fill(facts, h("h2", {}, "Span"), h("p", { class: "muted" }, "Choose a bar or a mark to see what it was."));
  append(root, [h("section", { class: "panel section", "aria-label": "Timeline" }, tools, chart.element, kinds, keys), h("div", { class: "beside" }, shares, facts), details]);

  const first = await chart.begin(params.get("from"), params.get("to"));
  if (!first || !first.processes.length) {
    const status = await api.get(["runs", run, "status"]).catch(() => null);
    fill(root, empty("No activity recorded yet", status ? `The run is in the phase “${status.progress?.phase ?? status.status}”. ` : "", "Bars appear when servers generate and the trainer trains."));
    chart.dispose();
    const retry = debounced(async () => {
      const found = await api.get(["runs", run, "timeline"], { width: 10 }).catch(() => null);
      if (found?.processes.length) dispatchEvent(new HashChangeEvent("hashchange"));
    }, 500);
    live.on("status", retry);
    return null;
  }
  const update = () => {
    const isLive = live.state === "live" || live.state === "connecting";
    follow.hidden = !isLive;
    if (!isLive) setFollowing(false);
  };
  live.on("connection", update);
  live.on("status", (status) => {
    const isRunning = status.status === "running";
    const wasHidden = follow.hidden;
    follow.hidden = !isRunning;
    if (isRunning && wasHidden && !params.get("from")) setFollowing(true);
    if (!isRunning) setFollowing(false);
  });
  return () => {
    isOver = true;
    setFollowing(false);
    chart.dispose();
  };
}

/** Where the time of the window went, by process. */
function sharesOf(data, from, to) {
  const whole = to - from;
  const found = spent(data, from, to);
  return [
    h("header", {}, h("h2", {}, "Where the time went"), h("span", { class: "muted" }, "in this window")),
    found.size ? h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Shares of the window" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "process"), h("th", { scope: "col", class: "num" }, "working"), h("th", { scope: "col" }, "with"))),
      h("tbody", {}, [...found].map(([process, kinds]) => {
        const parts = [...kinds].sort((a, b) => b[1] - a[1]);
        return h("tr", {}, h("th", { scope: "row", class: "nowrap" }, process), h("td", { class: "num" }, percent(Math.min(1, working(kinds) / whole))),
          h("td", {}, h("div", { class: "bars", "aria-hidden": "true" }, parts.map(([kind, seconds]) => h("span", { class: kindOf(kind)[1], style: { width: `${Math.min(100, (100 * seconds) / whole)}%` } }))),
            h("span", { class: "muted" }, parts.map(([kind, seconds]) => `${kindOf(kind)[0]} ${percent(seconds / whole)}`).join(", "))));
      })))) : h("p", { class: "muted" }, "No process did anything that is recorded in this window."),
    h("p", { class: "muted" }, "Working: in model code, by the clock. The rest of the time a process waits for the others, or moves data. Where processes share cores, this includes waiting for a core; the busy shares of the overview do not."),
  ];
}

function factsOf(found, chart, shown) {
  if (!found) return [h("h2", {}, "Span"), h("p", { class: "muted" }, "Choose a bar or a mark to see what it was.")];
  const { begin } = chart.limits();
  if (found.mark) {
    const { mark } = found;
    return [h("h2", {}, mark.kind), h("p", {}, mark.text || NONE), h("dl", { class: "facts" }, h("dt", {}, "time"), h("dd", {}, moment(mark.time)), h("dt", {}, "after the start"), h("dd", {}, duration(mark.time - begin)))];
  }
  const [process, kind, start, end, version, merged, busy] = found.span;
  const before = shown.data.spans.filter((span) => span[0] === process && span[3] <= start + 1e-9).reduce((latest, span) => Math.max(latest, span[3]), -Infinity);
  const rows = [
    ["process", process], ["duration", duration(end - start)], ["from", clock(start, 3)], ["to", clock(end, 3)], ["after the start", duration(start - begin)],
    version === null || version === undefined || version < 0 ? null : ["policy version", number(version)],
    merged > 1 ? ["holds", `${plural(merged, "span")}; zoom in to see them`] : null,
    merged > 1 ? ["working", percent(busy)] : null,
    Number.isFinite(before) && start - before > 1e-4 ? ["idle before it", duration(start - before)] : null,
  ].filter(Boolean);
  return [h("h2", {}, kindOf(kind)[0]), h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("p", { class: "tools" }, button("Zoom to it", () => chart.show(start - (end - start), end + (end - start))))];
}

function tableOf(data, from, to, chart) {
  const inside = data.spans.filter((span) => span[3] >= from && span[2] <= to).sort((a, b) => a[2] - b[2]);
  return h("table", {},
    h("caption", {}, inside.length > MAX_ROWS ? `The first ${MAX_ROWS} of ${plural(inside.length, "span")}: zoom in to see all` : plural(inside.length, "span")),
    h("thead", {}, h("tr", {}, ["process", "kind", "from", "duration", "version", "spans"].map((name, index) => h("th", { scope: "col", class: index > 1 ? "num" : null }, name)), h("th", { scope: "col" }, h("span", { class: "hidden" }, "choose")))),
    h("tbody", {}, inside.slice(0, MAX_ROWS).map((span) => h("tr", {}, h("th", { scope: "row" }, span[0]), h("td", {}, kindOf(span[1])[0]), h("td", { class: "num" }, clock(span[2], 3)), h("td", { class: "num" }, duration(span[3] - span[2])),
      h("td", { class: "num" }, number(span[4])), h("td", { class: "num" }, number(span[5])), h("td", {}, button("Show", () => chart.select(span), { class: "small quiet", "aria-label": `Show ${kindOf(span[1])[0]} of ${span[0]} at ${clock(span[2], 3)}` }))))));
}
