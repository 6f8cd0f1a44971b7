/* The ledger as a flow: every admitted episode is in exactly one state, and the states add up. */

import { h, svg } from "./dom.js";
import { count, percent } from "./format.js";
import { LEDGER } from "./words.js";

const [WIDTH, HEIGHT, TOP, GAP, BAR, LEAST] = [640, 230, 6, 9, 12, 3];
const LIVE = "in work";

/**
 * Return the ledger drawn and as a table. `ledger`: state -> number of episodes, with `admitted`. `isOver`: it is that of
 * a run that has ended.
 */
export function ledgerFlow(ledger, isOver) {
  const states = Object.entries(ledger).filter(([state]) => state !== "admitted");
  const total = ledger.admitted ?? 0;
  const sum = states.reduce((all, [, value]) => all + value, 0);
  const live = states.filter(([state]) => LEDGER[state]?.[2] === false);
  const numLive = live.reduce((all, [, value]) => all + value, 0);
  const ends = [[LIVE, numLive, "flow-live"], ...states.filter(([state]) => LEDGER[state]?.[2] !== false).map(([state, value]) => [state, value, LEDGER[state]?.[1] ?? "flow-admitted"])].filter(([, value]) => value > 0);
  return h("div", { class: "flow" },
    picture(total, ends),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Ledger as a table" }, table(states, total, sum, isOver)));
}

function picture(total, ends) {
  const room = HEIGHT - 2 * TOP - GAP * Math.max(0, ends.length - 1);
  const sum = ends.reduce((all, [, value]) => all + value, 0) || 1;
  const heights = scaled(ends.map(([, value]) => (value / sum) * room), room);
  const left = { x: 96, height: heights.reduce((all, each) => all + each, 0) };
  const top = (HEIGHT - left.height) / 2;
  const x2 = 420;
  const shapes = [svg("rect", { class: "flow-admitted", x: left.x, y: top, width: BAR, height: left.height, rx: 2 })];
  let [from, to] = [top, TOP];
  const middle = (left.x + BAR + x2) / 2;
  for (const [index, [name, value, style]] of ends.entries()) {
    const high = heights[index];
    const [a, b] = [left.x + BAR, x2];
    shapes.push(
      svg("path", { class: style, d: `M${a} ${from}C${middle} ${from} ${middle} ${to} ${b} ${to}V${to + high}C${middle} ${to + high} ${middle} ${from + high} ${a} ${from + high}Z` }),
      svg("rect", { class: style, x: b, y: to, width: BAR, height: high, rx: 2 }),
      svg("text", { x: b + BAR + 8, y: Math.max(to + high / 2 + 4, TOP + 8) }, `${name.replace("_", " ")}  ${count(value)}`, svg("tspan", { class: "muted", dx: 8 }, percent(value / (total || 1)))),
    );
    from += high;
    to += high + GAP;
  }
  shapes.push(
    svg("text", { x: left.x - 8, y: HEIGHT / 2 - 2, "text-anchor": "end" }, "admitted"),
    svg("text", { x: left.x - 8, y: HEIGHT / 2 + 14, "text-anchor": "end", class: "muted" }, count(total)));
  const said = ends.map(([name, value]) => `${name} ${count(value)}`).join(", ");
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${count(total)} episodes admitted: ${said}` }, shapes);
}

/** Return heights of at least `LEAST` that together take `room`. */
function scaled(heights, room) {
  const small = heights.filter((height) => height < LEAST).length;
  const large = heights.reduce((all, height) => all + (height < LEAST ? 0 : height), 0) || 1;
  return heights.map((height) => (height < LEAST ? LEAST : (height * (room - small * LEAST)) / large));
}

function table(states, total, sum, isOver) {
  const rows = states.filter(([, value]) => value > 0).map(([state, value]) => h("tr", {},
    h("th", { scope: "row", class: "nowrap" }, state.replace("_", " ")),
    h("td", { class: "num" }, count(value)),
    h("td", { class: "num" }, percent(value / (total || 1))),
    h("td", { class: "muted" }, (isOver && LEDGER[state]?.[3]) || (LEDGER[state]?.[0] ?? ""))));
  const fits = sum === total;
  return h("table", {},
    h("thead", {}, h("tr", {}, ["state", "episodes", "share", "meaning"].map((name, index) => h("th", { scope: "col", class: index === 1 || index === 2 ? "num" : null }, name)))),
    h("tbody", {}, rows, h("tr", {},
      h("th", { scope: "row" }, "sum"), h("td", { class: "num" }, count(sum)), h("td", { class: "num" }, total ? percent(sum / total) : ""),
      h("td", { class: fits ? "muted" : "" }, fits ? "equals admitted: nothing was lost" : `differs from admitted (${count(total)})`))));
}
