/* The table of groups, and one group with its members. */

import { button, debounced, empty, fill, h, svg } from "./dom.js";
import { NONE, clock, count, duration, moment, number, percent, plain } from "./format.js";
import { messageBox, plainText, rewardChip } from "./conversation.js";
import { difference } from "./difference.js";

const SORTS = { newest: "Newest first", oldest: "Oldest first", best: "Best member first", worst: "Worst member first", spread: "Largest spread first" };
const STATES = { trained: "good", ready: "calm", pending: "", collected: "good", filtered: "warn", discarded: "warn", failed: "bad", cancelled: "" };
const LIMIT = 50;
const MOST_DECISIONS = 1000; // in one answer of the server
const REFRESH_MS = 3000;

export async function show(root, context) {
  return context.rest.length ? group(root, context) : table(root, context);
}

async function table(root, { run, params, api, live, link }) {
  const state = {
    sort: params.get("sort") in SORTS ? params.get("sort") : "newest",
    status: params.get("status") in STATES ? params.get("status") : "",
    tag: params.get("tag") ?? "",
    text: params.get("text") ?? "",
    offset: Math.max(0, Number(params.get("offset")) || 0),
  };
  const place = h("div", {});
  const statuses = h("div", { class: "segments wrap", role: "group", "aria-label": "Status" });
  const tags = h("select", { "aria-label": "Environment", onchange: ({ target }) => choose({ tag: target.value, offset: 0 }) });
  const tagLabel = h("label", { hidden: true }, "Environment", tags);
  const sort = h("select", { onchange: ({ target }) => choose({ sort: target.value, offset: 0 }) }, Object.entries(SORTS).map(([name, label]) => h("option", { value: name, selected: name === state.sort }, label)));
  const search = h("input", { type: "search", class: "wide", value: state.text, placeholder: "Task, reason or group number", "aria-label": "Search groups", oninput: debounced(({ target }) => choose({ text: target.value, offset: 0 }), 250) });
  let visit = 0;
  let timer = 0;
  const status = await api.get(["runs", run, "status"]).catch(() => null);
  if (status?.simulated) {
    fill(root, empty("A simulated run has no groups to read", "Its answers have lengths and rewards, and no texts. Decisions has what the scheduler did with each group."));
    return null;
  }
  const draw = async () => {
    const mine = ++visit;
    clearTimeout(timer);
    const query = new URLSearchParams(Object.entries(state).filter(([name, value]) => value && !(name === "sort" && value === "newest")));
    const text = query.toString();
    history.replaceState(null, "", `${link(run, "groups")}${text ? `?${text}` : ""}`);
    const page = await api.get(["runs", run, "groups"], { ...state, limit: LIMIT });
    if (mine !== visit) return;
    const known = Object.entries(page.counts ?? {});
    fill(statuses, [["", known.reduce((sum, [, amount]) => sum + amount, 0)], ...known].map(([name, amount]) => button(`${name || "all"} ${count(amount)}`, () => choose({ status: name, offset: 0 }), { "aria-pressed": String(state.status === name) })));
    tagLabel.hidden = (page.tags ?? []).length < 2 && !state.tag;
    fill(tags, ["", ...(page.tags ?? [])].map((tag) => h("option", { value: tag, selected: tag === state.tag }, tag || "all")));
    fill(place, page.groups.length ? rows(page, state, { run, link }) : nothing(state, page), pager(page, state, choose));
    if (page.indexed < 1 && mine === visit) timer = setTimeout(() => draw().catch(() => {}), REFRESH_MS);
  };
  const choose = (change) => {
    Object.assign(state, change);
    draw().catch((error) => fill(place, empty("The groups could not be read", error.message)));
  };
  root.classList.add("bounded");
  fill(root, h("div", { class: "tools" }, search, h("label", {}, "Order", sort), tagLabel), statuses, place);
  await draw();
  let waiting = 0;
  live?.on("step", () => {
    if (waiting || state.offset || state.sort !== "newest" || document.activeElement?.closest?.("table")) return;
    waiting = setTimeout(() => {
      waiting = 0;
      draw().catch(() => {});
    }, REFRESH_MS);
  });
  return () => {
    visit += 1;
    clearTimeout(timer);
    clearTimeout(waiting);
  };
}

function nothing(state, page) {
  if (state.text || state.status || state.tag) return empty("No group matches", page.indexed < 1 ? `Reasons are read from timeline.jsonl; ${percent(page.indexed)} of it is read so far.` : "Change the search or the status.");
  return empty("No groups yet", "The first group comes when the run has admitted a task.");
}

