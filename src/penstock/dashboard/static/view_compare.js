/* Several runs side by side: curves over each other, settings that differ, and where their time went. */

import { chart, last, smooth } from "./charts.js";
import { append, button, empty, h } from "./dom.js";
import { NONE, count, duration, moment, number, percent, plain, setting, spoken } from "./format.js";
import { spent, working } from "./gantt.js";
import { predictionsOf } from "./prediction.js";
import { stateClass, kindOf } from "./words.js";

const LINES = ["s1", "s2", "s3", "s4", "s7", "s6", "s5", "s8"];
const MOST = LINES.length;
const NAMES = ["reward", "entropy", "staleness_mean", "rate:tokens_trained_total", "rate:tokens_generated_total", "response_length_mean", "rate:trainer_busy_s", "rate:generator_busy_s", "num_trainers", "num_servers", "grad_norm", "kl_engine_trainer"];

/** Curves: [title, unit, series of the server, further options]. */
const CURVES = [
  ["Reward", "training, smoothed", "reward", {}],
  ["Held-out reward", "mean", "held out", {}],
  ["Trained tokens", "per second", "rate:tokens_trained_total", { zero: true }],
  ["Generated tokens", "per second", "rate:tokens_generated_total", { zero: true }],
  ["Trainer busy", "share of the time", "busy:trainer", { range: [0, 1.05] }],
  ["Servers busy", "share of the time", "busy:generator", { range: [0, 1.05] }],
  ["Staleness", "policy versions, mean", "staleness_mean", { zero: true }],
  ["Entropy", "nats per token", "entropy", { zero: true }],
  ["Length", "tokens, mean", "response_length_mean", { zero: true }],
  ["Gradient norm", "", "grad_norm", { zero: true }],
  ["Engine against trainer", "KL, nats per token", "kl_engine_trainer", { zero: true }],
];

/** Show runs side by side; `rest` are their ids. */
export async function show(root, { rest, api, link }) {
  const known = (await api.get("runs")).runs;
  const ids = rest.slice(0, MOST);
  append(root, [chooser(known, ids)]);
  if (ids.length < 2) {
    append(root, [empty("Choose at least two runs", ids.length ? "One is chosen: add another to see their curves over each other." : "Their curves are drawn over each other, and the settings that differ are listed.")]);
    if (!ids.length) return null;
  }
  const all = await Promise.all(ids.map(async (id) => {
    const [status, settings, data, evaluations, timeline, forecast] = await Promise.all([
      api.get(["runs", id, "status"]), api.get(["runs", id, "settings"]).catch(() => ({ settings: [] })), api.get(["runs", id, "series"], { names: NAMES, x: "step", points: 400 }).catch(() => ({ x: [], times: [], series: {} })),
      api.get(["runs", id, "evaluations"]).catch(() => ({ evaluations: [] })), wholeTimeline(api, id),
      api.get(["runs", id, "prediction"]).catch(() => null),
    ]);
    return { id, status, forecast, settings: settings.settings, data: completed(data), evaluations: evaluations.evaluations, timeline };
  }));
  const charts = [];
  const curves = h("div", { class: "charts" });
  let by = "step";
  for (const [title, unit, name, options] of CURVES) {
    const series = ids.map((id, index) => ({ name: id, label: id, colour: LINES[index], width: 2, spans: true, points: name === "held out", dash: index >= 4 ? [6, 3] : null }));
    const made = chart({ title, unit, series, ...options });
    charts.push([made, name]);
    curves.append(made.element);
  }
  const axis = ["step", "seconds"].map((name) => button(name, () => {
    by = name;
    axis.forEach((each) => each.setAttribute("aria-pressed", String(each.textContent === name)));
    draw();
  }, { "aria-pressed": String(name === "step") }));
  append(root, [
    summary(all, link),
    h("section", { class: "panel section", "aria-label": "Prediction and reality" }, h("header", {}, h("h2", {}, "Prediction and reality"), h("span", { class: "muted" }, "The ratio is measured / predicted. Measured figures leave out the first tenth of the steps.")), predictionsOf(all)),
    h("section", { class: "section", "aria-label": "Curves" }, h("div", { class: "tools" }, h("h2", {}, "Curves"), h("div", { class: "segments", role: "group", "aria-label": "Horizontal axis" }, axis), h("span", { class: "muted" }, "Seconds count from the first step of each run.")), curves),
    h("section", { class: "panel", "aria-label": "Where the time went" }, h("header", {}, h("h2", {}, "Where the time went"), h("span", { class: "muted" }, "over each whole run")), phases(all)),
    h("section", { class: "panel", "aria-label": "Settings that differ" }, h("h2", {}, "Settings that differ"), differences(all)),
  ]);

  function draw() {
    for (const [made, name] of charts) {
      const data = overlaid(all, name, by);
      made.element.hidden = !data.x.length;
      made.update({ ...data, lines: [], marks: [] });
    }
  }
  draw();
  return () => charts.forEach(([made]) => made.dispose());
}

