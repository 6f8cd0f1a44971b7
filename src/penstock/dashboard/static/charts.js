/* Charts of series over steps or time, drawn by uPlot: title, unit, legend that toggles, values under the pointer of
 * all charts at once, picture, and a table of the same numbers. */

import { button, fill, h, svg } from "./dom.js";
import { clock, moment, number } from "./format.js";
import { colour, savePicture } from "./picture.js";

const HEIGHT = 190;
const TABLE_ROWS = 60;
const SPARSE = 0.5; // share of known values below which they are drawn as points
const sync = window.uPlot.sync("charts");

const isKnown = (value) => value !== null && value !== undefined;

function faded(hex, share) {
  return `${hex}${Math.round(255 * share).toString(16).padStart(2, "0")}`;
}

/**
 * Return a chart: `{element, update(data), dispose()}`.
 *
 * `spec`: `title`, `unit`, `about` (one sentence that explains it), `series`: list of `{name, label, colour,
 * axis ("left" or "right"), band, points, steps, dash, width, hidden, decimals}`, `right`: unit of the right axis,
 * `zero`: whether the axis begins at zero, `range`: fixed [low, high], `wide`, `log`.
 * `data`: `{x, times, series: {name: {mean, min, max}}, lines: [{value, label, colour}], marks: [{x, label}], byTime}`;
 * a series without data is left out, and the chart says so if none has any.
 * `onrange(from, to)` hears of a chosen range of x, with nulls when it is taken back.
 */
