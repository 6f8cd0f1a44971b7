/* The state of a run on one page: four questions with their answers, alarms and what to type, curves, the ledger. */

import { chart, last, smooth, withPoints } from "./charts.js";
import { append, button, command, debounced, empty, fill, h, refresh as update } from "./dom.js";
import { ledgerFlow } from "./flow.js";
import { NONE, ago, count, moment, number, percent, plain, plural, spoken } from "./format.js";
import { histogram } from "./histogram.js";
import { predictionPanel } from "./prediction.js";
import { OVER, phaseAbout, stateClass } from "./words.js";

const LEAST_REFRESH_MS = 3000;
const REFRESH_COST = 50; // the server works at most 1/50 of the time for the curves of a viewer
const KEPT_CHARTS = "penstock.charts";
const HALF = 0.5;
const LATEST_PART = 0.9; // alarms before this share of the steps are folded
const POINTS = 600;
const MOST_NAMES = 60; // in one request
const LAG = "staleness_tokens/"; // tokens of a step by version lag
const LAST_LAG = "15"; // has all older tokens too
const LAG_STEPS = 20; // latest steps of the histogram of lags
const LINES = ["s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8"];

/** Sections of curves: [title, about, charts]. `reward/*` stands for one series per tag. */
const SECTIONS = [
  ["Learning", "Does the policy get better at the task, also on tasks it is not trained on?", [
    { title: "Reward", unit: "mean of a step", about: "Everything that was played, before any filter. Held-out tasks are never trained.", series: [
      { name: "reward", label: "training", colour: "s5", band: true, width: 1 }, { name: "smooth:reward", label: "training, smoothed", colour: "s1", width: 2.5 }, { name: "held out", label: "held out", colour: "s2", points: true, spans: true, width: 1, dash: [3, 4] }] },
    { title: "Reward by tag", unit: "smoothed mean", tags: "reward", about: "One line for each environment of a mixture.", series: [] },
    { title: "pass@k", unit: "share of held-out tasks", about: "Tasks that at least one of k samples solves.", evaluations: true, range: [0, 1.05], series: [] },
    { title: "Entropy", unit: "nats per token", about: "How undecided the policy is. Near zero it no longer explores.", zero: true, series: [
      { name: "entropy", label: "each step", colour: "s5", band: true, width: 1 }, { name: "smooth:entropy", label: "smoothed", colour: "s1", width: 2.5 }] },
  ]],
  ["Speed", "Who waits for whom, and how much work gets done?", [
    { title: "Busy", unit: "share of the time", about: "Model compute. A side that is not busy waits for the other one, or for a core.", range: [0, 1.05], series: [
      { name: "busy:trainer", label: "trainer", colour: "s1", width: 2 }, { name: "busy:generator", label: "servers", colour: "s2", width: 2 }] },
    { title: "Throughput", unit: "tokens per second", zero: true, about: "What is generated and not trained was filtered, dropped or is held out.", series: [
      { name: "smooth:rate:tokens_generated_total", label: "generated", colour: "s5" }, { name: "smooth:rate:tokens_trained_total", label: "trained", colour: "s1", width: 2 }, { name: "bound", label: "X* for trained, estimated", colour: "s7", dash: [6, 4] }] },
    { title: "Queue", unit: "groups", zero: true, about: "Groups that wait to start, and groups that have started and are not served as new weights.", series: [
      { name: "groups_pending", label: "waiting", colour: "s8" }, { name: "groups_in_flight", label: "in flight", colour: "s1" }] },
    { title: "Longest wait", unit: "seconds in the queue", zero: true, series: [{ name: "oldest_wait_s", label: "oldest group", colour: "s1" }] },
  ]],
  ["Scheduling", "How old are the data, and when does the learner start?", [
    { title: "Staleness", unit: "policy versions", zero: true, about: "Version being trained minus the version that wrote a token.", series: [
      { name: "staleness_mean", label: "mean", colour: "s1", band: true, width: 2 }, { name: "staleness_max", label: "largest", colour: "s8", steps: true, width: 1 }] },
    { title: "Staleness of the latest steps", unit: "share of their tokens", lags: true, kind: "version lag", counted: "tokens", about: "Lag: optimizer steps between the version that wrote a token and the version being trained. Masked tokens are older than the bound and count for nothing.", series: [] },
    { title: "Trigger", unit: "N_min in samples, T_max in seconds (right)", zero: true, about: "The learner starts at N_min samples, or after waiting T_max.", series: [
      { name: "trigger_min_samples", label: "N_min", colour: "s1", steps: true, width: 2 }, { name: "trigger_max_wait_s", label: "T_max", colour: "s2", steps: true, axis: "right", dash: [6, 3] }] },
    { title: "Tokens masked", unit: "share of the batch", zero: true, about: "Trained answers have tokens that are too old or of unknown origin. They count for nothing.", series: [{ name: "tokens_masked_share", label: "masked", colour: "s7" }] },
    { title: "Length prediction", unit: "Kendall's τ", about: "Rank correlation of predicted and real lengths. 0 is worthless; the queue then runs in order of arrival.", series: [{ name: "length_tau", label: "τ", colour: "s4" }] },
  ]],
  ["Answers", "How long are they, and are long ones trained as often as short ones?", [
    { title: "Length", unit: "tokens", zero: true, series: [
      { name: "response_length_mean", label: "played, mean", colour: "s5", band: true }, { name: "length_p50_trained", label: "trained, median", colour: "s1", width: 2 }, { name: "length_p90_trained", label: "trained, 90th percentile", colour: "s4" }, { name: "length_p50_admitted", label: "of the data, median", colour: "s8", dash: [4, 3] }] },
    { title: "Length bias", unit: "Kolmogorov–Smirnov distance", zero: true, about: "Trained lengths against admitted and against played ones. 0 is no bias.", series: [
      { name: "length_ks", label: "against admitted", colour: "s1" }, { name: "length_ks_played", label: "against played", colour: "s2" }] },
    { title: "Turns and truncation", unit: "turns; share cut off (right)", zero: true, series: [
      { name: "turns_mean", label: "turns, mean", colour: "s1" }, { name: "truncated_share", label: "truncated", colour: "s7", axis: "right" }] },
  ]],
  ["Learner", "Are the updates sound?", [
    { title: "Loss", unit: "", series: [{ name: "loss", label: "loss", colour: "s1", band: true }] },
    { title: "Gradient norm", unit: "", zero: true, series: [{ name: "grad_norm", label: "norm", colour: "s1", band: true }] },
    { title: "Engine against trainer", unit: "KL, nats per token", zero: true, about: "Both compute the same log-probabilities. More than about 0.01 is a defect of the set-up.", series: [
      { name: "kl_engine_trainer", label: "KL", colour: "s1", band: true }, { name: "parity_gap_max", label: "largest gap of a token", colour: "s8", hidden: true }] },
    { title: "Clipping", unit: "share of tokens", zero: true, series: [{ name: "clip_fraction", label: "clipped", colour: "s2", band: true }] },
    { title: "Effective samples", unit: "share of the batch", range: [0, 1.05], about: "1: all tokens weigh the same. Low values say that the data are far from the policy.", series: [
      { name: "ess", label: "tokens", colour: "s1" }, { name: "sample_ess", label: "answers", colour: "s4" }] },
    { title: "KL to the reference", unit: "nats per token", zero: true, optional: true, series: [{ name: "kl_reference", label: "KL", colour: "s4" }] },
    { title: "Learning rate", unit: "", zero: true, series: [{ name: "learning_rate", label: "rate", colour: "s8" }] },
    { title: "Value function", unit: "loss", zero: true, series: [{ name: "value_loss", label: "critic", colour: "s4" }] },
  ]],
];