function chooser(known, ids) {
  const go = (next) => (location.hash = `#/compare/${next.map(encodeURIComponent).join(",")}`);
  const others = known.filter((each) => !ids.includes(each.id));
  const choice = h("select", { "aria-label": "Add a run", onchange: () => choice.value && go([...ids, choice.value]) }, h("option", { value: "" }, "add a run…"),
    others.map((each) => h("option", { value: each.id }, `${each.id}  ${plain(each.environment)}  ${each.simulated ? "simulated" : each.status}`)));
  return h("div", { class: "tools" }, ids.map((id, index) => button("", () => go(ids.filter((each) => each !== id)), { class: "small", "aria-label": `Remove ${id}`, title: `Remove ${id}`, icon: [h("span", { class: `key ${LINES[index]}`, "aria-hidden": "true" }), h("span", { class: "mono" }, id), " ✕"] })), ids.length < MOST ? choice : null);
}

async function wholeTimeline(api, id) {
  try {
    const latest = await api.get(["runs", id, "timeline"], { width: 10 });
    if (latest.begin === null || latest.begin === undefined) return null;
    return await api.get(["runs", id, "timeline"], { from: latest.begin, to: latest.end, width: 1000 });
  } catch {
    return null;
  }
}

function completed(data) {
  const of = (name) => data.series[name]?.mean ?? [];
  for (const [name, busy, parts] of [["busy:trainer", "rate:trainer_busy_s", "num_trainers"], ["busy:generator", "rate:generator_busy_s", "num_servers"]]) {
    const num = last(of(parts)) || 1;
    data.series[name] = { mean: of(busy).map((share) => (share === null ? null : Math.min(1, share / num))) };
  }
  return data;
}

/** Return the curves of all runs over one x: their steps, or the seconds since their first step. */
function overlaid(all, name, by) {
  const curves = all.map(({ data, evaluations }) => {
    const begin = data.times[0] ?? 0;
    const place = (step, time) => (by === "step" ? step : Math.max(0, time - begin));
    if (name === "held out") return new Map(evaluations.filter((each) => typeof each.reward === "number").map((each) => [place(each.step, each.time), each.reward]));
    const values = smooth(data.series[name]?.mean ?? []);
    return new Map(values.map((value, index) => [place(data.x[index], data.times[index]), value]).filter(([, value]) => value !== null));
  });
  const x = [...new Set(curves.flatMap((curve) => [...curve.keys()]))].sort((a, b) => a - b);
  return { x, times: [], series: Object.fromEntries(all.map(({ id }, index) => [id, { mean: x.map((each) => curves[index].get(each)) }])) };
}

