/* The frame: pages by the hash of the address, navigation, the state of the run, and what goes wrong. */

import * as api from "./api.js";
import { button, empty, fill, h, svg } from "./dom.js";
import { count, percent, spoken } from "./format.js";
import { follow } from "./live.js";
import { stateClass } from "./words.js";

const PAGES = { overview: "Overview", timeline: "Timeline", decisions: "Decisions", groups: "Groups", processes: "Processes", settings: "Settings" };
const THEMES = { auto: "light", light: "dark", dark: "auto" };
const AGAIN_MS = 3000;

const main = document.getElementById("main");
const frame = document.getElementById("frame");
const notes = document.getElementById("notes");

let here = null; // the address on show
let ending = null; // ends the view on show
let live = null; // the stream of the run on show
let liveRun = null;
let visit = 0;
let latest = null; // the latest status of the run on show
let parts = {}; // elements of the frame that change
const warnings = new Set();
let isReached = true;

/** Return the parts of an address: `#/RUN/PAGE/REST…?NAME=VALUE`. */
function parse(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?", 2);
  const steps = path.split("/").filter(Boolean).map(decoded);
  const params = new URLSearchParams(query);
  if (!steps.length) return { page: "runs", run: null, rest: [], params };
  if (steps[0] === "compare") return { page: "compare", run: null, rest: (steps[1] ?? "").split(",").filter(Boolean), params };
  return { page: steps[1] ?? "overview", run: steps[0], rest: steps.slice(2), params };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Return the module of a page. */
function load({ page, rest }) {
  switch (page) {
    case "runs": return import("./view_runs.js");
    case "compare": return import("./view_compare.js");
    case "overview": return import("./view_overview.js");
    case "timeline": return import("./view_timeline.js");
    case "decisions": return import("./view_decisions.js");
    case "processes": return import("./view_processes.js");
    case "settings": return import("./view_settings.js");
    case "groups": return rest.length > 1 ? import("./view_trajectory.js") : import("./view_groups.js");
    default: return null;
  }
}

/** Return an address of this page: `link("RUN", "groups", 7)`. */
function link(...steps) {
  return `#/${steps.map((step) => encodeURIComponent(step)).join("/")}`;
}

async function show() {
  const mine = ++visit;
  const before = here;
  here = parse(location.hash);
  leave();
  if (here.run !== liveRun) watch(here.run);
  draw();
  main.setAttribute("aria-busy", "true");
  fill(main, h("p", { class: "muted", role: "status" }, "Loading…"));
  await open(mine);
  if (mine !== visit) return;
  main.setAttribute("aria-busy", "false");
  if (before && (before.page !== here.page || before.run !== here.run)) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
}

/** Load the page at `here` and let it fill the main part, unless the reader goes on to another one. */
async function open(mine) {
  const root = h("div", { class: "section" });
  const loading = load(here);
  let module;
  try {
    module = await loading;
  } catch (error) {
    if (mine === visit) fill(main, empty("Not available", `This page could not be loaded (${error.message}). The other pages work.`));
    return;
  }
  if (mine !== visit) return;
  if (module === null) {
    fill(main, empty("No such page", h("a", { href: here.run ? link(here.run, "overview") : "#/" }, "Go back")));
    return;
  }
  fill(main, root);
  const unsubscribe = [];
  const scoped = live && {
    get state() { return live.state; },
    on(kind, callback) {
      unsubscribe.push(live.on(kind, callback));
      return unsubscribe.at(-1);
    },
  };
  ending = () => unsubscribe.forEach((end) => end());
  try {
    const end = await module.show(root, { ...here, api, live: scoped, link });
    if (mine !== visit) {
      end?.();
      return;
    }
    ending = () => {
      unsubscribe.forEach((each) => each());
      end?.();
    };
  } catch (error) {
    if (mine === visit && error.name !== "AbortError") fail(error);
  }
}

function leave() {
  const end = ending;
  ending = null;
  end?.();
}

function fail(error) {
  if (!(error instanceof api.ApiError)) console.error(error);
  const help = { 0: "It may have been stopped, or the connection was lost: this page tries again.", 401: "Open the address with the key that `penstock dashboard` printed.", 403: "Open the address with the key that `penstock dashboard` printed.", 404: "The list of runs has the runs that this server knows." };
  fill(main, h("div", { class: "empty" },
    h("strong", {}, error.status === undefined ? "This page has an error" : error.message),
    h("p", {}, error.status === undefined ? String(error.message) : (help[error.status] ?? "")),
    h("p", { class: "tools" }, button("Try again", show), h("a", { class: "button", href: "#/" }, "All runs"))));
  const mine = visit;
  if (error.status === 0) setTimeout(() => mine === visit && show(), AGAIN_MS);
}

/** Follow another run, or none. */
function watch(run) {
  live?.close();
  live = null;
  liveRun = run;
  latest = null;
  warnings.clear();
  if (run === null) return;
  live = follow(run);
  live.on("status", (status) => {
    latest = status;
    tell();
  });
  live.on("connection", (state) => {
    if (state === "live") isReached = true;
    tell();
  });
}

function draw() {
  const theme = button("", () => {
    window.penstockTheme.set(THEMES[window.penstockTheme.get()]);
    name();
  }, { class: "small quiet" });
  const name = () => {
    theme.textContent = `Theme: ${window.penstockTheme.get()}`;
  };
  name();
  parts = {
    state: h("span", { class: "pill" }),
    simulated: h("span", { class: "pill calm", hidden: true }, "simulated"),
    phase: h("span", { class: "phase num" }),
    done: h("span"),
    track: h("span", { class: "track", role: "img" }),
    line: h("span", { class: "line", role: "status" }),
  };
  parts.track.append(parts.done);
  const title = { runs: "Runs", compare: "Compare runs" }[here.page];
  const known = here.run !== null;
  fill(frame,
    h("div", { class: "bar" },
      h("a", { class: "brand", href: "#/", "aria-label": "penstock, all runs" }, mark(), "penstock"),
      h("h1", {}, known ? [h("span", { class: "mono" }, here.run), h("span", { class: "hidden" }, ` ${PAGES[here.page] ?? ""}`)] : title),
      known ? [parts.state, parts.simulated, parts.track, parts.phase] : null,
      h("div", { class: "push" }, known ? parts.line : null, theme)),
    h("nav", { class: "pages", "aria-label": known ? "Pages of this run" : "Pages" },
      known ? Object.entries(PAGES).map(([page, label]) => h("a", { href: link(here.run, page), "aria-current": here.page === page ? "page" : null }, label)) : null,
      known ? null : h("a", { href: "#/", "aria-current": here.page === "runs" ? "page" : null }, "All runs"),
      h("a", { href: known ? link("compare", here.run) : "#/compare/", "aria-current": here.page === "compare" ? "page" : null }, "Compare")));
  const current = frame.querySelector("nav [aria-current]");
  if (current) current.parentElement.scrollLeft = current.offsetLeft - (current.parentElement.clientWidth - current.offsetWidth) / 2;
  document.title = `${known ? `${here.run} · ${PAGES[here.page] ?? here.page}` : title} · penstock`;
  tell();
}

function mark() {
  return svg("svg", { viewBox: "0 0 32 32", "aria-hidden": "true" },
    svg("rect", { width: 32, height: 32, rx: 7, fill: "#0b5a8f" }),
    svg("path", { d: "M6 9h9v5c0 4 3 6 6 6h5v5h-6c-6 0-10-4-10-10v-1H6z", fill: "#fff" }),
    svg("circle", { cx: 23, cy: 11, r: 3, fill: "#56b4e9" }));
}

/** Show the state of the run and of the connection in the frame. */
function tell() {
  if (!here?.run || !parts.state) {
    fill(notes, reachedNote());
    return;
  }
  const progress = latest?.progress;
  parts.state.hidden = !latest;
  if (latest) {
    parts.state.textContent = latest.status;
    parts.state.className = `pill ${stateClass(latest.status)}`;
    parts.simulated.hidden = !latest.simulated;
    const share = progress.steps ? Math.min(1, progress.step / progress.steps) : 0;
    parts.done.style.width = `${100 * share}%`;
    parts.done.className = latest.status === "completed" ? "ok" : "";
    const of = progress.steps ? ` of ${count(progress.steps)}` : "";
    const left = progress.eta_seconds ? `, ${spoken(progress.eta_seconds)} left` : "";
    const phase = progress.phase === latest.status ? "" : `${progress.phase} · `;
    parts.phase.textContent = `${phase}${progress.unit} ${count(progress.step)}${of}${left}`;
    parts.track.setAttribute("aria-label", `${percent(share)} of the ${progress.unit}s`);
  }
  parts.track.hidden = !latest;
  const connection = live?.state ?? "connecting";
  parts.line.dataset.state = connection;
  parts.line.textContent = connection === "ended" ? (latest ? `took ${spoken(latest.wall_seconds)}` : "ended") : connection === "reconnecting" ? "reconnecting…" : connection;
  fill(notes, reachedNote(), [...warnings].map((text) => h("div", { class: "note warn" }, h("strong", {}, "Not all could be read"), text)));
}

function reachedNote() {
  if (isReached) return null;
  return h("div", { class: "note bad" }, h("strong", {}, "Reconnecting…"), "The server does not answer. What is shown is the last that came. If it was stopped, start ", h("code", {}, "penstock dashboard"), " again.");
}

api.answers.addEventListener("warnings", ({ detail }) => {
  const before = warnings.size;
  for (const text of detail) warnings.add(String(text));
  if (warnings.size !== before) tell();
});
api.answers.addEventListener("reached", ({ detail }) => {
  if (isReached === detail) return;
  isReached = detail;
  tell();
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the address of the page
  main.focus();
});
addEventListener("hashchange", show);
show();