/** Show the overview of a run. */
export async function show(root, { run, api, live, link }) {
  const [first, settings, evaluations, { names }, forecast] = await Promise.all([
    api.get(["runs", run, "status"]),
    api.get(["runs", run, "settings"]).catch(() => ({ settings: [] })),
    api.get(["runs", run, "evaluations"]).catch(() => ({ evaluations: [] })),
    api.get(["runs", run, "names"]).catch(() => ({ names: [] })),
    api.get(["runs", run, "prediction"]).catch(() => ({ prediction: null, measured: null })),
  ]);
  const chosen = Object.fromEntries(settings.settings.map((each) => [each.name, each.value]));
  const state = { status: first, evaluations: evaluations.evaluations, names, chosen, forecast, data: null, lags: null, byTime: false, range: null, isEmpty: false, isOver: false, asked: 0, newest: null, refreshed: 0, cost_ms: 0, timer: 0 };
  const [alerts, answers, curves, ledger, facts] = ["section", "cards", "section", "panel", "section"].map((name) => h("div", { class: name }));
  const predicted = h("section", { class: "panel section", "aria-label": "Prediction and reality", hidden: true });
  const charts = new Map();
  const stop = stopping(run, api);
  append(root, [simulatedNote(first), alerts, h("section", { "aria-label": "Questions and answers" }, answers), predicted, curves, ledger,
    h("section", { class: "panel section", "aria-label": "Run" }, facts, h("div", { class: "tools" }, downloads(run, api), stop))]);

  function drawStatus() {
    update(alerts, alertsOf(state.status, link));
    alerts.hidden = !alerts.childElementCount;
    update(answers, answersOf(state, run, link));
    answers.classList.toggle("answers", answers.childElementCount > 3);
    const isOver = OVER.has(state.status.status);
    const [title, said] = isOver && state.status.ledger?.admitted
      ? [`Ledger at ${state.status.progress.unit} ${count(state.status.progress.step)}`, "Every admitted episode was in exactly one state. What was in work then ended with the run."]
      : ["Ledger", "Every admitted episode is in exactly one state. Nothing is lost silently."];
    update(ledger, h("header", {}, h("h2", {}, title), h("p", { class: "muted" }, said)),
      state.status.ledger?.admitted ? ledgerFlow(state.status.ledger, isOver) : empty(...(isOver ? ["No ledger", "The run took no step."] : ["No ledger yet", "The first step writes it."])));
    const hasPrediction = state.forecast.prediction && !state.status.simulated;
    predicted.hidden = !hasPrediction;
    if (hasPrediction) update(predicted, predictionPanel(state.forecast, state.status.processes ?? []));
    update(facts, aboutOf(state));
    stop.hidden = state.status.status !== "running";
  }

  const onrange = (from, to) => {
    state.range = from === null ? null : [stepAt(from, Math.floor), stepAt(to, Math.ceil)];
    widen.hidden = state.range === null;
    refresh();
  };
  const stepAt = (value, round) => {
    if (!state.byTime) return round(value);
    const index = state.data.times.findIndex((time) => time >= value);
    return index < 0 ? state.data.x.at(-1) : state.data.x[index];
  };
  const widen = button("Show all", () => onrange(null, null), { hidden: true });
  const axis = ["step", "time"].map((name) => button(name, () => {
    state.byTime = name === "time";
    axis.forEach((each) => each.setAttribute("aria-pressed", String(each.textContent === name)));
    redraw();
  }, { "aria-pressed": String(name === "step") }));
  const waiting = h("span", { class: "muted", role: "status" });
  const picker = h("input", { type: "text", list: "names", placeholder: "name of a number", "aria-label": "Any recorded number", autocomplete: "off" });
  const add = h("form", { class: "tools", onsubmit: (event) => {
    event.preventDefault();
    if (!state.names.includes(picker.value)) {
      picker.setCustomValidity("No number of this run has this name.");
      picker.reportValidity();
      picker.setCustomValidity("");
      return;
    }
    keep([...new Set([...kept(), picker.value])]);
    picker.value = "";
    drawSections();
    refresh();
  } }, picker, h("datalist", { id: "names" }, names.map((name) => h("option", { value: name }))), button("Add a chart", null, { type: "submit" }));
  append(curves, [h("div", { class: "tools" }, h("div", { class: "segments", role: "group", "aria-label": "Horizontal axis" }, axis), widen,
    h("span", { class: "muted" }, "Drag over a chart to zoom all of them, double-click to see all."), waiting, h("span", { class: "push" }, add))]);
  const sections = h("div", { class: "section" });
  curves.append(sections);

  function specs() {
    const own = kept().filter((name) => state.names.includes(name)).map((name) => ({ title: name, unit: "", own: true, series: [{ name, label: name, colour: "s1", band: true }] }));
    return [...SECTIONS, ["Added", "Charts that you added, kept by this browser.", own]];
  }

  function drawSections() {
    for (const each of charts.values()) each.dispose();
    charts.clear();
    fill(sections, specs().map(([title, about_, list]) => {
      const box = h("div", { class: "charts" });
      for (const spec of list) {
        const full = complete(spec, state);
        if (!full) continue;
        const made = full.lags ? histogram(full) : chart(full, { onrange });
        if (spec.own) made.element.querySelector("figcaption").append(button("✕", () => {
          keep(kept().filter((name) => name !== spec.title));
          drawSections();
          refresh();
        }, { class: "small quiet", "aria-label": `Remove the chart ${spec.title}` }));
        charts.set(spec.title, made);
        box.append(made.element);
      }
      return h("section", { class: "section", hidden: !box.childElementCount }, h("header", {}, h("h2", {}, title), h("p", {}, about_)), box);
    }));
    redraw();
  }

  function refresh() {
    clearTimeout(state.timer);
    state.newest = read(++state.asked);
    return state.newest;
  }

  /** Read and draw the curves. If a newer call has begun meanwhile, draw nothing and wait for the newer call. */
  async function read(mine) {
    const began = performance.now();
    const wanted = new Set(["rate:trainer_busy_s", "rate:generator_busy_s", "num_trainers", "num_servers"]);
    for (const { spec } of charts.values()) {
      for (const { name } of spec.series) if (!/^(busy:|held out|pass@|bound$)/.test(name)) wanted.add(name.replace("smooth:", ""));
    }
    const [from, to] = state.range ?? [null, null];
    try {
      const data = await seriesOf(api, run, [...wanted].filter((name) => state.names.includes(name)), { x: "step", points: POINTS, from, to });
      if (state.isOver) return;
      if (mine !== state.asked) return state.newest;
      if (!OVER.has(state.status.status)) state.names = (await api.get(["runs", run, "names"]).catch(() => state)).names; // another lag
      state.lags = await lagsOf(api, run, state, data);
      if (state.forecast.prediction) state.forecast = await api.get(["runs", run, "prediction"]).catch(() => state.forecast);
      if (state.isOver) return;
      if (mine !== state.asked) return state.newest;
      state.data = derived(data, state);
      const isReading = data.indexed !== undefined && data.indexed !== null && data.indexed < 1;
      waiting.textContent = isReading ? `reading the files: ${percent(data.indexed)}` : "";
      if (isReading) state.timer = setTimeout(refresh, 1000);
      redraw();
      drawStatus();
    } catch (error) {
      if (error.status === undefined) throw error;
      waiting.textContent = error.message;
    }
    state.cost_ms = performance.now() - began;
    state.refreshed = performance.now();
  }

  function redraw() {
    if (!state.data) return;
    const num = state.data.x.length;
    for (const each of charts.values()) {
      if (each.spec.lags) {
        each.element.hidden = !state.lags && num > 0;
        if (state.lags) each.update(state.lags);
        continue;
      }
      if (each.spec.title === "Throughput") each.element.querySelector(".about").textContent = `${each.spec.about} ${aboutBound(state)}`;
      const data = { ...prepared(state, each.spec), byTime: state.byTime, lines: linesOf(each.spec, state), marks: [] };
      const has = each.spec.series.some(({ name }) => data.series[name]?.mean.some((value) => value !== null && value !== undefined));
      each.element.hidden = !has && num > 0;
      if (!each.element.hidden) each.update(data);
    }
    for (const section of sections.children) section.hidden = ![...section.querySelectorAll(".chart")].some((each) => !each.hidden);
    if (!num && !state.isEmpty) fill(sections, nothingYet(state.status));
    state.isEmpty = !num;
  }

  const later = () => {
    if (document.hidden || state.timer || !state.refreshed) return; // the first request is still under way
    const wait = Math.max(LEAST_REFRESH_MS, REFRESH_COST * state.cost_ms) - (performance.now() - state.refreshed);
    state.timer = setTimeout(async () => {
      if (state.isEmpty) {
        state.isEmpty = false;
        state.names = (await api.get(["runs", run, "names"]).catch(() => ({ names: state.names }))).names;
        drawSections();
      }
      await refresh();
      state.timer = 0;
    }, Math.max(0, wait));
  };
  live.on("status", (status) => {
    const before = Object.keys(state.status.evaluations ?? {}).length;
    state.status = status;
    drawStatus();
    if (state.isEmpty) update(sections, nothingYet(status));
    if (Object.keys(status.evaluations ?? {}).length !== before) reEvaluate();
  });
  const reEvaluate = debounced(async () => {
    const found = await api.get(["runs", run, "evaluations"]).catch(() => null);
    if (found && !state.isOver) {
      state.evaluations = found.evaluations;
      redraw();
      drawStatus();
    }
  }, 300);
  live.on("step", later);
  document.addEventListener("visibilitychange", later); // a hidden page asks for no steps
  live.on("connection", (connection) => connection === "live" && later());
  live.on("ended", async () => {
    await refresh().catch(() => null);
    reEvaluate();
  });

  drawStatus();
  drawSections();
  await refresh();
  return () => {
    state.isOver = true;
    clearTimeout(state.timer);
    document.removeEventListener("visibilitychange", later);
    for (const each of charts.values()) each.dispose();
  };
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT_CHARTS) ?? "[]");
  } catch {
    return [];
  }
}

