/* A histogram on a canvas: shares of a whole as bars, with a picture and a table of the same numbers. */

import { button, fill, h } from "./dom.js";
import { count, percent } from "./format.js";
import { colour, savePicture } from "./picture.js";

const HEIGHT = 190;
const [HEAD, FOOT, SIDE] = [20, 24, 8];
const WIDEST = 96; // pixels of a bar

/**
 * Return a histogram: `{element, update(data), dispose(), spec}`. `spec`: `title`, `unit`, `about`, `kind` (what a bar
 * stands for) and `counted` (what is counted), for the head of the table.
 *
 * `data`: `{bars: [{label, value, colour}], note, missing}`. `colour` is a name of the style sheet. `note` says which
 * part of the run it is. Without bars it shows `missing`.
 */
export function histogram(spec) {
  const canvas = h("canvas", { class: "histogram", role: "img", tabindex: 0, "aria-label": spec.title });
  const absent = h("div", { class: "missing" });
  const sheet = h("div", { class: "sheet scroll", tabindex: 0, role: "region", "aria-label": `Table of ${spec.title}`, hidden: true });
  const note = h("p", { class: "about" });
  const asTable = button("Table", () => {
    sheet.hidden = !sheet.hidden;
    asTable.setAttribute("aria-pressed", String(!sheet.hidden));
    show();
  }, { class: "small quiet", "aria-pressed": "false", "aria-label": `Table of ${spec.title}` });
  const asPicture = button("PNG", () => data?.bars.length && savePicture([canvas], { title: spec.title, unit: spec.unit, note: data.note }), { class: "small quiet", "aria-label": `PNG of ${spec.title}` });
  const element = h("figure", { class: "chart" },
    h("figcaption", {}, h("h3", {}, spec.title, " ", h("span", { class: "unit" }, spec.unit)), asTable, asPicture),
    canvas, absent, sheet, note, h("p", { class: "about" }, spec.about));
  let data = null;
  const redraw = () => draw();
  document.addEventListener("themechange", redraw);
  const resized = new ResizeObserver(redraw);
  resized.observe(element);

  const whole = () => Math.max(1e-12, data.bars.reduce((sum, each) => sum + each.value, 0));

  function update(next) {
    data = next;
    note.textContent = data.note ?? "";
    absent.textContent = data.missing ?? "";
    canvas.setAttribute("aria-label", `${spec.title}. ${data.bars.map((each) => `${each.label}: ${percent(each.value / whole())}`).join(", ") || data.missing}`);
    fill(sheet, h("table", {},
      h("thead", {}, h("tr", {}, [spec.kind, "share", spec.counted].map((name, index) => h("th", { scope: "col", class: index ? "num" : null }, name)))),
      h("tbody", {}, data.bars.map((each) => h("tr", {}, h("th", { scope: "row" }, each.label), h("td", { class: "num" }, percent(each.value / whole())), h("td", { class: "num" }, count(each.value)))))));
    show();
  }

  function show() {
    const isEmpty = !data?.bars.length;
    absent.hidden = !isEmpty;
    canvas.hidden = isEmpty || !sheet.hidden;
    asTable.disabled = asPicture.disabled = isEmpty;
    draw();
  }

  function draw() {
    if (!data?.bars.length || canvas.hidden || !canvas.clientWidth) return;
    const scale = devicePixelRatio || 1;
    const wide = canvas.clientWidth;
    canvas.width = Math.round(wide * scale);
    canvas.height = Math.round(HEIGHT * scale);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, wide, HEIGHT);
    context.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "center";
    const each = Math.min(WIDEST, (wide - 2 * SIDE) / data.bars.length);
    const left = SIDE + (wide - 2 * SIDE - each * data.bars.length) / 2;
    const most = Math.max(...data.bars.map((bar) => bar.value), 1e-12);
    const room = HEIGHT - HEAD - FOOT;
    for (const [index, bar] of data.bars.entries()) {
      const x = left + index * each;
      const high = Math.max(bar.value > 0 ? 1 : 0, (bar.value / most) * room);
      context.fillStyle = colour(bar.colour);
      context.fillRect(x + each * 0.12, HEAD + room - high, each * 0.76, high);
      context.fillStyle = colour("ink");
      context.fillText(percent(bar.value / whole()), x + each / 2, HEAD + room - high - 6, each);
      context.fillStyle = colour("muted");
      context.fillText(bar.label, x + each / 2, HEIGHT - 8, each);
    }
    context.strokeStyle = colour("strong-line");
    context.beginPath();
    context.moveTo(SIDE, HEAD + room + 0.5);
    context.lineTo(wide - SIDE, HEAD + room + 0.5);
    context.stroke();
  }

  function dispose() {
    resized.disconnect();
    document.removeEventListener("themechange", redraw);
  }

  return { element, update, dispose, spec };
}
