/* Strips of tokens: each sampled token has a colour by one of its facts. A strip is drawn when it comes into view. */

import { h } from "./dom.js";
import { NONE, count, number } from "./format.js";
import { colour as tone, savePicture } from "./picture.js";

const PIECE = 1500; // tokens of a strip that are drawn at once
const LEVELS = 9; // steps of a scale of colours
const LOW_LOGPROB = -6; // nats; this and all below have the last colour

/** What can be shown: name -> label and legend. */
export const MEASURES = {
  logprob: "Log-probability",
  version: "Policy version",
  trained: "Trained",
  advantage: "Advantage",
  segment: "Segment",
};

/** Return the facts of each token of a strip, by its place. */
export function facts(strip) {
  const { texts } = strip;
  const versions = spread(strip.policy_versions, texts.length);
  const trained = new Uint8Array(texts.length);
  for (const [start, end] of strip.trained) trained.fill(1, start, end);
  const stale = new Uint8Array(texts.length);
  for (const [start, end] of strip.stale ?? []) stale.fill(1, start, end);
  const segments = new Uint32Array(texts.length);
  let begin = 0;
  strip.segments.forEach((end, index) => {
    segments.fill(index, begin, end);
    begin = end;
  });
  return { versions, trained, stale, segments };
}

function spread(runs, length) {
  const found = new Array(length).fill(null);
  for (const [value, start, end] of runs) found.fill(value, start, end);
  return found;
}

/** Return the range of what the tokens of all strips have, for the scales and legends. */
export function rangeOf(strips) {
  const versions = [...new Set(strips.flatMap((strip) => strip.policy_versions.map(([version]) => version)).filter((version) => version !== null))].sort((a, b) => a - b);
  const sizes = strips.map((strip) => Math.abs(strip.advantage ?? 0));
  return { versions, advantage: Math.max(1e-9, ...sizes) };
}

/** Return the class of a token: its colour. */
function colour(measure, strip, known, place, range) {
  switch (measure) {
    case "logprob": {
      const value = strip.logprobs[place];
      if (value === null || value === undefined || !(known.trained[place] || known.stale[place])) return "t-none";
      return `t-heat-${level(value / LOW_LOGPROB)}`;
    }
    case "version": {
      const at = range.versions.indexOf(known.versions[place]);
      return at < 0 ? "t-none" : `t-kind-${at % 6}`;
    }
    case "trained": return known.trained[place] ? "t-yes" : known.stale[place] ? "t-no t-stale" : "t-no";
    case "advantage": {
      if (strip.advantage === null || !known.trained[place]) return "t-none";
      const share = Math.abs(strip.advantage) / range.advantage;
      return strip.advantage === 0 ? "t-zero" : `t-${strip.advantage > 0 ? "plus" : "minus"}-${level(share)}`;
    }
    default: return `t-kind-${known.segments[place] % 6}`;
  }
}

const level = (share) => Math.max(0, Math.min(LEVELS - 1, Math.floor(share * LEVELS)));

/**
 * Return the strip of one turn. `before`: the version that sampled what came before. `onfacts(text)` hears the facts of the token under the pointer, or that arrow keys
 * reach.
 */