function rows(page, state, { run, link }) {
  const most = Math.max(1, ...page.groups.flatMap((each) => each.lengths));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Groups" }, h("table", { class: "sticky groups" },
    h("caption", { class: "hidden" }, "Groups of the run"),
    h("thead", {}, h("tr", {}, ["Group", "Status", "Task", "Reward", "Rewards of members", "Tokens written", "Turns", "Version", "Step", "Failures", "Admitted"].map((name, at) => h("th", { class: [3, 6, 7, 8, 9].includes(at) ? "num" : "", scope: "col" }, name)))),
    h("tbody", {}, page.groups.map((each) => h("tr", {},
      h("th", { scope: "row" }, h("a", { href: link(run, "groups", each.group) }, each.group)),
      h("td", {}, h("span", { class: `pill ${STATES[each.status] ?? ""}` }, each.status)),
      h("td", { class: "break" }, h("span", { class: "mono" }, each.task_id), each.reason ? h("div", { class: "reason" }, each.reason) : null),
      h("td", { class: "num" }, each.reward_mean === null ? NONE : `${number(each.reward_mean)} ± ${number(each.reward_std)}`),
      h("td", {}, rewardBars(each.rewards)),
      h("td", {}, lengthsOf(each.lengths, most)),
      h("td", { class: "num" }, each.turns_mean === null ? NONE : number(each.turns_mean)),
      h("td", { class: "num" }, span(each.policy_version_min, each.policy_version_max)),
      h("td", { class: "num" }, plain(each.step)),
      h("td", { class: "num" }, each.num_failed ? count(each.num_failed) : NONE),
      h("td", { class: "nowrap", title: moment(each.time) }, clock(each.time)))))));
}

function pager(page, state, choose) {
  const last = Math.min(state.offset + LIMIT, page.total);
  return h("div", { class: "tools" },
    button("← Previous", () => choose({ offset: Math.max(0, state.offset - LIMIT) }), { disabled: state.offset === 0 }),
    button("Next →", () => choose({ offset: state.offset + LIMIT }), { disabled: last >= page.total }),
    h("span", { class: "muted num" }, page.total ? `${count(state.offset + 1)} to ${count(last)} of ${count(page.total)}` : ""),
    page.indexed < 1 ? h("span", { class: "muted" }, `reasons and failures: ${percent(page.indexed)} of timeline.jsonl is read`) : null);
}

const span = (first, last) => (first === null ? NONE : first === last ? String(first) : `${first}–${last}`);

/** Return the rewards of the members as small bars around zero. */
function rewardBars(rewards) {
  if (!rewards.length) return NONE;
  const [width, height] = [6, 22];
  const known = rewards.map((reward) => reward ?? 0);
  const most = Math.max(1e-9, ...known.map(Math.abs));
  const below = known.some((reward) => reward < 0);
  const zero = below ? height / 2 : height - 1;
  const bars = known.map((reward, at) => {
    const size = Math.max((Math.abs(reward) / most) * (below ? height / 2 : height - 2), 1);
    return svg("rect", { x: at * (width + 2), y: reward < 0 ? zero : zero - size, width, height: size, class: reward > 0 ? "bar-plus" : reward < 0 ? "bar-minus" : "bar-zero" });
  });
  return svg("svg", { class: "bars-svg", width: rewards.length * (width + 2), height, role: "img", "aria-label": `rewards ${rewards.map((each) => number(each)).join(", ")}` }, svg("title", {}, rewards.map((each) => number(each)).join(", ")), bars);
}

/** Return the lengths of the members: the range as text, and a line with a dot for each. */
function lengthsOf(lengths, most) {
  if (!lengths.length) return NONE;
  const [least, longest] = [Math.min(...lengths), Math.max(...lengths)];
  const width = 90;
  const dots = lengths.map((length) => svg("circle", { cx: 4 + (length / most) * (width - 8), cy: 6, r: 2.5, class: "length-dot" }));
  return h("span", { class: "lengths" }, svg("svg", { width, height: 12, "aria-hidden": "true" }, svg("line", { x1: 4, x2: width - 4, y1: 6, y2: 6, class: "length-line" }), dots), h("span", { class: "num muted" }, least === longest ? count(least) : `${count(least)}–${count(longest)}`));
}

