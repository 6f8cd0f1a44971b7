/* All runs that the server knows, newest first. */

import { append, button, command, empty, fill, h, refresh } from "./dom.js";
import { count, moment, number, plain, spoken } from "./format.js";
import { stateClass } from "./words.js";

const REFRESH_MS = 5000;

/** Show the list of runs; chosen ones can be compared. */
export async function show(root, { api, link }) {
  const chosen = new Set();
  let runs = (await api.get("runs")).runs;
  const search = h("input", { type: "search", placeholder: "filter", "aria-label": "Filter the runs", oninput: () => draw() });
  const compare = button("Compare", () => (location.hash = `#/compare/${[...chosen].map(encodeURIComponent).join(",")}`), { disabled: true });
  const body = h("tbody");
  const table = h("div", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": "Runs" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "hidden" }, "compare")),
      [["run"], ["status"], ["environment"], ["pipeline"], ["started"], ["took", 1], ["progress", 1], ["reward", 1], ["held out", 1]].map(([name, isNumber]) => h("th", { scope: "col", class: isNumber ? "num" : null }, name)))), body));
  const none = h("div", {});
  append(root, [h("div", { class: "tools" }, search, compare, h("span", { class: "muted" }, "Choose two or more runs to compare their curves and settings.")), table, none]);

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = runs.filter((run) => words.every((word) => [run.id, run.status, run.environment, run.pipeline, run.simulated ? "simulated" : ""].join(" ").toLowerCase().includes(word)));
    refresh(body, found.map(row));
    table.hidden = !found.length;
    fill(none, runs.length ? (found.length ? null : empty("No run has these words")) : nothing());
    compare.disabled = chosen.size < 2;
  }

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `Compare ${run.id}`, onchange: () => {
      if (box.checked) chosen.add(run.id);
      else chosen.delete(run.id);
      compare.disabled = chosen.size < 2;
      compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare";
    } });
    box.checked = chosen.has(run.id);
    return h("tr", {}, h("td", {}, box),
      h("th", { scope: "row", class: "nowrap" }, h("a", { class: "mono", href: link(run.id, "overview") }, run.id)),
      h("td", {}, h("span", { class: `pill ${stateClass(run.status)}` }, plain(run.status))),
      h("td", { class: "break" }, plain(run.environment)), h("td", {}, run.simulated ? h("span", { class: "pill calm" }, "simulated") : plain(run.pipeline)),
      h("td", { class: "time" }, moment(run.started).slice(0, 16)), h("td", { class: "num" }, spoken(run.wall_seconds)),
      h("td", { class: "num" }, run.step ? `${count(run.step)} / ${run.steps ? count(run.steps) : "?"}` : "–"),
      h("td", { class: "num" }, number(run.reward)), h("td", { class: "num" }, number(run.held_out)));
  }

  draw();
  const timer = setInterval(async () => {
    if (document.hidden) return;
    const found = await api.get("runs").catch(() => null);
    if (found) {
      runs = found.runs;
      draw();
    }
  }, REFRESH_MS);
  return () => clearInterval(timer);
}

function nothing() {
  return h("div", { class: "empty" }, h("strong", {}, "No run yet"), h("p", {}, "A run appears here when it starts. This one trains a small model in a few minutes, without a GPU:"),
    h("ul", { class: "commands" }, command("penstock train examples/quickstart/run.yaml")));
}