export function stripOf(strip, { measure, range, before, onfacts }) {
  const known = facts(strip);
  const box = h("div", { class: "strip", tabindex: "0", role: "group", "aria-label": `Tokens of turn ${strip.turn + 1}; arrow keys go through them` });
  if (strip.observed.length) box.append(h("span", { class: "observed", title: `${count(strip.observed.length)} tokens that the policy read` }, strip.observed.join("")));
  const pieces = [];
  for (let start = 0; start < strip.texts.length; start += PIECE) {
    const piece = h("span", { class: "piece", dataset: { start } });
    piece.append(strip.texts.slice(start, start + PIECE).join("")); // the text is there before the colours are
    pieces.push(piece);
    box.append(piece);
  }
  const draw = (piece) => {
    const start = Number(piece.dataset.start);
    piece.replaceChildren(...tokensOf(strip, known, start, Math.min(start + PIECE, strip.texts.length), measure, range, before));
    piece.dataset.drawn = "yes";
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "600px" });
  pieces.forEach((piece) => watcher.observe(piece));

  let chosen = null;
  const choose = (token) => {
    chosen?.classList.remove("chosen-token");
    chosen = token;
    if (token === null) return;
    token.classList.add("chosen-token");
    onfacts(describe(strip, known, Number(token.dataset.place)));
  };
  const tokenAt = (target) => (target.closest ? target.closest("[data-place]") : null);
  box.addEventListener("pointerover", ({ target }) => tokenAt(target) && choose(tokenAt(target)));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !strip.texts.length) return;
    event.preventDefault();
    const at = chosen === null ? (step > 0 ? -1 : 0) : Number(chosen.dataset.place);
    const place = Math.max(0, Math.min(strip.texts.length - 1, at + step));
    const piece = pieces[Math.floor(place / PIECE)];
    if (!piece.dataset.drawn) draw(piece);
    const token = piece.querySelector(`[data-place="${place}"]`);
    choose(token);
    token.scrollIntoView({ block: "nearest" });
  });
  return { element: box, end: () => watcher.disconnect() };
}

function tokensOf(strip, known, start, end, measure, range, before) {
  const found = [];
  for (let place = start; place < end; place += 1) {
    const version = known.versions[place];
    const earlier = place > 0 ? known.versions[place - 1] : (before ?? version);
    if (version !== null && earlier !== null && version !== earlier) {
      found.push(h("span", { class: "swap", title: `New weights: version ${version}`, "aria-hidden": "true", dataset: { version: `v${version}` } }));
    }
    if (place > 0 && known.segments[place] !== known.segments[place - 1]) {
      found.push(h("span", { class: "cut", title: `Segment ${known.segments[place] + 1}`, "aria-hidden": "true" }));
    }
    const text = strip.texts[place];
    const name = `token ${colour(measure, strip, known, place, range)}${text === "\n" || text.endsWith("\n") ? " breaks" : ""}`;
    found.push(h("span", { class: name, dataset: { place } }, text));
  }
  return found;
}

const PICTURE = { width: 1100, margin: 12, row: 22, highest: 15_000 }; // pixels; browsers draw no canvas that is much higher

/**
 * Save the tokens of turns as a picture with their colours. `turns`: `[{title, strip, before}]`. `range`, `measure` as
 * for a strip; `title` and `note` stand above.
 */
export function saveStrips(turns, { measure, range, title, note }) {
  const canvas = h("canvas", { width: PICTURE.width, height: 1 });
  const style = getComputedStyle(document.body);
  const probe = h("span", { hidden: true });
  document.body.append(probe);
  const shades = new Map();
  const shade = (name) => {
    if (!shades.has(name)) {
      probe.className = `token ${name}`;
      shades.set(name, getComputedStyle(probe).backgroundColor);
    }
    return shades.get(name);
  };
  const mono = `13px ${tone("mono")}`;
  const bold = `600 13px ${style.fontFamily}`;
  const context = canvas.getContext("2d");
  const boxes = laidOut(turns, context, { measure, range, mono, bold, shade });
  const legend = measure === "version" ? range.versions.map((version, at) => ({ label: `version ${version}`, colour: shade(`t-kind-${at % 6}`) })) : [];
  probe.remove();
  canvas.height = boxes.height; // clears the canvas
  context.textBaseline = "middle";
  for (const { x, y, wide, text, back, ink, font, bar } of boxes.found) {
    if (back) {
      context.fillStyle = back;
      context.fillRect(x, y + 2, wide, PICTURE.row - 4);
    }
    if (bar) {
      context.fillStyle = tone(bar);
      context.fillRect(x - 3, y + 1, 2, PICTURE.row - 2);
    }
    context.font = font;
    context.fillStyle = tone(ink);
    context.fillText(text, x, y + PICTURE.row / 2);
  }
  savePicture([canvas], { title, note: `${note}${boxes.isCut ? "; the beginning" : ""}`, legend });
}

