/* One trajectory: as chat, as tokens, as its environment shows it, and as raw JSON. */

import { button, empty, fill, h, svg } from "./dom.js";
import { NONE, count, duration, moment, number, plain } from "./format.js";
import { messageBox, pathTo, rewardChip } from "./conversation.js";
import { MEASURES, legendOf, rangeOf, saveStrips, stripOf } from "./tokens.js";

const VIEWS = { chat: "Chat", tokens: "Tokens", rendered: "Environment's view", raw: "Raw JSON" };

export async function show(root, { run, rest, params, api, link }) {
  const [group, episode] = rest;
  const found = await api.get(["runs", run, "groups", group, "episodes", episode]);
  const state = {
    view: params.get("view") in VIEWS ? params.get("view") : "chat",
    measure: params.get("colour") in MEASURES ? params.get("colour") : "logprob",
    branch: Math.min(Math.max(Number(params.get("branch") ?? found.branches.length) - 1 || 0, 0), Math.max(found.branches.length - 1, 0)),
  };
  const endings = [];
  const body = h("div", { class: "trajectory-body" });
  const tabs = h("div", { class: "segments wrap", role: "group", "aria-label": "View" });
  const draw = () => {
    endings.splice(0).forEach((end) => end());
    remember(state, found, link(run, "groups", group, episode));
    fill(tabs, views(found).map((name) => button(VIEWS[name], () => choose({ view: name }), { "aria-pressed": String(state.view === name) })));
    fill(body, { chat, tokens, rendered, raw }[state.view](found, state, { choose, endings, run, api }));
  };
  const choose = (change) => {
    Object.assign(state, change);
    draw();
  };
  if (!views(found).includes(state.view)) state.view = "chat";
  root.classList.add("bounded");
  fill(root, heading(found, { run, group, link }), h("div", { class: "tools" }, tabs, h("span", { class: "push" }, shareButton())), body);
  draw();
  return () => endings.forEach((end) => end());
}

function views(found) {
  return Object.keys(VIEWS).filter((name) => (name !== "rendered" || found.renderer) && (name !== "tokens" || found.tokens));
}

/** Write what is chosen into the address, so that the address can be shared. */
function remember(state, found, address) {
  const query = new URLSearchParams();
  if (state.view !== "chat") query.set("view", state.view);
  if (state.view === "tokens" && state.measure !== "logprob") query.set("colour", state.measure);
  if (found.branches.length > 1) query.set("branch", String(state.branch + 1));
  const text = query.toString();
  history.replaceState(null, "", `${address}${text ? `?${text}` : ""}`);
}

function shareButton() {
  const share = button("Copy link", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      share.textContent = "Copied";
    } catch {
      prompt("The link to this view:", location.href); // without the right to write
    }
    setTimeout(() => (share.textContent = "Copy link"), 1500);
  }, { class: "small" });
  return share;
}