function keep(names) {
  try {
    localStorage.setItem(KEPT_CHARTS, JSON.stringify(names));
  } catch {
    // the charts then last as long as the page
  }
}

/** Return the spec with the series that depend on the run; null if the run has none for it. */
function complete(spec, { names, evaluations, chosen }) {
  if (spec.title === "Trigger" && isFound(chosen)) return { ...spec, about: `${spec.about} The run finds N_min itself, from the learner's timings.` };
  if (spec.tags) {
    const tags = names.filter((name) => name.startsWith(`${spec.tags}/`));
    if (tags.length < 2) return null;
    return { ...spec, series: tags.map((name, index) => ({ name: `smooth:${name}`, label: name.slice(spec.tags.length + 1), colour: LINES[index % LINES.length], dash: index >= LINES.length ? [5, 3] : null, width: 2 })) };
  }
  if (spec.evaluations) {
    const ks = [...new Set(evaluations.flatMap((each) => Object.keys(each.pass_at ?? {})))].sort((a, b) => a - b);
    return ks.length ? { ...spec, series: ks.map((k, index) => ({ name: `pass@${k}`, label: `pass@${k}`, colour: LINES[index % LINES.length], points: true, spans: true, width: 1, dash: [3, 4] })) } : null;
  }
  return spec;
}

