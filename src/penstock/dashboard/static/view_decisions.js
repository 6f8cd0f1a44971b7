/* What the scheduler decided and why; what it changed, what it expected of that, and what came of it. */

import { chart } from "./charts.js";
import { append, button, debounced, empty, fill, h, refresh as update } from "./dom.js";
import { NONE, ago, clock, count, moment, number, percent, plain } from "./format.js";
import { DECIDERS } from "./words.js";

const PAGE = 100;
const LEAST_REFRESH_MS = 2500;
const LONGEST_LIST = 8;

/** Show the decisions of a run. `params` may have `decider`, `group` and `text`. */
export async function show(root, { run, api, live, params, link }) {
  const filter = { decider: params.get("decider") ?? "", group: params.get("group") ?? "", text: params.get("text") ?? "" };
  const [status, adaptations] = await Promise.all([api.get(["runs", run, "status"]), api.get(["runs", run, "adaptations"]).catch(() => ({ adaptations: [] }))]);
  const latest = h("div", { class: "cards" });
  const changes = h("section", { class: "panel", "aria-label": "Changes of settings" });
  const chips = h("div", { class: "tools", role: "group", "aria-label": "Decider" });
  const body = h("tbody");
  const older = button("Older decisions", () => more(), { hidden: true });
  const said = h("span", { class: "muted", role: "status" });
  const none = h("div");
  let before = null;
  let refreshed = 0;
  let isOver = false;
  let asked = 0;
  let curves = null;
  let timer = 0;

  const text = h("input", { type: "search", placeholder: "words in reason or inputs", "aria-label": "Words in the decision", value: filter.text, oninput: debounced(() => set("text", text.value), 250) });
  const group = h("input", { type: "search", inputmode: "numeric", placeholder: "group", "aria-label": "Number of a group", value: filter.group, oninput: debounced(() => set("group", group.value.trim()), 250) });
  const table = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Decisions, the newest first" }, h("table", {},
    h("thead", {}, h("tr", {}, ["time", "decider", "reason", "group", "inputs"].map((name) => h("th", { scope: "col" }, name)))), body));
  append(root, [
    h("section", { class: "section", "aria-label": "Latest decision of each decider" }, h("header", {}, h("h2", {}, "Latest decisions"), h("p", {}, "One of each decider, with what it knew.")), latest),
    changes,
    h("section", { class: "panel section", "aria-label": "All decisions" }, h("header", {}, h("h2", {}, "All decisions"), said), chips, h("div", { class: "tools" }, text, group), table, none, h("div", { class: "tools" }, older)),
  ]);

  function set(name, value) {
    filter[name] = value;
    const query = new URLSearchParams(Object.entries(filter).filter(([, each]) => each));
    history.replaceState(null, "", `${link(run, "decisions")}${query.size ? `?${query}` : ""}`);
    load();
  }

  function drawLatest(decisions) {
    const sorted = [...decisions].sort((a, b) => b.time - a.time);
    update(latest, sorted.length ? sorted.map((each) => {
      const { decider, time, reason, group: of, inputs, ...rest } = each;
      return h("div", { class: "card" }, h("h2", {}, decider, h("span", { class: "muted" }, ` · ${ago(time)}`)), h("p", { class: "answer" }, reason),
        h("p", { class: "more muted" }, `${decider} ${DECIDERS[decider] ?? "decides."}`), inputsOf({ ...(of === null || of === undefined ? {} : { group: groupOf(each, of, run, link) }), ...(inputs ?? rest) }));
    }) : empty("No decision yet", "The scheduler decides as soon as tasks come in."));
  }

  function drawChips(deciders) {
    const all = Object.entries(deciders ?? {});
    update(chips, [["", null], ...all].map(([decider, num]) => button("", () => {
      set("decider", decider);
      drawChips(deciders);
    }, { class: "small", "aria-pressed": String(filter.decider === decider), title: decider ? `${decider} ${DECIDERS[decider] ?? ""}` : null, "aria-label": null, icon: [decider || "all", num === null || num === undefined ? null : h("span", { class: "num" }, ` ${count(num)}`)] })));
  }

  async function load() {
    const mine = ++asked;
    try {
      const found = await api.get(["runs", run, "decisions"], { ...filter, limit: PAGE });
      if (isOver || mine !== asked) return;
      update(body, found.decisions.map((each) => row(each, run, link)));
      rest(found);
      drawChips(found.deciders);
      const isFiltered = Object.values(filter).some(Boolean);
      fill(none, found.decisions.length ? null : empty(isFiltered ? "No decision has these words" : "No decision yet", isFiltered && found.before ? "Older ones were not searched yet." : "They appear as the run goes on."));
    } catch (error) {
      said.textContent = error.message;
    }
    refreshed = performance.now();
  }

  async function more() {
    older.disabled = true;
    try {
      const found = await api.get(["runs", run, "decisions"], { ...filter, before, limit: PAGE });
      if (isOver) return;
      append(body, found.decisions.map((each) => row(each, run, link)));
      rest(found);
    } catch (error) {
      said.textContent = error.message;
    }
    older.disabled = false;
  }

  function rest(found) {
    before = found.before;
    older.hidden = before === null || before === undefined;
    said.textContent = found.indexed !== undefined && found.indexed !== null && found.indexed < 1 ? `reading the files: ${percent(found.indexed)}` : "";
  }

  const refresh = () => {
    if (document.hidden || timer || !refreshed || scrollY > table.offsetTop + 400 || body.childElementCount > PAGE) return;
    timer = setTimeout(() => {
      timer = 0;
      if (!isOver) load();
    }, Math.max(0, LEAST_REFRESH_MS - (performance.now() - refreshed)));
  };
  live.on("decisions", (found) => {
    drawLatest(found.decisions);
    refresh();
  });
  let numAdapted = adaptations.adaptations.length;
  live.on("status", debounced(async () => {
    const found = await api.get(["runs", run, "adaptations"]).catch(() => null);
    if (!found || isOver || found.adaptations.length === numAdapted) return;
    numAdapted = found.adaptations.length;
    drawChanges(found.adaptations);
  }, 3000));

  async function drawChanges(list) {
    curves?.dispose();
    curves = null;
    const plot = h("div");
    fill(changes, h("header", {}, h("h2", {}, "What did it change, and did that help?")), list.length ? [plot, changesOf(list)] : nothingChanged(status));
    if (!list.length) return;
      const data = await api.get(["runs", run, "series"], { names: ["rate:tokens_trained_total", "trigger_min_samples"], x: "step", points: 600 }).catch(() => null);
    if (!data || isOver) return;
    const marks = list.map((each) => ({ x: stepOf(each, data), label: Object.keys(each.changes).join(", ") })).filter((each) => each.x !== null);
    curves = chart({ title: "Trained tokens and N_min", unit: "tokens per second; samples (right)", wide: true, zero: true, about: "Dotted lines: changes of settings.", series: [
      { name: "rate:tokens_trained_total", label: "trained tokens/s", colour: "s1" }, { name: "trigger_min_samples", label: "N_min", colour: "s2", steps: true, axis: "right" }] });
    plot.append(curves.element);
    curves.update({ ...data, marks, lines: [] });
  }

  drawLatest(status.decisions ?? []);
  await Promise.all([load(), drawChanges(adaptations.adaptations)]);
  return () => {
    isOver = true;
    clearTimeout(timer);
    curves?.dispose();
  };
}