function heading(found, { run, group, link }) {
  const { row } = found;
  const at = row.members.indexOf(row.episode);
  const step = (by, label) => {
    const other = row.members[at + by];
    if (other === undefined) return h("span", { class: "button quiet", "aria-disabled": "true" }, label);
    return h("a", { class: "button", href: link(run, "groups", group, other) }, label);
  };
  const versions = row.policy_version_min === row.policy_version_max ? plain(row.policy_version_min) : `${row.policy_version_min}–${row.policy_version_max}`;
  const facts = {
    Reward: number(row.reward),
    Ended: `${row.status}${row.stop_reason ? ` (${row.stop_reason})` : ""}`,
    Turns: count(row.num_turns),
    Tokens: row.prompt_tokens || row.response_tokens ? `${count(row.prompt_tokens)} read, ${count(row.response_tokens)} written` : NONE,
    "Policy version": versions,
    "Trained in step": plain(row.step),
    Took: row.seconds ? `${duration(row.seconds)}, of which environment ${duration(row.env_s)}${row.reward_s ? ` and reward ${duration(row.reward_s)}` : ""}` : NONE,
    Attempt: count(row.attempt + 1),
    Seed: plain(row.seed),
  };
  return h("section", { class: "panel" },
    h("header", {},
      h("h2", {}, h("a", { href: link(run, "groups", group) }, `Group ${row.group}`), ` · episode ${row.episode}`),
      h("span", { class: "mono muted break" }, row.task_id),
      h("span", { class: "tools push" }, step(-1, "← Previous member"), step(1, "Next member →"))),
    h("dl", { class: "fact-list" }, Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    Object.keys(row.metrics ?? {}).length ? h("p", { class: "inputs" }, Object.entries(row.metrics).map(([name, value]) => h("span", {}, h("b", {}, `${name} `), number(value)))) : null,
    row.error ? h("div", { class: "note bad" }, h("strong", {}, "Failed"), h("pre", {}, row.error)) : null);
}

function chat(found, state, { choose }) {
  if (!found.turns.length) return empty("No text", "The run has deleted the tokens of this group, and it is not among the kept samples (observe.trajectories).");
  const path = pathOf(found, state);
  const conversation = h("div", { class: "conversation" }, path.flatMap((index) => turnBoxes(found, index, state, choose)));
  return found.branches.length > 1 ? h("div", { class: "with-tree" }, tree(found, state, choose), conversation) : conversation;
}

const pathOf = (found, state) => (found.branches.length ? pathTo(found.turns, found.branches[state.branch].at(-1)) : found.turns.map((turn) => turn.turn));

/** Return the messages of a turn. Its reward stands at the last one. */
function turnBoxes(found, index, state, choose) {
  const turn = found.turns[index];
  const others = found.turns.filter((other) => other.parent === turn.parent && other.turn !== index);
  const fork = others.length ? forkNote(found, turn, others, state, choose) : null;
  const before = found.turns[turn.parent]?.policy_versions.at(-1);
  const swaps = turn.policy_versions.filter((version, at) => (at > 0 ? true : before !== undefined && version !== before));
  const swapNote = swaps.length ? h("p", { class: "swaps" }, `new weights during turn ${index + 1}: version ${swaps.join(", ")}`) : null;
  return [fork, ...turn.messages.map((message, at) => messageBox(message, { reward: at === turn.messages.length - 1 ? rewardChip(turn.reward, `reward of turn ${index + 1}`) : null })), swapNote];
}

/** Return a note that other turns begin here too, with buttons that go there. */
function forkNote(found, turn, others, state, choose) {
  const all = [turn, ...others].sort((a, b) => a.turn - b.turn);
  return h("p", { class: "fork" }, turn.parent < 0 ? `${all.length} conversations: ` : `${all.length} ways go on from here: `, all.map((each) => button(`turn ${each.turn + 1}`, () => choose({ branch: branchWith(found, each.turn) }), { class: "small", "aria-pressed": String(each === turn) })));
}

const branchWith = (found, turn) => Math.max(found.branches.findLastIndex((branch) => pathTo(found.turns, branch.at(-1)).includes(turn)), 0);

/** Return the turns as a tree: one line each, indented where branches begin. */
function tree(found, state, choose) {
  const path = new Set(pathOf(found, state));
  const lines = [];
  const children = (parent) => found.turns.filter((turn) => turn.parent === parent);
  const walk = (parent, depth) => {
    const next = children(parent);
    next.forEach((turn) => {
      lines.push([turn, depth + (next.length > 1 ? 1 : 0)]);
      walk(turn.turn, depth + (next.length > 1 ? 1 : 0));
    });
  };
  walk(-1, 0);
  const said = (turn) => turn.messages.at(-1)?.content || turn.messages.at(-1)?.tool_calls?.[0]?.name || "…";
  return h("nav", { class: "tree panel", "aria-label": "Branches" },
    h("h3", {}, `${found.turns.length} turns, ${found.branches.length} branches`),
    h("ul", {}, lines.map(([turn, depth]) => h("li", { style: { "padding-left": `${depth * 0.9}rem` } },
      h("button", { type: "button", class: "quiet small", "aria-current": path.has(turn.turn) ? "true" : null, onclick: () => choose({ branch: branchWith(found, turn.turn) }) },
        h("b", { class: "num" }, turn.turn + 1), " ", h("span", {}, said(turn).slice(0, 60)), " ", rewardChip(turn.reward))))));
}

function tokens(found, state, { choose, endings, run }) {
  const strips = new Map(found.tokens.map((strip) => [strip.turn, strip]));
  const range = rangeOf(found.tokens);
  const path = pathOf(found, state);
  const about = h("output", { class: "token-facts mono" }, "Point at a token, or go through a strip with the arrow keys.");
  const measures = h("div", { class: "segments wrap", role: "group", "aria-label": "Colour by" }, Object.entries(MEASURES).map(([name, label]) => button(label, () => choose({ measure: name }), { "aria-pressed": String(state.measure === name) })));
  const before = (index) => found.turns[found.turns[index].parent]?.policy_versions.at(-1);
  const boxes = path.map((index) => {
    const strip = strips.get(index);
    if (!strip) return h("p", { class: "muted" }, `Turn ${index + 1}: too long to show its tokens.`);
    const { element, end } = stripOf(strip, { measure: state.measure, range, before: before(index), onfacts: (text) => (about.textContent = text) });
    endings.push(end);
    return h("section", { class: "turn" },
      h("header", {}, h("span", { class: "role" }, `Turn ${index + 1}`), h("span", { class: "muted num" }, `${count(strip.observed.length)} read, ${count(strip.texts.length)} written`), strip.advantage === null ? null : h("span", { class: "muted num" }, `advantage ${number(strip.advantage)}`), rewardChip(found.turns[index].reward)),
      element);
  });
  const save = button("PNG", () => saveStrips(path.filter((index) => strips.has(index)).map((index) => ({ title: `Turn ${index + 1}`, strip: strips.get(index), before: before(index) })), {
    measure: state.measure, range, title: `Group ${found.row.group}, episode ${found.row.episode} of ${run}`,
    note: `Tokens by ${MEASURES[state.measure].toLowerCase()}; policy versions ${range.versions.length > 1 ? `${range.versions[0]} to ${range.versions.at(-1)}` : plain(range.versions[0])}${found.row.time ? `; ${moment(found.row.time)}` : ""}`,
  }), { class: "small", "aria-label": "PNG of the tokens" });
  const shown = h("div", { class: "strips" }, h("div", { class: "token-head" }, h("div", { class: "tools" }, measures, save), legendOf(state.measure, range, found.tokens, found.row), about), boxes);
  return found.branches.length > 1 ? h("div", { class: "with-tree" }, tree(found, state, choose), shown) : shown;
}

/** Return what a custom renderer makes of the trajectory. Its file stands in the folder `renderers`. */
function rendered(found, state, { run, api }) {
  const place = h("div", { class: "rendered" }, h("p", { class: "muted" }, "Loading…"));
  made(found, { run, api }).then((node) => fill(place, node)).catch((error) => fill(place, h("div", { class: "note bad" }, h("strong", {}, `renderers/${found.renderer} failed`), h("pre", {}, String(error?.message ?? error)))));
  return place;
}

async function made(found, { run, api }) {
  const { row, renderer } = found;
  if (renderer.endsWith(".py")) {
    const { rendered: text } = await api.get(["runs", run, "groups", row.group, "episodes", row.episode], { render: 1 });
    return h("pre", {}, text);
  }
  const module = await import(new URL(`renderers/${encodeURIComponent(renderer)}`, document.baseURI));
  return module.render(found, { h, svg, run });
}

function raw(found) {
  const text = JSON.stringify(found.raw, null, 2);
  return h("div", { class: "raw" }, h("div", { class: "tools" }, h("a", { class: "button", download: `group_${found.row.group}_episode_${found.row.episode}.json`, href: URL.createObjectURL(new Blob([JSON.stringify(found, null, 2)], { type: "application/json" })) }, "Download all of it")), h("pre", { class: "mono" }, text));
}