/** Return whether the run finds N_min by the learner's timings: it is not set, and nothing else sets it. */
function isFound(chosen) {
  const [samples, use, signal] = ["min_samples", "use", "feedback.signal"].map((name) => chosen[`scheduler.trigger.${name}`]);
  return samples === null && use !== "batch" && signal !== "noise_scale";
}

/** Add what follows from the series of the server: busy shares, smoothed lines, and the bound X*. */
function derived(data, state) {
  const { series } = data;
  const of = (name) => series[name]?.mean ?? [];
  const parts = (name) => last(of(name)) || 1;
  series["busy:trainer"] = { mean: smooth(of("rate:trainer_busy_s").map((share) => atMostOne(share, parts("num_trainers")))) };
  series["busy:generator"] = { mean: smooth(of("rate:generator_busy_s").map((share) => atMostOne(share, parts("num_servers")))) };
  for (const name of Object.keys(series)) {
    if (!name.startsWith("busy:")) series[`smooth:${name}`] = { mean: smooth(of(name)) };
  }
  if (!whyNoBound(state) && !exactBound(state)) series.bound = { mean: estimatedBound(series, state.status) };
  return data;
}

const LEAST_BUSY = 0.02; // below this share the estimate is noise

/** Return the estimated X* at each point: what would be trained if the busier side, or one of two that take turns,
 * always worked. */
function estimatedBound(series, { progress }) {
  const [trainer, generator] = ["busy:trainer", "busy:generator"].map((name) => series[name].mean);
  return (series["smooth:rate:tokens_trained_total"]?.mean ?? []).map((trained, index) => {
    const shares = [trainer[index] ?? 0, generator[index] ?? 0];
    const busy = Math.min(1, progress?.takes_turns ? shares[0] + shares[1] : Math.max(...shares));
    return trained === null || busy < LEAST_BUSY ? null : trained / busy;
  });
}

/** Return X* of a simulated run in trained tokens per second, which its models give exactly; null for another run. */
const exactBound = ({ status, forecast }) => (status.simulated ? forecast.prediction?.bound.tokens_per_s ?? null : null);

/** Return why X* of a run is not known, as a sentence; empty if it is. */
function whyNoBound({ status, chosen, names }) {
  if (status.pipeline !== "train") return "There is no X*: this run trains nothing.";
  if (!names.includes("rate:tokens_trained_total")) return "X*, the most that trainer and servers could do, is known after the first steps.";
  if ((chosen["rollout.urls"] ?? []).length) return "X* is not known: servers outside of the run do not say how busy they are.";
  return "";
}