function stepOf(change, { x, times }) {
  const index = times.findIndex((time) => time >= change.time);
  return index < 0 ? null : x[index];
}

function nothingChanged(status) {
  const feedback = (status.decisions ?? []).find((each) => each.decider === "feedback");
  return h("p", {}, "No setting so far. ", feedback ? `The latest word of feedback: ${feedback.reason}.` : "", h("span", { class: "muted" }, " Thresholds move with scheduler.trigger.feedback; other settings with scheduler.tuning=auto."));
}

function changesOf(list) {
  const rows = [...list].reverse().map((each) => h("tr", {},
    h("td", { class: "time" }, moment(each.time), h("br"), h("span", { class: "muted" }, each.policy_version === null || each.policy_version === undefined ? "" : `version ${each.policy_version}`)),
    h("td", {}, Object.entries(each.changes).map(([name, [from, to]]) => h("div", { class: "change" }, h("span", {}, name), h("s", {}, plain(from)), "→", h("span", { class: "to" }, plain(to))))),
    h("td", { class: "break" }, plain(each.reason)), h("td", {}, values(each.prediction)), h("td", {}, values(each.outcome))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Changes of settings, the newest first" }, h("table", {},
    h("thead", {}, h("tr", {}, ["time", "change", "why", "expected", "what came of it"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows)));
}

function values(found) {
  if (found === null || found === undefined) return NONE;
  if (typeof found !== "object") return plain(found);
  const entries = Object.entries(found).filter(([, value]) => value !== null);
  return entries.length ? entries.map(([name, value]) => h("div", {}, h("span", { class: "muted" }, `${name.replaceAll("_", " ")} `), plain(value))) : NONE;
}

function row(each, run, link) {
  return h("tr", {}, h("td", { class: "time", title: moment(each.time) }, clock(each.time, 2)), h("td", { class: "time" }, each.decider), h("td", { class: "break" }, plain(each.reason)),
    h("td", { class: "num" }, each.group === null || each.group === undefined ? "" : groupOf(each, each.group, run, link)),
    h("td", {}, inputsOf(each.inputs ?? {})));
}

/** The number of a group, which leads to the group. The run keeps no record of held-out groups. */
function groupOf({ decider, reason }, number_, run, link) {
  if (decider === "evaluation" || reason === "evaluation") return h("span", { title: "a group of held-out tasks, of which the run keeps no record" }, `${number_} (held out)`);
  return Number.isInteger(number_) ? h("a", { href: link(run, "groups", number_) }, number_) : plain(number_);
}

/** What a decider knew: names and values, which may be elements. */
function inputsOf(inputs) {
  return h("div", { class: "inputs" }, Object.entries(inputs).map(([name, value]) => h("span", {}, h("b", {}, `${name.replaceAll("_", " ")} `), value instanceof Node ? value : shown(value))));
}

function shown(value) {
  if (Array.isArray(value) && value.length > LONGEST_LIST) return `${value.slice(0, LONGEST_LIST).map(plain).join(", ")} and ${value.length - LONGEST_LIST} more`;
  return typeof value === "number" ? number(value) : plain(value);
}
