/* The processes of a run: state, memory, restarts, and the ends of their logs. */

import { append, button, empty, fill, h, refresh as update } from "./dom.js";
import { NONE, ago, bytes, number, plain, plural, spoken } from "./format.js";
import { stateClass } from "./words.js";

const LINES = 400;
const LOG_EVERY_MS = 2000;
const ALSO = ["supervisor", "janitor"];

/** Show the processes of a run. `params` may have `log`: the process of which the log is shown. */
export async function show(root, { run, api, live, params, link }) {
  let status = await api.get(["runs", run, "status"]);
  if (status.simulated) {
    fill(root, empty("A simulated run has no processes", "One command simulated it: its servers and its trainer are models, which write no logs. Timeline has what they did when."));
    return null;
  }
  let chosen = params.get("log") ?? status.root_cause?.process ?? status.processes?.find((each) => each.name !== "supervisor")?.name ?? "supervisor";
  let before = null;
  let isOver = false;
  let timer = 0;
  let asked = 0;

  const body = h("tbody");
  const incidents = h("section", { class: "panel", "aria-label": "Incidents" });
  const log = h("pre", { class: "log", tabindex: 0, role: "region" });
  const choice = h("select", { "aria-label": "Process of the log", onchange: () => choose(choice.value) });
  const older = button("Earlier lines", () => earlier(), { class: "small" });
  const words = h("input", { type: "search", placeholder: "only lines with", "aria-label": "Only lines with these words", oninput: () => drawLog() });
  const said = h("span", { class: "muted", role: "status" });
  let lines = [];
  append(root, [
    h("section", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": "Processes" }, h("table", {},
      h("thead", {}, h("tr", {}, [["process"], ["state"], ["node"], ["pid", 1], ["age", 1], ["restarts", 1], ["cores", 1], ["memory", 1], ["device"], ["about"], ["log"]].map(([name, isNumber]) => h("th", { scope: "col", class: isNumber ? "num" : null }, name)))), body)),
    incidents,
    h("section", { class: "panel section", "aria-label": "Log" }, h("div", { class: "tools" }, h("h2", {}, "Log of"), choice, older, words, said), log),
  ]);

  function drawTable() {
    update(body, (status.processes ?? []).map((each) => h("tr", {},
      h("th", { scope: "row", class: "nowrap" }, each.name), h("td", {}, h("span", { class: `pill ${pillOf(each)}` }, each.state)), h("td", {}, plain(each.node)),
      h("td", { class: "num" }, each.pid ?? NONE), h("td", { class: "num" }, spoken(each.age_seconds)), h("td", { class: "num" }, each.restarts ? h("strong", {}, each.restarts) : "0"),
      h("td", { class: "num" }, number(each.cpu_cores)), h("td", { class: "num" }, bytes(each.rss_bytes)), h("td", {}, devices(each.devices)), h("td", { class: "break" }, plain(each.reason)),
      h("td", {}, button("Log", () => choose(each.name), { class: "small quiet", "aria-label": `Log of ${each.name}` })))));
    const names = [...new Set([...(status.processes ?? []).map((each) => each.name), ...ALSO])];
    if (choice.options.length !== names.length) fill(choice, names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
    choice.value = chosen;
    const found = status.incidents ?? [];
    update(incidents, h("h2", {}, "Incidents"), found.length ? h("ul", {}, [...found].reverse().map((each) => h("li", {}, h("span", { class: "muted" }, `${ago(each.time)}  `), each.text ?? told(each))))
      : h("p", { class: "muted" }, "No process was lost, and none was started again."));
  }

  async function choose(name) {
    chosen = name;
    choice.value = name;
    history.replaceState(null, "", `${link(run, "processes")}?log=${encodeURIComponent(name)}`);
    await load(true);
  }

  async function load(isNew) {
    clearTimeout(timer);
    const mine = ++asked;
    try {
      const found = await api.get(["runs", run, "logs", chosen], { lines: LINES });
      if (isOver || mine !== asked) return;
      const isAtEnd = isNew || log.scrollTop + log.clientHeight >= log.scrollHeight - 30;
      if (isNew || isAtEnd) {
        lines = found.lines;
        before = found.before;
        drawLog();
        if (isAtEnd) log.scrollTop = log.scrollHeight;
      }
      said.textContent = "";
    } catch (error) {
      if (isNew) {
        lines = [];
        before = null;
        drawLog();
      }
      said.textContent = error.message;
    }
    if (!isOver && live.state !== "ended") timer = setTimeout(() => (document.hidden ? (timer = setTimeout(() => load(false), LOG_EVERY_MS)) : load(false)), LOG_EVERY_MS);
  }

  async function earlier() {
    const height = log.scrollHeight;
    try {
      const found = await api.get(["runs", run, "logs", chosen], { before, lines: LINES });
      if (isOver) return;
      lines = [...found.lines, ...lines];
      before = found.before;
      log.scrollTop = 0;
      drawLog();
      log.scrollTop = log.scrollHeight - height;
    } catch (error) {
      said.textContent = error.message;
    }
  }

  function drawLog() {
    const wanted = words.value.toLowerCase();
    const found = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
    log.textContent = found.join("\n") || (lines.length ? "No line has these words." : "This log is empty.");
    log.setAttribute("aria-label", `Log of ${chosen}, ${plural(found.length, "line")}`);
    older.hidden = before === null || before === undefined;
  }

  drawTable();
  live.on("status", (next) => {
    status = next;
    drawTable();
  });
  await load(true);
  return () => {
    isOver = true;
    clearTimeout(timer);
  };
}

function pillOf(process) {
  if (process.state === "exited") return process.returncode ? "bad" : "";
  return stateClass(process.state) || (process.alive ? "good" : "");
}

/** Return the accelerators of a process, a line for each. Their memory is that of all processes, when this one became ready. */
function devices(known) {
  if (!known) return NONE;
  if (!known.length) return "cpu";
  return known.map((each) => h("div", { title: `device ${each.number}; its memory when the process became ready, with that of other processes` }, `${each.name}, ${bytes(each.used_bytes)} of ${bytes(each.total_bytes)}`));
}

function told(event) {
  const { time, event: kind, ...rest } = event;
  return [kind, ...Object.entries(rest).map(([name, value]) => `${name.replaceAll("_", " ")} ${plain(value)}`)].join(", ");
}