/** Return what X* is and which share of it the run reaches, in words. */
function aboutBound(state) {
  const why = whyNoBound(state);
  if (why) return why;
  const exact = exactBound(state);
  if (exact) return `X* is the most that the modelled machines allow, whatever the scheduler does: ${count(exact)} trained tokens/s. This run reaches ${percent(state.forecast.prediction.bound.share)} of it.`;
  const { bound, share } = state.status.bound ?? {};
  const condition = state.status.progress?.takes_turns ? "one of them always worked" : "the busier side never waited";
  const reached = bound ? ` It is about ${count(bound)} trained tokens/s now, and the latest steps reach ${percent(share)} of it.` : "";
  return `X* estimates the most that the same trainer and servers could do, if ${condition}.${reached}`;
}

/** Return the bars of the latest steps on show by version lag; null if no step says anything about it. */
async function lagsOf(api, run, { names, chosen, status }, { x, series }) {
  if (!x.length || !series.staleness_mean?.mean.some((value) => value !== null)) return null;
  const lags = names.filter((name) => name.startsWith(LAG)).sort((a, b) => Number(a.slice(LAG.length)) - Number(b.slice(LAG.length)));
  if (!lags.length) return { bars: [], missing: "This run recorded the mean and the largest lag of its tokens, and not how many had which." };
  const to = x.at(-1);
  const [masked, stale, trained] = ["tokens_masked_stale", "ledger/discarded_stale", "ledger/trained"];
  const others = [masked, stale, trained].filter((name) => names.includes(name));
  const found = await api.get(["runs", run, "series"], { names: [...lags, ...others], x: "step", points: LAG_STEPS + 1, from: to - LAG_STEPS, to }).catch(() => null);
  if (!found?.x.length) return null;
  const begin = found.x.length > LAG_STEPS ? 1 : 0; // the step before the first one gives the ledger's growth
  const sum = (name) => (found.series[name]?.mean ?? []).slice(begin).reduce((total, value) => total + (value ?? 0), 0);
  const grown = (name) => (last(found.series[name]?.mean ?? []) ?? 0) - (begin ? found.series[name]?.mean[0] ?? 0 : 0);
  const labelled = (lag) => (lag === LAST_LAG ? `${lag} or more` : lag);
  const bars = lags.map((name) => ({ label: labelled(name.slice(LAG.length)), value: sum(name), colour: "s1" }));
  if (sum(masked)) bars.push({ label: `masked, over ${status.tuned?.["scheduler.max_staleness"]?.value ?? chosen["scheduler.max_staleness"] ?? "the bound"}`, value: sum(masked), colour: "s7" });
  const steps = `Steps ${count(found.x[begin])} to ${count(found.x.at(-1))}`;
  const discarded = grown(stale);
  const of = discarded + grown(trained);
  return { bars, note: `${steps}. ${discarded ? `${count(discarded)} answers (${percent(discarded / of)}) were discarded whole, because no token was young enough.` : "No answer was discarded as too old."}` };
}

/** Return a note that a run was simulated; null for a real one. */
function simulatedNote({ simulated }) {
  if (!simulated) return null;
  const of = simulated.fitted_to ? ` Its models were fitted to ${simulated.fitted_to}.` : "";
  return h("div", { class: "note" }, h("strong", {}, "Simulated run"), `The real scheduler and loop on modelled machines (${plain(simulated.strategy)}).${of} Times are those of its virtual clock. Rewards are drawn at random and nothing is learnt; there are no texts, logs or checkpoints.`);
}

const atMostOne = (share, parts) => (share === null ? null : Math.min(1, share / parts));

/** Return series of a run over the same points. The server gives a limited number of them at once. */
async function seriesOf(api, run, names, params) {
  const batches = [];
  for (let place = 0; place < names.length; place += MOST_NAMES) batches.push(names.slice(place, place + MOST_NAMES));
  if (!batches.length) return { x: [], times: [], series: {} };
  const [first, ...more] = await Promise.all(batches.map((batch) => api.get(["runs", run, "series"], { names: batch, ...params })));
  const num = Math.min(first.x.length, ...more.map((each) => each.x.length)); // a step may have come between
  for (const each of more) Object.assign(first.series, each.series);
  return num === first.x.length ? first : { ...first, x: first.x.slice(0, num), times: first.times.slice(0, num) };
}

/** Return the data of a chart, with the evaluations as points where the chart shows them. */
function prepared({ data, evaluations, range }, spec) {
  const names = spec.series.map(({ name }) => name).filter((name) => name === "held out" || name.startsWith("pass@"));
  if (!names.length) return data;
  const points = new Map();
  for (const each of evaluations) {
    if (range && (each.step < range[0] || each.step > range[1])) continue;
    const pass = Object.fromEntries(Object.entries(each.pass_at ?? {}).map(([k, value]) => [`pass@${k}`, value]));
    points.set(each.step, { x: each.step, time: each.time, "held out": each.reward, ...pass });
  }
  return withPoints(data, [...points.values()], names);
}

