/* The activity of processes on a canvas: one lane for each process, a strip of the whole run, and the marks above. */

import { debounced, fill, h } from "./dom.js";
import { clock, duration, moment, percent, plural } from "./format.js";
import { colour, savePicture } from "./picture.js";
import { WORK, kindOf } from "./words.js";

const [HEAD, FOOT] = [22, 22];
const [LEAST_STRIP, MOST_STRIP, STRIP_LANE] = [26, 110, 9];
const MOST_NAMED = 8; // processes that a screen reader is told one by one
const [LEAST_LANE, MOST_LANE, ALL_LANES] = [24, 52, 320]; // pixels
const LEAST_SPAN_S = 0.002;
const MARGIN = 0.6; // share of the window that is fetched beyond each side
const MARKS = { restart: "s7", alarm: "s2", stall: "s7", rewound: "s7", checkpoint: "s8", evaluation: "s3", adapted: "s4" };
const MARK_LETTERS = { restart: "R", alarm: "!", stall: "S", rewound: "↺", checkpoint: "C", evaluation: "E", adapted: "A" };

/**
 * Return a Gantt chart: `{element, whole, window(), show(from, to), refetch(), select(span), hide(kind, isHidden), dispose()}`.
 *
 * `fetch_(from, to, width)` returns the server's timeline. `onchange(window, data)` hears of each new window,
 * `onselect(span or mark or null)` of a choice, `onbusy(isFetching)` of requests, `onerror(error)` of failures.
 */
