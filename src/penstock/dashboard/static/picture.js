/* Pictures of what is on show: canvases below each other with a title above and a legend below, as a PNG file. */

import { h } from "./dom.js";

const [MARGIN, ROW] = [10, 18]; // pixels of the style sheet

/** Return the value of a colour of the style sheet, such as `s1`. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/**
 * Save canvases as a picture. `title` stands above them, `unit` beside it in brackets, `note` below it: a range of
 * time, for example. `legend`: `[{label, colour}]` with colours as a canvas takes them. `name`: the file, without its
 * ending; by default it follows from the title.
 */
export function savePicture(canvases, { title, unit = "", note = "", legend = [], name = title }) {
  const scale = devicePixelRatio || 1;
  const family = getComputedStyle(document.body).fontFamily;
  const small = `${11 * scale}px ${family}`;
  const width = Math.max(...canvases.map((each) => each.width));
  const { places, rows } = placed(legend, width, scale, small);
  const head = (note ? 44 : 28) * scale;
  const inner = canvases.reduce((sum, each) => sum + each.height, 0);
  const canvas = h("canvas", { width, height: Math.ceil(head + inner + (rows * ROW + 6) * scale) });
  const context = canvas.getContext("2d");
  const room = width - 2 * MARGIN * scale;
  context.fillStyle = colour("surface");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = colour("ink");
  context.font = `600 ${13 * scale}px ${family}`;
  context.fillText(unit ? `${title}  (${unit})` : title, MARGIN * scale, 19 * scale, room);
  context.font = small;
  context.fillStyle = colour("muted");
  if (note) context.fillText(note, MARGIN * scale, 36 * scale, room);
  let y = head;
  for (const each of canvases) {
    context.drawImage(each, 0, y);
    y += each.height;
  }
  for (const each of places) {
    context.fillStyle = each.colour;
    context.fillRect(each.x, y + (each.row * ROW + 5) * scale, 14 * scale, 8 * scale);
    context.fillStyle = colour("ink");
    context.fillText(each.label, each.x + 19 * scale, y + (each.row * ROW + 13) * scale);
  }
  canvas.toBlob((blob) => {
    const url = URL.createObjectURL(blob);
    h("a", { href: url, download: `${name.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "")}.png` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });
}

/** Return where the entries of a legend stand, in as many rows as the width needs. */
function placed(legend, width, scale, font) {
  const context = h("canvas").getContext("2d");
  context.font = font;
  const places = [];
  let [x, row] = [MARGIN * scale, 0];
  for (const each of legend) {
    const wide = 34 * scale + context.measureText(each.label).width;
    if (x + wide > width && x > MARGIN * scale) [x, row] = [MARGIN * scale, row + 1];
    places.push({ ...each, x, row });
    x += wide;
  }
  return { places, rows: legend.length ? row + 1 : 0 };
}