export function chart(spec, { onrange } = {}) {
  const plotBox = h("div", { class: "plot", role: "img", tabindex: 0, "aria-label": `${spec.title}. No data yet.`, onkeydown: step });
  const legend = h("div", { class: "legend", role: "group", "aria-label": `Series of ${spec.title}` });
  const sheet = h("div", { class: "sheet scroll", tabindex: 0, role: "region", "aria-label": `Table of ${spec.title}`, hidden: true });
  const place = h("span", { class: "unit num" });
  const asTable = button("Table", () => {
    sheet.hidden = !sheet.hidden;
    plotBox.hidden = !sheet.hidden;
    asTable.setAttribute("aria-pressed", String(!sheet.hidden));
    if (!sheet.hidden) drawTable();
    else draw();
  }, { class: "small quiet", "aria-pressed": "false", "aria-label": `Table of ${spec.title}` });
  const asPicture = button("PNG", () => save(), { class: "small quiet", "aria-label": `PNG of ${spec.title}` });
  const element = h("figure", { class: `chart${spec.wide ? " wide" : ""}` },
    h("figcaption", {}, h("h3", {}, spec.title, " ", h("span", { class: "unit" }, spec.unit ?? ""), place), asTable, asPicture),
    plotBox, sheet, legend, spec.about ? h("p", { class: "about" }, spec.about) : null);

  const hidden = new Set(spec.series.filter((each) => each.hidden).map((each) => each.name));
  let data = null;
  let shown = [];
  let plot = null;
  let outputs = new Map();
  const resized = new ResizeObserver(() => {
    if (plot && plotBox.clientWidth && plotBox.clientWidth !== plot.width) plot.setSize({ width: plotBox.clientWidth, height: HEIGHT });
    else if (!plot && data) draw();
  });
  resized.observe(plotBox);
  document.addEventListener("themechange", redraw);

  function redraw() {
    const had = data;
    destroyPlot();
    data = null;
    if (had) update(had);
  }

  function destroyPlot() {
    if (plot) sync.unsub(plot);
    plot?.destroy();
    plot = null;
  }

  function update(next) {
    data = next;
    const now = spec.series.filter((each) => next.series[each.name]?.mean.some(isKnown));
    const isSame = plot && now.length === shown.length && now.every((each, index) => each.name === shown[index].name) && plot.byTime === Boolean(next.byTime);
    shown = now;
    if (!isSame) {
      destroyPlot();
      drawLegend();
    }
    draw();
    if (!sheet.hidden) drawTable();
    summarize();
  }

  function drawLegend() {
    outputs = new Map();
    fill(legend, shown.map((each) => {
      const output = h("output", { "aria-live": "off" });
      outputs.set(each.name, output);
      return button("", (event) => {
        const isOn = hidden.delete(each.name);
        if (!isOn) hidden.add(each.name);
        event.currentTarget.setAttribute("aria-pressed", String(isOn));
        show();
      }, { "aria-pressed": String(!hidden.has(each.name)), icon: [swatch(each), each.label, output], "aria-label": null, title: null });
    }));
    legend.hidden = !shown.length;
  }

  function swatch(each) {
    const dash = each.dash ? each.dash.join(" ") : null;
    return svg("svg", { viewBox: "0 0 20 10", "aria-hidden": "true" },
      each.points
        ? svg("circle", { cx: 10, cy: 5, r: 4, style: { fill: `var(--${each.colour})` } })
        : svg("line", { x1: 0, x2: 20, y1: 5, y2: 5, "stroke-width": 3, "stroke-dasharray": dash, style: { stroke: `var(--${each.colour})` } }));
  }

  function show() {
    if (!plot) return;
    for (const [index, each] of plot.meaning.entries()) {
      if (each) plot.setSeries(index, { show: !hidden.has(each.name) }, false);
    }
  }

  /** The columns of the plot: x, and per series the mean, with the band's edges if it has one. */
  function columns() {
    const x = data.byTime ? data.times : data.x;
    const all = [x];
    for (const each of shown) {
      const values = data.series[each.name];
      all.push(values.mean);
      if (hasBand(each, values)) all.push(values.max, values.min);
    }
    return all;
  }

  function hasBand(each, values) {
    return each.band && values.max && values.max.some((high, index) => high !== null && high !== values.min[index]);
  }

  function draw() {
    if (!data || plotBox.hidden) return;
    if (!shown.length || !data.x.length) {
      destroyPlot();
      fill(plotBox, h("div", { class: "missing" }, spec.missing ?? "Nothing was recorded for this yet."));
      return;
    }
    const width = plotBox.clientWidth;
    if (!width) return;
    const values = columns();
    if (plot && plot.num === values.length) {
      plot.facts = data;
      plot.setData(values, true);
      rest();
      return;
    }
    destroyPlot();
    plotBox.replaceChildren();
    plot = new window.uPlot(options(width), values, plotBox);
    plot.num = values.length;
    rest();
  }

  function options(width) {
    const [ink, grid] = [colour("muted"), colour("grid")];
    const font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 }, font, gap: 4 };
    const bands = [];
    const series = [{}];
    const meaning = [null];
    const hasRight = shown.some((each) => each.axis === "right");
    for (const each of shown) {
      const stroke = colour(each.colour);
      const scale = each.axis === "right" ? "right" : "y";
      const values = data.series[each.name].mean;
      const isSparse = values.filter(isKnown).length < SPARSE * values.length; // measured now and then: join the points
      const paths = each.steps ? window.uPlot.paths.stepped({ align: 1 }) : undefined;
      series.push({
        scale, stroke, paths, label: each.label, width: each.width ?? 1.75, dash: each.dash ?? undefined, show: !hidden.has(each.name),
        spanGaps: Boolean(each.spans) || isSparse,
        points: each.points ? { show: true, size: 9, fill: stroke, stroke: colour("surface"), width: 1.5 } : { show: data.x.length < 2 || isSparse, size: 5, fill: stroke },
      });
      meaning.push(each);
      if (hasBand(each, data.series[each.name])) {
        const edge = { scale, stroke: "transparent", width: 0, points: { show: false }, show: !hidden.has(each.name) };
        series.push({ ...edge }, { ...edge });
        meaning.push(each, each);
        bands.push({ series: [series.length - 2, series.length - 1], fill: faded(stroke, 0.17) });
      }
    }
    const labels = (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick)));
    const size = (self, ticks, index, cycle) => {
      if (cycle > 1) return self.axes[index]._size;
      const longest = (ticks ?? []).reduce((most, text) => Math.max(most, text.length), 2);
      return Math.min(76, 12 + 6.6 * longest);
    };
    return {
      width, height: HEIGHT, series, bands, legend: { show: false }, padding: [10, hasRight ? 4 : 12, 0, 0],
      scales: {
        x: { time: Boolean(data.byTime), range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: spec.log ? 3 : 1, range: spec.log ? undefined : range(spec.range) },
        ...(hasRight ? { right: { range: range(null) } } : {}),
      },
      axes: [
        { ...axis, size: 24, ...(data.byTime ? {} : { values: labels, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] }) },
        { ...axis, scale: "y", values: labels, size, space: 28 },
        ...(hasRight ? [{ ...axis, scale: "right", side: 1, values: labels, size, space: 28, grid: { show: false } }] : []),
      ],
      cursor: {
        y: false,
        sync: { key: "charts", setSeries: false, scales: ["x", null] },
        points: { size: 7, fill: (self, index) => self.series[index].stroke(self, index) },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => { onrange?.(null, null); return null; } },
      },
      hooks: {
        setCursor: [(self) => read(self, self.cursor.idx)],
        setSelect: [(self) => {
          if (self.select.width < 6) return;
          const from = self.posToVal(self.select.left, "x");
          const to = self.posToVal(self.select.left + self.select.width, "x");
          self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          onrange?.(from, to);
        }],
        drawClear: [drawMarks],
        draw: [drawLines],
        init: [(self) => {
          self.meaning = meaning;
          self.byTime = Boolean(data.byTime);
          self.facts = data;
          self.over.addEventListener("mouseleave", rest);
        }],
      },
    };
  }

  /** The range of an axis: what is shown, its horizontal lines, and a little air. */
  function range(fixed) {
    return (self, low, high, scale) => {
      if (fixed) return fixed;
      for (const line of data?.lines ?? []) {
        if ((line.axis === "right" ? "right" : "y") !== scale || !Number.isFinite(line.value) || line.quiet) continue;
        low = Math.min(low ?? line.value, line.value);
        high = Math.max(high ?? line.value, line.value);
      }
      if (low === null || low === undefined || !Number.isFinite(low)) return [0, 1];
      if (spec.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
      if (low === 0 && high === 0) return [0, 1];
      const air = (high - low || Math.abs(high) || 1) * 0.07;
      return [spec.zero && low === 0 ? 0 : low - air, high + air];
    };
  }

  function drawMarks(self) {
    const context = self.ctx;
    context.save();
    context.strokeStyle = colour("strong-line");
    context.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    context.lineWidth = devicePixelRatio;
    for (const mark of self.facts?.marks ?? []) {
      const x = Math.round(self.valToPos(mark.x, "x", true));
      if (x < self.bbox.left || x > self.bbox.left + self.bbox.width) continue;
      context.beginPath();
      context.moveTo(x, self.bbox.top);
      context.lineTo(x, self.bbox.top + self.bbox.height);
      context.stroke();
    }
    context.restore();
  }

  function drawLines(self) {
    const context = self.ctx;
    const { left, top, width, height } = self.bbox;
    context.save();
    context.font = `${11 * devicePixelRatio}px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "right";
    for (const line of self.facts?.lines ?? []) {
      const scale = line.axis === "right" ? "right" : "y";
      if (!Number.isFinite(line.value) || !self.scales[scale]) continue;
      const y = Math.round(self.valToPos(line.value, scale, true));
      if (y < top || y > top + height) continue;
      context.strokeStyle = context.fillStyle = colour(line.colour);
      context.lineWidth = devicePixelRatio;
      context.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + width, y);
      context.stroke();
      context.textBaseline = y - top < 16 * devicePixelRatio ? "top" : "bottom";
      context.fillText(line.label, left + width - 4 * devicePixelRatio, y + (context.textBaseline === "top" ? 3 : -3) * devicePixelRatio);
    }
    context.restore();
  }

  /** Show the values under the pointer in the legend. */
  function read(self, index) {
    if (index === null || index === undefined) {
      rest();
      return;
    }
    for (const each of shown) outputs.get(each.name).textContent = number(data.series[each.name].mean[index]);
    place.textContent = data.byTime ? ` · ${clock(data.times[index])}` : ` · at ${number(data.x[index])}`;
  }

  /** Show the last values in the legend. */
  function rest() {
    place.textContent = "";
    for (const each of shown) {
      const output = outputs.get(each.name);
      if (output) output.textContent = number(last(data.series[each.name].mean));
    }
  }

  let at = null; // the point that the keyboard has reached

  /** Move the pointer of the chart by the keyboard: the legend shows the values there. */
  function step(event) {
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const num = data.x.length;
    const by = event.shiftKey ? Math.max(1, Math.round(num / 20)) : 1;
    const places = { ArrowLeft: (at ?? num) - by, ArrowRight: (at ?? -1) + by, Home: 0, End: num - 1 };
    if (event.key === "Escape") {
      onrange?.(null, null);
      return;
    }
    if (!(event.key in places)) return;
    event.preventDefault();
    at = Math.max(0, Math.min(num - 1, places[event.key]));
    plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: plot.over.clientHeight / 2 });
  }

  function summarize() {
    const parts = shown.map((each) => {
      const values = data.series[each.name].mean.filter(isKnown);
      return `${each.label}: from ${number(values[0])} to ${number(values.at(-1))}, lowest ${number(Math.min(...values))}, highest ${number(Math.max(...values))}`;
    });
    plotBox.setAttribute("aria-label", `${spec.title}. ${parts.join(". ") || "No data yet"}.`);
  }

  function drawTable() {
    if (!data) return;
    const num = data.x.length;
    const every = Math.max(1, Math.ceil(num / TABLE_ROWS));
    const rows = [];
    for (let index = num - 1; index >= 0; index -= every) {
      rows.push(h("tr", {}, h("th", { scope: "row", class: "num" }, number(data.x[index])), h("td", { class: "num" }, clock(data.times?.[index])),
        shown.map((each) => h("td", { class: "num" }, number(data.series[each.name].mean[index])))));
    }
    fill(sheet, h("table", { class: "sticky" },
      h("caption", {}, every > 1 ? `Each ${every}th of ${num} points, the newest first` : `${num} points, the newest first`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "num" }, "step"), h("th", { scope: "col", class: "num" }, "time"), shown.map((each) => h("th", { scope: "col", class: "num" }, each.label)))),
      h("tbody", {}, rows)));
  }

  /** Save the plot with its title and legend as a picture. */
  function save() {
    if (!plot) return;
    const legend = shown.filter((one) => !hidden.has(one.name)).map((each) => ({ label: each.label, colour: colour(each.colour) }));
    savePicture([plot.ctx.canvas], { title: spec.title, unit: spec.unit, note: rangeNote(), legend });
  }

  /** Return the range of x that is on show. */
  function rangeNote() {
    const [from, to] = [data.x[0], data.x.at(-1)];
    const steps = `steps ${number(from)} to ${number(to)}`;
    return data.times?.length ? `${steps}, ${moment(data.times[0])} to ${moment(data.times.at(-1))}` : "";
  }

  function dispose() {
    resized.disconnect();
    document.removeEventListener("themechange", redraw);
    destroyPlot();
  }

  return { element, update, dispose, spec };
}

/** Return the last known value of a list, or null. */
export function last(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) {
    if (isKnown(values[index])) return values[index];
  }
  return null;
}

/** Return the running mean of a list over about a twentieth of it; unknown values stay unknown. */
export function smooth(values) {
  const half = Math.max(1, Math.floor(values.length / 40));
  const sums = [0];
  const counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (isKnown(value) ? value : 0));
    counts.push(counts.at(-1) + (isKnown(value) ? 1 : 0));
  }
  return values.map((value, index) => {
    if (!isKnown(value)) return null;
    const [from, to] = [Math.max(0, index - half), Math.min(values.length, index + half + 1)];
    return (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

/** Return series data with points at other x: `{x, times, series}` and `[{x, time, name: value…}]` of equal names. */
export function withPoints({ x, times, series }, points, names) {
  const index = new Map(x.map((value, place) => [value, place]));
  const extra = points.filter((point) => !index.has(point.x));
  const order = [...x.map((value, place) => ({ x: value, place })), ...extra.map((point) => ({ x: point.x, point }))].sort((a, b) => a.x - b.x);
  const picked = (values) => order.map((each) => (each.point ? null : values?.[each.place] ?? null));
  const merged = Object.fromEntries(Object.entries(series).map(([name, values]) => [name, Object.fromEntries(Object.entries(values).map(([kind, list]) => [kind, picked(list)]))]));
  const byX = new Map(points.map((point) => [point.x, point]));
  for (const name of names) merged[name] = { mean: order.map((each) => byX.get(each.x)?.[name] ?? null) };
  return { x: order.map((each) => each.x), times: order.map((each) => (each.point ? each.point.time : times[each.place])), series: merged };
}