/** Horizontal lines: bounds from the settings, thresholds from the latest decisions. */
function linesOf(spec, state) {
  const { chosen, status } = state;
  const bound = chosen["scheduler.max_staleness"];
  if (spec.title === "Throughput" && exactBound(state)) return [{ value: exactBound(state), label: `X* ${count(exactBound(state))} trained`, colour: "s7" }];
  if (spec.title === "Staleness" && typeof bound === "number") return [{ value: bound, label: `bound ${bound}`, colour: "s7" }];
  if (spec.title !== "Entropy") return [];
  const found = (status.decisions ?? []).find((each) => each.decider === "feedback" && each.reference);
  if (!found) return [];
  const lines = [{ value: found.reference, label: "reference of the start", colour: "s8" }];
  for (const [name, label, colour] of [["normal_below", "normal below", "s2"], ["low_below", "low below", "s7"]]) {
    if (found[name]) lines.push({ value: found.reference * found[name], label, colour });
  }
  return lines;
}

function nothingYet(status) {
  const phase = status.progress?.phase ?? status.status;
  const isOver = OVER.has(status.status);
  return empty(isOver ? "This run took no step" : "No step yet", isOver ? "There are no curves. The log says what happened." : `The run is in the phase “${phase}”. Curves begin with its first step.`);
}

/** Errors, alarms, stalls, incidents, and the commands to type next. */
function alertsOf(status, link) {
  const found = [];
  if (status.error) {
    const cause = status.root_cause;
    const [head, ...rest] = String(status.error).split("\n");
    found.push(h("div", { class: "note bad", role: "alert" }, h("strong", {}, `The run ${status.status}`), head,
      cause ? h("a", { href: `${link(status.run_id, "processes")}?log=${encodeURIComponent(cause.process)}` }, `log of ${cause.process}`) : null,
      rest.length ? h("pre", {}, rest.join("\n")) : null));
  }
  const alarms = (status.alarms ?? []).map((each) => ["warn", "Alarm", each.reason, each.time, each.step]);
  const isOld = ([, , , , step]) => typeof step === "number" && step < LATEST_PART * (status.progress?.step ?? 0);
  const news = [
    ...alarms.filter((each) => !isOld(each)),
    ...(status.stalls ?? []).map((each) => ["bad", "Stall", `${each.waiter} has waited ${spoken(each.seconds)} for ${each.resource}, held by ${each.holder}`, each.time]),
  ];
  const notesOf = (list) => list.sort((a, b) => b[3] - a[3]).map(([style, kind, text, time, step]) => h("div", { class: `note ${style}` }, h("strong", {}, kind), text,
    h("span", { class: "muted" }, [typeof step === "number" ? `${status.progress.unit} ${count(step)}` : null, ago(time)].filter(Boolean).join(", "))));
  found.push(...notesOf(news));
  const old = notesOf(alarms.filter(isOld));
  if (old.length) found.push(h("details", { class: "more" }, h("summary", {}, `${plural(old.length, "alarm")} before the last tenth of the run`), h("div", { class: "section" }, old)));
  if (status.groups_failed) found.push(h("div", { class: "note warn" }, h("strong", {}, plural(status.groups_failed, "group failed", "groups failed")), `The latest: ${plain(status.latest_failure)}`, h("a", { href: `${link(status.run_id, "groups")}?status=failed` }, "see them")));
  if (status.progress?.needs) found.push(h("div", { class: "note warn" }, h("strong", {}, "The run waits for an environment worker"), h("code", {}, status.progress.needs)));
  if (status.leftovers?.length) found.push(h("div", { class: "note warn" }, h("strong", {}, "Left behind"), status.leftovers.map(String).join(", ")));
  return found;
}

/** Cards with the questions that a reader of a run has first, and their answers. */
function answersOf(state, run, link) {
  const { status } = state;
  const cards = [];
  const phase = status.progress?.phase ?? status.status;
  if (!status.progress?.step && !OVER.has(status.status)) cards.push(beginning(status, phase));
  else {
    if (!status.simulated && (status.pipeline === "train" || state.evaluations.length)) cards.push(learning(state));
    cards.push(speed(state, run, link));
    if (status.pipeline === "train") cards.push(fate(status, run, link), scheduling(state, run, link), status.simulated ? null : health(state));
  }
  const next = status.next ?? [];
  if (next.length) cards.push(h("div", { class: "card" }, h("h2", {}, "What to type next"), h("ul", { class: "commands" }, next.map((each) => command(each.command, each.purpose)))));
  return cards;
}

function card(question, answer, ...more) {
  return h("div", { class: "card" }, h("h2", {}, question), h("p", { class: "answer" }, answer), more);
}