async function group(root, { run, rest, params, api, link }) {
  const [number_] = rest;
  const found = await api.get(["runs", run, "groups", number_]);
  const readable = found.members.filter((member) => member.has_text).map((member) => member.episode);
  const order = [...found.members].filter((member) => member.has_text).sort((a, b) => b.reward - a.reward);
  const state = {
    view: params.get("view") === "difference" ? "difference" : "side",
    left: chosen(params.get("left"), readable) ?? order[0]?.episode,
    right: chosen(params.get("right"), readable) ?? order.at(-1)?.episode,
  };
  const episodes = new Map();
  const load = (episode) => {
    if (!episodes.has(episode)) {
      const asked = api.get(["runs", run, "groups", number_, "episodes", episode]);
      asked.catch(() => episodes.delete(episode));
      episodes.set(episode, asked);
    }
    return episodes.get(episode);
  };
  let watcher = null;
  const place = h("div", {});
  const tabs = h("div", { class: "tools" });
  const draw = () => {
    watcher?.disconnect();
    const query = new URLSearchParams(state.view === "difference" ? { view: "difference", left: state.left, right: state.right } : {}).toString();
    history.replaceState(null, "", `${link(run, "groups", number_)}${query ? `?${query}` : ""}`);
    const pick = (name, label) => h("label", {}, label, h("select", { onchange: ({ target }) => choose({ [name]: Number(target.value) }) }, readable.map((episode) => h("option", { value: episode, selected: episode === state[name] }, memberName(found, episode)))));
    fill(tabs, h("div", { class: "segments", role: "group", "aria-label": "Members" },
      button("Side by side", () => choose({ view: "side" }), { "aria-pressed": String(state.view === "side") }),
      button("Difference of two", () => choose({ view: "difference" }), { "aria-pressed": String(state.view === "difference"), disabled: readable.length < 2 })),
    state.view === "difference" ? [pick("left", "Left"), pick("right", "Right")] : null);
    if (!readable.length) fill(place, empty("No text", found.members.length ? "The run has deleted the tokens of this group, and it is not among the kept samples (observe.trajectories)." : ""));
    else if (state.view === "difference") fill(place, differenceOf(state, load));
    else {
      watcher = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => {
        watcher?.unobserve(target);
        load(Number(target.dataset.episode)).then((episode) => fill(target.lastElementChild, conversationOf(episode))).catch((error) => fill(target.lastElementChild, h("p", { class: "muted" }, error.message)));
      }), { rootMargin: "300px" });
      const columns = readable.map((episode) => h("article", { class: "member", dataset: { episode } }, h("header", {}, h("a", { href: link(run, "groups", number_, episode) }, `Episode ${episode}`), rewardChip(memberOf(found, episode).reward, "reward of the episode")), h("div", {}, h("p", { class: "muted" }, "Loading…"))));
      fill(place, h("div", { class: "side-by-side", tabindex: "0", role: "region", "aria-label": "Members side by side" }, columns));
      columns.forEach((column) => watcher.observe(column));
    }
  };
  const choose = (change) => {
    Object.assign(state, change);
    draw();
  };
  root.classList.add("bounded");
  fill(root, heading(found, { run, link }), members(found, { run, link }), found.members.length ? [tabs, place] : null, decisionsOf(found, { run, api }));
  draw();
  return () => watcher?.disconnect();
}

const chosen = (text, known) => (text !== null && known.includes(Number(text)) ? Number(text) : undefined);
const memberOf = (found, episode) => found.members.find((member) => member.episode === episode) ?? {};
const memberName = (found, episode) => `Episode ${episode}, reward ${number(memberOf(found, episode).reward)}`;

