/* Messages of a trajectory as chat. All text of a run becomes text nodes; folded parts are `details`. */

import { h } from "./dom.js";
import { number } from "./format.js";

const LONG = 4000; // characters from which on a message is shown in part
const TITLES = { user: "Observation", assistant: "Policy", tool: "Tool", system: "System", prompt: "Prompt" };

/** Return the box of a message: role, folded thinking, text, and calls of tools. */
export function messageBox(message, { reward = null } = {}) {
  const role = String(message.role ?? "");
  const calls = message.tool_calls ?? [];
  return h("section", { class: `message of-${role in TITLES ? role : "prompt"}` },
    h("header", {}, h("span", { class: "role" }, TITLES[role] ?? role), reward),
    message.thinking ? folded(`Thinking, ${message.thinking.length.toLocaleString("en-US")} characters`, message.thinking, "thinking") : null,
    message.content ? textOf(message.content) : calls.length || message.thinking ? null : h("p", { class: "muted" }, "(no text)"),
    calls.map((call) => callBox(call)),
    message.fault ? h("p", { class: "fault" }, `Not read as a call: ${message.fault}`) : null);
}

/** Return the chip with the reward of a turn; nothing if it is unknown. */
export function rewardChip(reward, about = "reward of the turn") {
  if (reward === null || reward === undefined) return null;
  return h("span", { class: `chip num ${reward > 0 ? "plus" : reward < 0 ? "minus" : ""}`, title: about }, `${reward > 0 ? "+" : ""}${number(reward)}`);
}

function callBox(call) {
  return h("div", { class: "call" }, h("span", { class: "call-name mono" }, call.name), h("pre", {}, indented(call.arguments)));
}

/** Return JSON with line breaks if it is long; any other text as it is. */
function indented(text) {
  try {
    const value = JSON.parse(text);
    return text.length > 80 ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}

/** Return text, of which a long one is cut until the rest is asked for. */
export function textOf(text, name = "said") {
  const box = h("div", { class: name });
  if (text.length <= LONG) {
    box.textContent = text;
    return box;
  }
  const more = h("button", { type: "button", class: "small", onclick: () => (box.textContent = text) }, `Show all ${text.length.toLocaleString("en-US")} characters`);
  box.append(text.slice(0, LONG), "… ", more);
  return box;
}

function folded(title, text, name) {
  const details = h("details", { class: name }, h("summary", {}, title));
  details.addEventListener("toggle", () => details.childElementCount < 2 && details.append(textOf(text)), { once: true });
  return details;
}

/** Return the turns from the beginning of a context to a turn. */
export function pathTo(turns, last) {
  const path = [];
  for (let at = last; at >= 0 && turns[at]; at = turns[at].parent) path.unshift(at);
  return path;
}

/** Return the text of a message as it is compared and copied. */
export function plainText(message) {
  const calls = (message.tool_calls ?? []).map((call) => `${call.name} ${call.arguments}`);
  return [message.thinking, message.content, ...calls].filter(Boolean).join("\n");
}