/** What a run does that has taken no step yet. */
function beginning(status, phase) {
  const facts = [["environment", status.environment], ["wall time", spoken(status.wall_seconds)], ["held-out tasks", status.progress?.held_out ? `${count(status.progress.held_out.ended)} of ${count(status.progress.held_out.tasks)} played` : null]].filter(([, value]) => value);
  return card("What is it doing?", `${phase[0].toUpperCase()}${phase.slice(1)}.`, h("p", { class: "more muted" }, phaseAbout(phase)),
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

function learning({ status, evaluations, data }) {
  const question = "Is it learning?";
  const held = evaluations.filter((each) => typeof each.reward === "number");
  const trained = (data?.series["smooth:reward"]?.mean ?? []).filter((value) => value !== null);
  const facts = h("dl", { class: "facts" });
  const latest = held.at(-1);
  append(facts, [
    h("dt", {}, "training"), h("dd", {}, typeof status.progress?.reward === "number" ? `${number(status.progress.reward)} over the latest steps` : "no reward yet"),
    latest ? [h("dt", {}, "held out"), h("dd", {}, `${held.map((each) => number(each.reward)).slice(-4).join(" → ")}${latest.tasks ? ` (${plural(latest.tasks, "task")})` : ""}`)] : null,
    latest?.pass_at ? Object.entries(latest.pass_at).slice(0, 4).map(([k, share]) => [h("dt", {}, `pass@${k}`), h("dd", {}, percent(share))]) : null,
    Object.keys(status.tags ?? {}).length > 1 ? Object.entries(status.tags).slice(0, 6).map(([tag, found]) => [h("dt", {}, tag), h("dd", {}, `${number(found.reward)}, held out ${number(found.held_out?.reward)}`)]) : null,
  ]);
  if (held.length > 1) {
    const [from, to] = [held[0].reward, latest.reward];
    const rewards = held.map((each) => each.reward);
    const [least, best] = [Math.min(...rewards), Math.max(...rewards)];
    const isShare = least >= 0 && best <= 1;
    const noise = isShare ? 1 / Math.sqrt(Math.max(1, latest.tasks ?? 1)) : HALF * (best - least);
    if (best - from > noise && best - to > noise) return card(question, `No longer: the held-out reward rose from ${number(from)} to ${number(best)}, and fell to ${number(to)}.`, facts);
    const said = to - from > noise ? "Yes: the held-out reward rose" : from - to > noise ? "No: the held-out reward fell" : "Not clearly: the held-out reward went";
    return card(question, `${said} from ${number(from)} to ${number(to)}.`, facts);
  }
  if (trained.length > 3) {
    const part = Math.max(1, Math.floor(trained.length / 10));
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const [from, to] = [mean(trained.slice(0, part)), mean(trained.slice(-part))];
    const spread = Math.max(...trained) - Math.min(...trained);
    const said = Math.abs(to - from) < 0.25 * spread || spread === 0 ? "Not clearly: the training reward went" : to > from ? "Yes: the training reward rose" : "No: the training reward fell";
    return card(question, `${said} from ${number(from)} to ${number(to)}.`, facts, h("p", { class: "more muted" }, held.length ? "One evaluation on held-out tasks so far." : "There is no evaluation on held-out tasks."));
  }
  return card(question, "Too early to say.", facts, h("p", { class: "more muted" }, "It needs a few steps, or two evaluations."));
}

function meter(label, share, style = "") {
  const known = typeof share === "number";
  return h("div", { class: "meter" }, h("span", {}, label),
    h("span", { class: "track", "aria-hidden": "true" }, h("span", { class: style, style: { width: `${100 * Math.min(1, known ? share : 0)}%` } })),
    h("span", { class: "num" }, known ? percent(share) : NONE));
}

function speed(state, run, link) {
  const { status } = state;
  const { progress } = status;
  const [trainer, generator] = [progress?.trainer_busy_fraction, progress?.generator_busy_fraction];
  const most = status.bound?.bound;
  const facts = [
    ["steps", progress?.steps_per_second ? `${number(progress.steps_per_second)} per second` : null],
    ["generated", progress?.tokens_generated_per_second ? `${count(progress.tokens_generated_per_second)} tokens/s` : null],
    ["trained", progress?.tokens_trained_per_second ? `${count(progress.tokens_trained_per_second)} tokens/s` : null],
    ["played", progress?.episodes_per_second ? `${count(progress.episodes_per_second)} episodes/s` : null],
  ].filter(([, value]) => value);
  return card("What limits its speed?", status.balance ?? "Too early to say who waits for whom.",
    status.pipeline === "train" ? meter("trainer busy", trainer) : null,
    meter("servers busy", generator, "two"),
    typeof trainer === "number" && typeof generator === "number" && Math.max(trainer, generator) < HALF ? h("p", { class: "more" }, "Neither computes for half of the time: environments, rewards, weight updates or too few cores may hold both up. ", h("a", { href: link(run, "timeline") }, "See the timeline")) : null,
    most || status.simulated ? h("p", { class: "more muted" }, aboutBound(state)) : null,
    facts.length ? h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])) : null);
}

function fate(status, run, link) {
  const ledger = status.ledger ?? {};
  const finals = ["trained", "filtered", "discarded_stale", "discarded_surplus", "failed"].map((name) => [name, ledger[name] ?? 0]);
  const ended = finals.reduce((sum, [, value]) => sum + value, 0);
  const dropped = Object.entries(status.groups_dropped ?? {}).sort((a, b) => b[1] - a[1]);
  const answer = ended ? `${percent((ledger.trained ?? 0) / ended)} of the ended episodes were trained.` : "No episode has ended yet.";
  const reasons = dropped.slice(0, 4).map(([reason, groups]) => h("li", {}, `${plural(groups, "group")}: `, h("a", { href: `${link(run, "groups")}?status=filtered&text=${encodeURIComponent(reason.split(": ").slice(1).join(": ") || reason)}` }, reason)));
  return card("What becomes of the answers?", answer,
    ended ? meter("trained", (ledger.trained ?? 0) / ended) : null,
    ended && ledger.filtered ? meter("filtered", ledger.filtered / ended, "two") : null,
    reasons.length ? h("ul", { class: "more" }, reasons) : h("p", { class: "more muted" }, "No group was filtered."),
    dropped.length > 4 ? h("p", { class: "more muted" }, `and ${plural(dropped.length - 4, "other reason")}`) : null);
}