function heading(found, { run, link }) {
  const facts = {
    Reward: found.reward_mean === null ? NONE : `${number(found.reward_mean)} ± ${number(found.reward_std)}`,
    Environment: plain(found.tag),
    "Tokens written": found.lengths.length ? `${count(Math.min(...found.lengths))} to ${count(Math.max(...found.lengths))}` : NONE,
    "Policy version": span(found.policy_version_min, found.policy_version_max),
    "Trained in step": plain(found.step),
    "Failed attempts": count(found.num_failed),
    Admitted: moment(found.time),
  };
  return h("section", { class: "panel" },
    h("header", {},
      h("h2", {}, h("a", { href: link(run, "groups") }, "Groups"), ` · group ${found.group}`),
      h("span", { class: `pill ${STATES[found.status] ?? ""}` }, found.status),
      h("span", { class: "mono muted break" }, found.task_id)),
    found.reason ? h("div", { class: `note ${found.status === "failed" ? "bad" : "warn"}` }, h("strong", {}, { filtered: "Dropped by a filter", failed: "Given up", discarded: "Discarded", pending: "Played again" }[found.status] ?? "Reason"), found.reason) : null,
    h("dl", { class: "fact-list" }, Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}

function members(found, { run, link }) {
  if (!found.members.length) return empty("No members", found.status === "failed" ? "Its episodes failed. The decisions below say how." : "Its episodes have not ended yet.");
  return h("div", { class: "scroll panel", tabindex: "0", role: "region", "aria-label": "Members" }, h("table", {},
    h("caption", { class: "hidden" }, "Members of the group"),
    h("thead", {}, h("tr", {}, ["Episode", "Reward", "Ended", "Turns", "Read", "Written", "Took", "Version", "Metrics"].map((name, at) => h("th", { scope: "col", class: [1, 3, 4, 5, 6, 7].includes(at) ? "num" : "" }, name)))),
    h("tbody", {}, found.members.map((member) => h("tr", {},
      h("th", { scope: "row" }, member.has_text ? h("a", { href: link(run, "groups", found.group, member.episode) }, member.episode) : member.episode),
      h("td", { class: "num" }, number(member.reward)),
      h("td", {}, `${member.status}${member.stop_reason ? ` (${member.stop_reason})` : ""}`, member.error ? h("div", { class: "reason" }, member.error) : null),
      h("td", { class: "num" }, count(member.num_turns)),
      h("td", { class: "num" }, count(member.prompt_tokens)),
      h("td", { class: "num" }, count(member.response_tokens)),
      h("td", { class: "num" }, duration(member.seconds)),
      h("td", { class: "num" }, span(member.policy_version_min, member.policy_version_max)),
      h("td", { class: "break" }, Object.entries(member.metrics).map(([name, value]) => `${name} ${number(value)}`).join(", ")))))));
}

function conversationOf(episode) {
  if (!episode.messages.length) return h("p", { class: "muted" }, "No text is left.");
  const lastOf = new Map(episode.messages.map((message, at) => [message.turn, at]));
  return episode.messages.map((message, at) => messageBox(message, { reward: lastOf.get(message.turn) === at ? rewardChip(episode.turns[message.turn]?.reward) : null }));
}

function differenceOf(state, load) {
  const place = h("div", {}, h("p", { class: "muted" }, "Loading…"));
  Promise.all([load(state.left), load(state.right)]).then(([left, right]) => {
    const lines = [];
    for (let at = 0; at < Math.max(left.messages.length, right.messages.length); at += 1) {
      const [mine, theirs] = [left.messages[at], right.messages[at]];
      const parts = difference(mine ? plainText(mine) : "", theirs ? plainText(theirs) : "");
      const same = mine && theirs && parts.every(([kind]) => kind === "same");
      lines.push(h("tr", { class: same ? "muted" : "" }, side(mine, parts, "left"), side(theirs, parts, "right")));
    }
    const title = (episode) => h("th", { scope: "col" }, `Episode ${episode.row.episode} · reward ${number(episode.row.reward)}`);
    fill(place, h("div", { class: "scroll panel", tabindex: "0", role: "region", "aria-label": "Difference" }, h("table", { class: "difference" }, h("caption", {}, "Marked text is in one of the two only."), h("thead", {}, h("tr", {}, title(left), title(right))), h("tbody", {}, lines))));
  }).catch((error) => fill(place, empty("The episodes could not be read", error.message)));
  return place;
}

function side(message, parts, kind) {
  if (!message) return h("td", { class: "muted" }, "(no message)");
  return h("td", {}, h("div", { class: "role" }, message.role), h("div", { class: "said" }, parts.filter(([each]) => each === "same" || each === kind).map(([each, text]) => (each === "same" ? text : h(kind === "left" ? "del" : "ins", {}, text)))));
}

/** The decisions about a group, the oldest first. Those before the first answer of the server are read when asked for. */
function decisionsOf(found, { run, api }) {
  let before = found.decisions_before;
  let num = found.decisions.length;
  const said = h("span", { role: "status" });
  const body = h("tbody", {}, found.decisions.map(decisionRow));
  const table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Decisions" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Time", "Decider", "Reason", "Inputs"].map((name) => h("th", { scope: "col" }, name)))), body));
  const none = h("p", { class: "muted" }, "timeline.jsonl has none.");
  const more = button("Show earlier decisions", async () => {
    more.disabled = true;
    try {
      const page = await api.get(["runs", run, "decisions"], { group: found.group, before, limit: MOST_DECISIONS });
      body.prepend(...[...page.decisions].reverse().map(decisionRow));
      before = page.before;
      num += page.decisions.length;
      tell();
    } catch (error) {
      said.textContent = error.message;
    }
    more.disabled = false;
  });
  const missing = h("div", { class: "note warn" }, h("strong", {}, "Earlier ones may be missing"), said, more);
  const tell = () => {
    missing.hidden = before === null;
    said.textContent = `These are the latest ${count(num)} decisions about the group.`;
    table.hidden = !num;
    none.hidden = num > 0 || before !== null;
  };
  tell();
  return h("section", { class: "panel", "aria-label": "Decisions about this group" }, h("h2", {}, "Decisions about this group"), missing, table, none);
}

function decisionRow({ time, decider, reason, inputs }) {
  return h("tr", {},
    h("td", { class: "num nowrap" }, clock(time, 3)),
    h("td", {}, decider),
    h("td", { class: "break" }, reason),
    h("td", {}, h("span", { class: "inputs" }, Object.entries(inputs ?? {}).map(([name, value]) => h("span", {}, h("b", {}, `${name} `), plain(value))))));
}