/** Return where each piece of text stands in the picture of turns, and how high the picture is. */
function laidOut(turns, context, { measure, range, mono, bold, shade }) {
  const found = [];
  const right = PICTURE.width - PICTURE.margin;
  let [x, y] = [PICTURE.margin, 0];
  const newline = () => [x, y] = [PICTURE.margin, y + PICTURE.row];
  const put = (text, more) => {
    context.font = more.font;
    const wide = context.measureText(text).width;
    if (x + wide > right && x > PICTURE.margin) newline();
    found.push({ x, y, wide, text, ...more });
    x += wide;
  };
  for (const { title, strip, before } of turns) {
    if (x > PICTURE.margin) newline();
    put(title, { font: bold, ink: "ink" });
    newline();
    const known = facts(strip);
    for (let place = 0; place < strip.texts.length && y < PICTURE.highest; place += 1) {
      const earlier = place > 0 ? known.versions[place - 1] : (before ?? known.versions[place]);
      const isSwap = known.versions[place] !== null && earlier !== null && known.versions[place] !== earlier;
      const isCut = place > 0 && known.segments[place] !== known.segments[place - 1];
      const back = shade(colour(measure, strip, known, place, range));
      const text = strip.texts[place];
      if (isSwap || isCut) x += 4;
      put(text.replaceAll("\n", "⏎").replaceAll("\t", "⇥"), { font: mono, ink: "ink", back, bar: isSwap ? "s7" : isCut ? "ink" : null });
      if (text.endsWith("\n")) newline();
    }
  }
  return { found, height: y + PICTURE.row + 4, isCut: y >= PICTURE.highest };
}

/** Return the facts of a token as one line. */
export function describe(strip, known, place) {
  const logprob = strip.logprobs[place];
  const chance = typeof logprob === "number" ? ` (p ${number(Math.exp(logprob))})` : "";
  return [
    `turn ${strip.turn + 1}, token ${place + 1} of ${strip.texts.length}`,
    JSON.stringify(strip.texts[place]),
    `id ${strip.ids[place]}`,
    known.trained[place] ? `log-probability ${typeof logprob === "number" ? number(logprob) : NONE}${chance}` : known.stale[place] ? "masked out: too old to train" : "masked out of the loss",
    `version ${known.versions[place] ?? NONE}`,
    `advantage ${strip.advantage === null || !known.trained[place] ? NONE : number(strip.advantage)}`,
    `segment ${known.segments[place] + 1} of ${strip.segments.length}`,
  ].join(" · ");
}

/** Return the legend of a measure. */
export function legendOf(measure, range, strips, { state, trained_in: trainedIn }) {
  const key = (name, label) => h("span", { class: "key-item" }, h("span", { class: `token-key ${name}` }), label);
  const scale = (name) => Array.from({ length: LEVELS }, (_, at) => h("span", { class: `token-key ${name}-${at}` }));
  switch (measure) {
    case "logprob": return legend(["likely (0)", scale("t-heat"), `unlikely (${LOW_LOGPROB} nats or less)`]);
    case "version": return legend(range.versions.map((version, at) => key(`t-kind-${at % 6}`, `version ${version}`)).concat(h("span", { class: "muted" }, "a bar marks new weights")));
    case "trained": return legend([key("t-yes", "trained"), key("t-no", "masked out of the loss"), key("t-no t-stale", "masked out: older than scheduler.max_staleness"), trainedIn === null ? h("span", { class: "muted" }, `none of it so far: the group is ${state}`) : null]);
    case "advantage":
      if (strips.every((strip) => strip.advantage === null)) return legend(["Unknown: it does not follow from the rewards of the group alone."]);
      return legend([`${number(-range.advantage)}`, scale("t-minus").reverse(), "0", scale("t-plus"), `${number(range.advantage)}`, h("span", { class: "muted" }, "by the rewards of the group")]);
    default: return legend([h("span", { class: "muted" }, "Each colour is the tokens of one grant; a dashed bar marks where an answer was cut and went on.")]);
  }
}

function legend(parts) {
  return h("div", { class: "token-legend" }, parts);
}