function summary(all, link) {
  const rows = [
    ["status", ({ status }) => [h("span", { class: `pill ${stateClass(status.status)}` }, status.status), status.simulated ? h("span", { class: "pill calm" }, "simulated") : null]], ["environment", ({ status }) => plain(status.environment)],
    ...(all.some(({ status }) => status.simulated) ? [["simulated", ({ status }) => (status.simulated ? `${plain(status.simulated.strategy)}${status.simulated.fitted_to ? `, fitted to ${status.simulated.fitted_to}` : ""}` : "no, a real run")]] : []),
    ["started", ({ status }) => moment(status.started).slice(0, 16)], ["wall time", ({ status }) => spoken(status.wall_seconds)],
    ["steps", ({ status }) => `${count(status.progress.step)} of ${status.progress.steps ? count(status.progress.steps) : "?"}`],
    ["reward, latest steps", ({ status }) => number(status.progress.reward)],
    ["held out, first → last", ({ evaluations }) => (evaluations.length ? `${number(evaluations[0].reward)} → ${number(evaluations.at(-1).reward)}` : NONE)],
    ["episodes", ({ status }) => count(status.progress.episodes)], ["trained episodes", ({ status }) => count(status.ledger?.trained)],
    ["trainer busy", ({ status }) => percent(status.progress.trainer_busy_fraction)], ["servers busy", ({ status }) => percent(status.progress.generator_busy_fraction)],
    ["staleness, mean", ({ status }) => number(status.progress.staleness_mean)],
  ];
  return h("section", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": "Results" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "run"), all.map(({ id }, index) => h("th", { scope: "col" }, h("span", { class: `key ${LINES[index]}`, "aria-hidden": "true" }), h("a", { class: "mono", href: link(id, "overview") }, id))))),
    h("tbody", {}, rows.map(([name, value]) => h("tr", {}, h("th", { scope: "row", class: "nowrap" }, name), all.map((each) => h("td", { class: "nowrap" }, value(each))))))));
}

function phases(all) {
  const rows = all.flatMap(({ id, timeline }, index) => {
    const key = h("th", { scope: "row", class: "nowrap" }, h("span", { class: `key ${LINES[index]}`, "aria-hidden": "true" }), h("span", { class: "mono" }, id));
    if (!timeline) return [h("tr", {}, key, h("td", { colspan: 4, class: "muted" }, "no activity recorded"))];
    const whole = Math.max(1e-9, timeline.end - timeline.begin);
    return [...spent(timeline, timeline.begin, timeline.end)].map(([process, kinds], place) => {
      const parts = [...kinds].sort((a, b) => b[1] - a[1]);
      return h("tr", {}, place ? h("td", {}) : key, h("td", { class: "nowrap" }, process), h("td", { class: "num" }, percent(Math.min(1, working(kinds) / whole))),
        h("td", {}, h("div", { class: "bars", "aria-hidden": "true" }, parts.map(([kind, seconds]) => h("span", { class: kindOf(kind)[1], style: { width: `${Math.min(100, (100 * seconds) / whole)}%` } })))),
        h("td", { class: "muted" }, parts.map(([kind, seconds]) => `${kindOf(kind)[0]} ${duration(seconds)}`).join(", ")));
    });
  });
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Shares of the time" }, h("table", {},
    h("thead", {}, h("tr", {}, ["run", "process", "working", "share of the run", "with"].map((name, index) => h("th", { scope: "col", class: index === 2 ? "num" : null }, name)))), h("tbody", {}, rows)));
}

function differences(all) {
  const byName = new Map();
  for (const [index, { settings }] of all.entries()) {
    for (const each of settings) {
      if (!byName.has(each.name)) byName.set(each.name, []);
      byName.get(each.name)[index] = each.value;
    }
  }
  const found = [...byName].filter(([name, values]) => name !== "run_id" && new Set(all.map((_, index) => JSON.stringify(values[index] ?? null))).size > 1);
  if (!found.length) return h("p", { class: "muted" }, all.length > 1 ? "None: these runs have the same settings." : "One run differs from none.");
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Settings that differ, as a table" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), all.map(({ id }) => h("th", { scope: "col", class: "mono" }, id)))),
    h("tbody", {}, found.sort(([a], [b]) => a.localeCompare(b)).map(([name, values]) => h("tr", {}, h("th", { scope: "row", class: "mono" }, name), all.map((_, index) => h("td", { class: "mono break" }, setting(values[index]))))))));
}