export function gantt({ fetch_, onchange, onselect, onbusy, onerror }) {
  const strip = h("canvas", { class: "whole", role: "img", "aria-label": "How busy each process was in the whole run" });
  const canvas = h("canvas", { class: "lanes", tabindex: 0, role: "application", "aria-roledescription": "timeline", "aria-describedby": "gantt-keys" });
  const tip = h("div", { class: "tip", hidden: true, role: "presentation" });
  const element = h("div", { class: "gantt" }, strip, canvas, tip);

  let data = null; // the newest answer for the window, with a margin
  let overall = null; // the answer for the whole run
  let view = { from: 0, to: 1 };
  let selected = null;
  let boxes = []; // what is drawn: {x, width, y, height, span}
  let flags = []; // marks that are drawn: {x, mark}
  let gutter = 90;
  let laneHeight = MOST_LANE;
  let fetched = 0;
  let isOver = false;
  const hiddenKinds = new Set();
  const colours = new Map();

  const forgetColours = () => {
    colours.clear();
    draw();
  };
  const tone = (name) => {
    if (!colours.has(name)) colours.set(name, colour(name));
    return colours.get(name);
  };
  document.addEventListener("themechange", forgetColours);
  const resized = new ResizeObserver(() => draw());
  resized.observe(element);

  const width = () => Math.max(200, element.clientWidth);
  const room = () => width() - gutter - 8;
  const toX = (time) => gutter + ((time - view.from) / (view.to - view.from)) * room();
  const toTime = (x) => view.from + ((x - gutter) / room()) * (view.to - view.from);
  const limits = () => ({ begin: overall?.begin ?? view.from, end: overall?.end ?? view.to });

  async function load(from, to) {
    const mine = ++fetched;
    onbusy(true);
    try {
      const answer = await fetch_(from, to, Math.round(room() * (from === undefined ? 1 : 1 + 2 * MARGIN)));
      if (isOver || mine !== fetched) return null;
      return answer;
    } catch (error) {
      if (!isOver && mine === fetched) onerror(error);
      return null;
    } finally {
      if (mine === fetched) onbusy(false);
    }
  }

  /** Fetch the window again, with a margin for panning. */
  async function refetch() {
    const size = view.to - view.from;
    const answer = await load(view.from - MARGIN * size, view.to + MARGIN * size);
    if (!answer) return;
    data = answer;
    draw();
    onchange(view, data);
  }
  const soon = debounced(refetch, 120);

  async function refetchWhole() {
    const { begin, end } = limits();
    try {
      const answer = await fetch_(begin, end, Math.round(Math.min(1600, room())));
      if (isOver) return;
      overall = answer;
      drawStrip();
    } catch (error) {
      onerror(error);
    }
  }

  /** Show a window; both ends stay near the run. */
  function show(from, to, { quiet } = {}) {
    const { begin, end } = limits();
    const size = Math.min(Math.max(to - from, LEAST_SPAN_S), Math.max(end - begin, LEAST_SPAN_S) * 1.04);
    const air = size * 0.02;
    let start = from + (to - from - size) / 2;
    start = Math.max(begin - air, Math.min(start, end + air - size));
    view = { from: start, to: start + size };
    draw();
    if (!quiet) soon();
    if (data) onchange(view, data);
  }

  const zoom = (factor, around = (view.from + view.to) / 2) => show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

  /** Begin with the last part of the run, or with the given window. */
  async function begin(from, to) {
    const answer = await load(from, to);
    if (!answer || !answer.processes.length) return answer;
    overall = { ...answer, spans: [], marks: [] };
    data = answer;
    view = { from: answer.from, to: answer.to };
    overall = { ...overall, begin: answer.begin, end: answer.end };
    show(answer.from, answer.to, { quiet: true });
    await refetchWhole();
    if (from || answer.spans.length) {
      onchange(view, data);
      soon();
    } else {
      show(answer.begin, answer.end, { quiet: true }); // nothing happened at the end: show it all
      await refetch();
    }
    return answer;
  }

  // -- Drawing

  function prepare(target, height) {
    const scale = devicePixelRatio || 1;
    const wide = width();
    if (target.width !== Math.round(wide * scale) || target.height !== Math.round(height * scale)) {
      target.width = Math.round(wide * scale);
      target.height = Math.round(height * scale);
      target.style.height = `${height}px`;
    }
    const context = target.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, wide, height);
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    return context;
  }

  const lanes = () => overall?.processes?.length ? [...new Set([...overall.processes, ...(data?.processes ?? [])])].sort(byRole) : data?.processes ?? [];

  function draw() {
    if (isOver || !data || !element.clientWidth) return;
    const names = lanes();
    laneHeight = Math.round(Math.max(LEAST_LANE, Math.min(MOST_LANE, ALL_LANES / Math.max(1, names.length))));
    const height = HEAD + names.length * laneHeight + FOOT;
    const context = prepare(canvas, height);
    gutter = Math.min(width() * 0.3, 16 + Math.max(...["whole run", ...names].map((name) => context.measureText(name).width)));
    drawGrid(context, names, height);
    drawSpans(context, names);
    drawMarks(context, height);
    drawStrip();
    canvas.setAttribute("aria-label", `Activity of ${names.length > MOST_NAMED ? plural(names.length, "process", "processes") : names.join(", ")} from ${clock(view.from, 1)} to ${clock(view.to, 1)}, ${duration(view.to - view.from)}`);
  }

  function drawGrid(context, names, height) {
    const [ink, muted, grid] = [tone("ink"), tone("muted"), tone("grid")];
    context.textBaseline = "middle";
    for (const [index, name] of names.entries()) {
      const y = HEAD + index * laneHeight;
      context.fillStyle = index % 2 ? "transparent" : tone("sunk");
      context.fillRect(gutter, y, room(), laneHeight);
      context.fillStyle = ink;
      context.textAlign = "right";
      context.fillText(shortened(context, name, gutter - 10), gutter - 8, y + laneHeight / 2);
    }
    const { begin } = limits();
    const step = tick(view.to - view.from, room() / 90);
    context.textAlign = "center";
    context.strokeStyle = grid;
    context.lineWidth = 1;
    for (let time = begin + Math.ceil((view.from - begin) / step) * step; time <= view.to; time += step) {
      const x = Math.round(toX(time)) + 0.5;
      context.beginPath();
      context.moveTo(x, HEAD);
      context.lineTo(x, height - FOOT);
      context.stroke();
      context.fillStyle = muted;
      context.fillText(since(time - begin, step), Math.min(Math.max(x, gutter + 14), width() - 24), height - FOOT / 2 + 1);
    }
  }

  function drawSpans(context, names) {
    boxes = [];
    const order = [...data.spans].sort((a, b) => kindOf(b[1])[2] === kindOf(a[1])[2] ? 0 : kindOf(a[1])[2] - kindOf(b[1])[2]);
    context.save();
    context.beginPath();
    context.rect(gutter, HEAD, room(), names.length * laneHeight);
    context.clip();
    for (const span of order) {
      const [process, kind, start, end, , merged, busy] = span;
      if (hiddenKinds.has(kind) || end < view.from || start > view.to) continue;
      const lane = names.indexOf(process);
      if (lane < 0) continue;
      const [, style, share] = kindOf(kind);
      const x = toX(start);
      const wide = Math.max(toX(end) - x, 0.8);
      const high = laneHeight * share;
      const y = HEAD + lane * laneHeight + (laneHeight - high) / 2;
      context.globalAlpha = merged > 1 ? Math.max(0.28, Math.min(1, busy ?? 1)) : 1;
      context.fillStyle = tone(style);
      context.fillRect(x, y, wide > 3 ? wide - 0.6 : wide, high);
      boxes.push({ x, width: wide, y, height: high, span });
    }
    context.globalAlpha = 1;
    const chosen = selected && boxes.find(({ span }) => same(span, selected));
    if (chosen) {
      context.strokeStyle = tone("ink");
      context.lineWidth = 2;
      context.strokeRect(chosen.x - 1, chosen.y - 1, chosen.width + 2, chosen.height + 2);
    }
    context.restore();
  }

  function drawMarks(context, height) {
    flags = [];
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const mark of data.marks ?? []) {
      const x = toX(mark.time);
      if (x < gutter || x > gutter + room()) continue;
      const style = tone(MARKS[mark.kind] ?? "s8");
      context.strokeStyle = context.fillStyle = style;
      context.setLineDash([3, 3]);
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(Math.round(x) + 0.5, 17);
      context.lineTo(Math.round(x) + 0.5, height - FOOT);
      context.stroke();
      context.setLineDash([]);
      context.beginPath();
      context.arc(x, 10, 7.5, 0, 2 * Math.PI);
      context.fill();
      context.fillStyle = tone("surface");
      context.font = `700 10px ${getComputedStyle(document.body).fontFamily}`;
      context.fillText(MARK_LETTERS[mark.kind] ?? "•", x, 10.5);
      flags.push({ x, mark });
    }
  }

  /** The whole run: how busy each process was, and the window on show. */
  function drawStrip() {
    if (!overall) return;
    const names = lanes();
    const height = Math.max(LEAST_STRIP, Math.min(MOST_STRIP, names.length * STRIP_LANE + 6));
    const context = prepare(strip, height);
    const { begin, end } = limits();
    const size = Math.max(end - begin, LEAST_SPAN_S);
    const x = (time) => gutter + ((time - begin) / size) * room();
    context.fillStyle = tone("sunk");
    context.fillRect(gutter, 0, room(), height);
    const lane = (height - 6) / Math.max(1, names.length);
    for (const [process, kind, start, stop, , merged, busy] of overall.spans ?? []) {
      const index = names.indexOf(process);
      if (index < 0 || hiddenKinds.has(kind)) continue;
      context.globalAlpha = merged > 1 ? Math.max(0.2, Math.min(1, busy ?? 1)) : 1;
      context.fillStyle = tone(kindOf(kind)[1]);
      context.fillRect(x(start), 3 + index * lane + 0.5, Math.max(0.7, x(stop) - x(start)), lane > 3 ? lane - 1 : lane);
    }
    context.globalAlpha = 1;
    context.fillStyle = tone("muted");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText("whole run", gutter - 8, height / 2);
    const [left, right] = [Math.max(gutter, x(view.from)), Math.min(gutter + room(), x(view.to))];
    context.fillStyle = tone("surface");
    context.globalAlpha = 0.55;
    context.fillRect(gutter, 0, left - gutter, height);
    context.fillRect(right, 0, gutter + room() - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = tone("accent");
    context.lineWidth = 2;
    context.strokeRect(left + 1, 1, Math.max(3, right - left - 2), height - 2);
  }

  // -- Pointer, wheel, keyboard

  const pointers = new Map();
  let pressed = null;
  let pinch = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event.offsetX);
    pressed = { x: event.offsetX, y: event.offsetY, from: view.from, to: view.to, moved: false };
    if (pointers.size === 2) pinch = { ...pressed, distance: Math.abs(spread()) };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) {
      hover(event);
      return;
    }
    pointers.set(event.pointerId, event.offsetX);
    tip.hidden = true;
    if (pinch && pointers.size === 2) {
      const factor = Math.max(0.05, pinch.distance / Math.max(8, Math.abs(spread())));
      const middle = (pinch.from + pinch.to) / 2;
      show(middle - (middle - pinch.from) * factor, middle + (pinch.to - middle) * factor);
      return;
    }
    if (!pressed) return;
    const moved = event.offsetX - pressed.x;
    if (Math.abs(moved) > 3) pressed.moved = true;
    if (!pressed.moved) return;
    const seconds = (moved / room()) * (pressed.to - pressed.from);
    show(pressed.from - seconds, pressed.to - seconds);
  });
  const spread = () => {
    const [a, b] = [...pointers.values()];
    return b - a;
  };
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (event.type === "pointerup" && pressed && !pressed.moved && !pinch) choose(at(event.offsetX, event.offsetY));
    if (!pointers.size) pressed = pinch = null;
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("dblclick", (event) => {
    const found = at(event.offsetX, event.offsetY)?.span;
    if (!found) return;
    const size = Math.max(found[3] - found[2], LEAST_SPAN_S);
    show(found[2] - size, found[3] + size);
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / 800);
    else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 250), toTime(Math.max(gutter, event.offsetX)));
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
      Home: () => show(limits().begin, limits().begin + view.to - view.from), End: () => show(limits().end - view.to + view.from, limits().end),
      0: () => show(limits().begin, limits().end), n: () => neighbour(1), p: () => neighbour(-1), ArrowDown: () => lane(1), ArrowUp: () => lane(-1), Escape: () => choose(null),
    };
    const act = keys[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  });
  let pulled = null;
  strip.addEventListener("pointerdown", (event) => {
    strip.setPointerCapture(event.pointerId);
    pulled = event.offsetX;
  });
  strip.addEventListener("pointermove", (event) => {
    if (pulled === null) return;
    const [a, b] = [pulled, event.offsetX].sort((one, other) => one - other);
    if (b - a > 4) show(stripTime(a), stripTime(b));
  });
  strip.addEventListener("pointerup", (event) => {
    if (pulled !== null && Math.abs(event.offsetX - pulled) <= 4) {
      const middle = stripTime(event.offsetX);
      show(middle - (view.to - view.from) / 2, middle + (view.to - view.from) / 2);
    }
    pulled = null;
  });
  const stripTime = (x) => limits().begin + ((x - gutter) / room()) * (limits().end - limits().begin);

  function at(x, y) {
    const flag = flags.find((each) => Math.abs(each.x - x) < 8 && y < HEAD);
    if (flag) return flag;
    const near = boxes.filter((box) => x >= box.x - 2 && x <= box.x + box.width + 2 && y >= box.y && y <= box.y + box.height);
    return near.at(-1) ?? null;
  }

  function hover(event) {
    const found = at(event.offsetX, event.offsetY);
    tip.hidden = !found;
    if (!found) return;
    fill(tip, found.mark ? [h("strong", {}, found.mark.kind), ` ${found.mark.text ?? ""}`] : describe(found.span));
    const left = Math.min(event.offsetX + 14, width() - tip.offsetWidth - 4);
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${canvas.offsetTop + event.offsetY + 16}px`;
  }

  function choose(found) {
    selected = found?.span ?? null;
    draw();
    onselect(found ? (found.mark ? { mark: found.mark } : { span: found.span }) : null);
  }

  const ofProcess = (process) => data.spans.filter((span) => span[0] === process && !hiddenKinds.has(span[1])).sort((a, b) => a[2] - b[2]);

  /** Choose the next or the previous span of the same process, and bring it into the window. */
  function neighbour(step) {
    if (!data) return;
    const process = selected?.[0] ?? lanes()[0];
    const list = ofProcess(process);
    const middle = (view.from + view.to) / 2;
    const index = selected ? list.findIndex((span) => same(span, selected)) + step : list.findIndex((span) => span[3] >= middle);
    const next = list[Math.max(0, Math.min(list.length - 1, index))];
    if (next) reveal(next);
  }

  /** Choose a span of the process above or below, at about the same time. */
  function lane(step) {
    if (!data) return;
    const names = lanes();
    const index = selected ? names.indexOf(selected[0]) + step : 0;
    const time = selected ? selected[2] : (view.from + view.to) / 2;
    const list = ofProcess(names[Math.max(0, Math.min(names.length - 1, index))]);
    const next = list.reduce((best, span) => (!best || Math.abs(span[2] - time) < Math.abs(best[2] - time) ? span : best), null);
    if (next) reveal(next);
  }

  function reveal(span) {
    const size = view.to - view.from;
    if (span[2] < view.from || span[3] > view.to) show(span[2] - size / 2, span[2] + size / 2);
    choose({ span });
  }

  return {
    element, begin, show, zoom, pan, refetch, refetchWhole, lanes,
    window: () => view,
    limits,
    /** Say that the run has grown to `end` (seconds since the epoch). */
    extend(end) {
      if (overall && end > overall.end) overall.end = end;
    },
    hide(kind, isHidden) {
      if (isHidden) hiddenKinds.add(kind);
      else hiddenKinds.delete(kind);
      draw();
    },
    select: (span) => reveal(span),
    /** Save the window, and the strip of the whole run above it, as a picture. */
    save(title) {
      if (!data) return;
      const { begin } = limits();
      const after = view.from - begin < 0.001 ? "the start" : `${duration(view.from - begin)} after the start`;
      const range = `${moment(view.from)} to ${moment(view.to)}: ${duration(view.to - view.from)}, from ${after}`;
      const kinds = (data.kinds ?? []).filter((kind) => !hiddenKinds.has(kind));
      savePicture([strip, canvas], { title, note: range, legend: kinds.map((kind) => ({ label: kindOf(kind)[0], colour: tone(kindOf(kind)[1]) })) });
    },
    dispose() {
      isOver = true;
      resized.disconnect();
      document.removeEventListener("themechange", forgetColours);
    },
  };
}

const ROLES = ["controller", "rollout", "env", "trainer", "rank"];

/** Order of processes: servers, environments, trainer, ranks; within a role by number. */
function byRole(a, b) {
  const place = (name) => (ROLES.indexOf(name.split("-")[0]) + ROLES.length + 1) % (ROLES.length + 1);
  return place(a) - place(b) || a.localeCompare(b, "en", { numeric: true });
}

const same = (a, b) => a === b || (a[0] === b[0] && a[1] === b[1] && a[2] === b[2]);

/** Return what a tip says about a span. */
function describe([process, kind, start, end, version, merged, busy]) {
  const about = merged > 1 ? `${plural(merged, "span")}, busy ${percent(busy)}` : version === null || version === undefined || version < 0 ? "" : `policy version ${version}`;
  return [h("strong", {}, kindOf(kind)[0]), ` ${duration(end - start)}`, h("br"), `${process}${about ? `, ${about}` : ""}`];
}

function shortened(context, text, room) {
  let cut = text;
  while (cut.length > 3 && context.measureText(`${cut}…`).width > room && context.measureText(cut).width > room) cut = cut.slice(0, -1);
  return cut === text ? text : `${cut}…`;
}

/** Return the distance of grid lines: a round number of seconds. */
function tick(size, most) {
  const least = size / Math.max(2, most);
  const steps = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  return steps.find((step) => step >= least) ?? Math.ceil(least / 86400) * 86400;
}

/** Return the seconds since the run began, as precise as the grid. */
function since(seconds, step) {
  if (step < 1) return `${seconds.toFixed(Math.min(4, Math.ceil(-Math.log10(step))))} s`;
  return seconds < 60 ? `${Math.round(seconds)} s` : duration(seconds);
}

/**
 * Return the seconds that each process spent on each kind within a window: Map process -> Map kind -> seconds. Merged
 * spans count with their busy share.
 */
export function spent({ spans }, from, to) {
  const found = new Map();
  for (const [process, kind, start, end, , , busy] of spans) {
    const seconds = (Math.min(end, to) - Math.max(start, from)) * (busy ?? 1);
    if (seconds <= 0) continue;
    if (!found.has(process)) found.set(process, new Map());
    const kinds = found.get(process);
    kinds.set(kind, (kinds.get(kind) ?? 0) + seconds);
  }
  return new Map([...found].sort(([a], [b]) => byRole(a, b)));
}

/** Return the seconds of model compute among the kinds of a process. */
export const working = (kinds) => [...kinds].reduce((sum, [kind, seconds]) => sum + (WORK.has(kind) ? seconds : 0), 0);