function scheduling({ status, chosen }, run, link) {
  const { progress } = status;
  const bound = chosen["scheduler.max_staleness"];
  const adapted = status.adapted?.at(-1);
  const feedback = (status.decisions ?? []).find((each) => each.decider === "feedback");
  const mode = chosen["scheduler.mode"];
  const answer = adapted ? `Last change: ${Object.entries(adapted.changes).map(([name, [before, after]]) => `${name} ${plain(before)} → ${plain(after)}`).join(", ")}.`
    : feedback ? `No setting so far: ${feedback.reason}.` : "No setting so far.";
  return card("What did the scheduler change?", answer,
    adapted ? h("p", { class: "more muted" }, `${adapted.reason}, ${ago(adapted.time)}`) : null,
    h("dl", { class: "facts" },
      mode ? [h("dt", {}, "mode"), h("dd", {}, plain(mode))] : null,
      h("dt", {}, "staleness"), h("dd", {}, typeof progress?.staleness_mean === "number" ? `${number(progress.staleness_mean)} on average, at most ${number(progress.staleness_max)}` : "not known yet", typeof bound === "number" ? ` (bound ${bound})` : ""),
      Object.entries(status.tuned ?? {}).map(([name, each]) => [h("dt", {}, name), h("dd", {}, `${plain(each.value)} since version ${each.policy_version}`)])),
    h("p", { class: "more" }, h("a", { href: link(run, "decisions") }, "All decisions with their reasons")));
}

/** Numbers that should stay within limits: [series, label, is it sound, what it says otherwise]. */
const CHECKS = [
  ["entropy", "entropy", (value) => value >= 0.01, "the policy no longer explores"],
  ["kl_engine_trainer", "engine = trainer", (value) => value < 0.01, "engine and trainer disagree"],
  ["clip_fraction", "clipped", (value) => value < 0.3, "many tokens are clipped"],
  ["ess", "effective samples", (value) => value > 0.5, "few tokens carry the update"],
  ["tokens_masked_share", "masked tokens", (value) => value < 0.2, "much is too old to train"],
  ["skipped", "skipped steps", (value) => value === 0, "the latest step was skipped"],
];

function health({ data }) {
  const found = CHECKS.map(([name, label, isSound, problem]) => [last(data?.series[name]?.mean ?? []), label, isSound, problem]).filter(([value]) => value !== null);
  const wrong = found.filter(([value, , isSound]) => !isSound(value));
  const answer = !found.length ? "No step yet." : wrong.length ? `Look at it: ${wrong.map(([, , , problem]) => problem).join(", ")}.` : "Yes: all numbers are within their usual limits.";
  return card("Are the updates sound?", answer,
    h("dl", { class: "facts" }, found.map(([value, label, isSound]) => [h("dt", {}, label), h("dd", {}, isSound(value) ? null : h("span", { class: "pill warn" }, "check"), ` ${number(value)}`)])));
}

/** Facts of the run, and its incidents. */
function aboutOf({ status }) {
  const servers = Object.entries(status.servers_by_transport ?? {}).map(([way, num]) => `${way.replaceAll("_", " ")} (${num})`).join(", ");
  const rows = [
    ["status", h("span", { class: `pill ${stateClass(status.status)}` }, status.status)],
    ["reason", status.error ? null : status.reason], ["environment", status.environment], ["pipeline", status.pipeline],
    ["started", moment(status.started)], ["wall time", spoken(status.wall_seconds)], ["files", h("span", { class: "mono" }, plain(status.run_dir))],
    ["checkpoint", status.checkpoint], ["weights travel by", servers], ["sandbox", status.sandbox],
  ].filter(([, value]) => value);
  const incidents = status.incidents ?? [];
  return [
    h("h2", {}, "Run"),
    h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    incidents.length ? h("details", {}, h("summary", {}, plural(incidents.length, "incident")), h("ul", { class: "more" }, [...incidents].reverse().map((each) => h("li", {}, `${ago(each.time)}: ${each.text ?? [each.event, each.name, each.reason].filter(Boolean).join(" ")}`)))) : null,
  ];
}

function downloads(run, api) {
  const path = (name) => api.address(["runs", run, "export", name]).href;
  return [["metrics.csv", "Metrics as CSV"], ["metrics.parquet", "Metrics as Parquet"], ["trace.json", "Timeline for Perfetto"]].map(([name, label]) => h("a", { class: "button", href: path(name), download: `${run}-${name}` }, label));
}

/** Return a button that stops the run, after a question. */
function stopping(run, api) {
  const said = h("p", { role: "status" });
  const dialog = h("dialog", { "aria-label": "Stop the run" }, h("form", { method: "dialog" },
    h("h2", {}, "Stop this run?"),
    h("p", {}, "It saves a checkpoint and ends. ", h("code", {}, `penstock resume ${run}`), " continues it."), said,
    h("p", { class: "tools" }, button("Stop the run", async () => {
      said.textContent = "Asked…";
      try {
        await api.post(["runs", run, "stop"], { confirm: run });
        dialog.close();
      } catch (error) {
        said.textContent = `${error.message} In a terminal: penstock stop ${run}`;
      }
    }, { class: "danger" }), button("Let it run", () => dialog.close()))));
  return h("span", { class: "push" }, button("Stop the run…", () => dialog.showModal(), { class: "danger" }), dialog);
}
