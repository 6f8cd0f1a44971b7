/* What was predicted of a run beside what it has measured. */

import { empty, h } from "./dom.js";
import { NONE, bytes, count, duration, moment, number, percent, plural } from "./format.js";

const CLOSE = 0.1; // a measured figure that differs by less is as predicted

/** Figures: [name, label, how it is written]. */
const FIGURES = [
  ["step_s", "step time", duration],
  ["samples_per_s", "trained answers/s", number],
  ["trainer_busy", "trainer busy", percent],
  ["servers_busy", "servers busy", percent],
  ["staleness_mean", "staleness, mean", number],
  ["response_tokens", "answer length, mean", count],
];

/** Return a table of predicted and measured figures, with their ratios in words. `label`: its name for screen readers. */
export function predictionTable(predicted, measured, label) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, h("table", {},
    h("thead", {}, h("tr", {}, ["", "predicted", "measured", "ratio"].map((name, index) => h("th", { scope: "col", class: index ? "num" : null }, name || h("span", { class: "hidden" }, "figure"))))),
    h("tbody", {}, FIGURES.map(([name, title, write]) => {
      const [before, after] = [predicted?.[name], measured?.[name]];
      return h("tr", {}, h("th", { scope: "row" }, title), h("td", { class: "num" }, write(before)), h("td", { class: "num" }, write(after)), h("td", { class: "ratio" }, ratio(before, after)));
    }))));
}

/** Return how a measured figure relates to its prediction, in words. */
export function ratio(predicted, measured) {
  if (typeof predicted !== "number" || typeof measured !== "number" || predicted <= 0) return NONE;
  const share = measured / predicted;
  return `${number(Number(share.toPrecision(3)))}${Math.abs(share - 1) < CLOSE ? ", as predicted" : share > 1 ? ", more" : ", less"}`;
}

/** Return the panel of a run that keeps a prediction: where it comes from, the figures, and the memory. `processes`: those
 * of the run, with their devices. */
export function predictionPanel({ prediction, measured }, processes) {
  const { memory } = prediction;
  const hasFigures = Object.values(prediction.figures).some((value) => value !== null);
  return [
    h("header", {}, h("h2", {}, "Prediction and reality"), h("p", { class: "muted" }, sourceOf(prediction), hasFigures ? " The ratio is measured / predicted. Measured figures leave out the first tenth of the steps." : "")),
    hasFigures ? (measured ? null : h("p", { class: "muted" }, "Measured figures come after the first steps.")) : null,
    hasFigures ? predictionTable(prediction.figures, measured, "Predicted and measured figures") : null,
    memory.length ? h("p", { class: "muted" }, "Memory that was counted before the start: ", memory.map((each) => `${each.who}${each.count > 1 ? ` (each of ${each.count})` : ""} ${bytes(each.bytes)}`).join(", "), `. ${heldBy(processes)}`) : null,
  ];
}

/** Return what the devices of processes held, as a sentence. */
function heldBy(processes) {
  const most = new Map();
  for (const each of processes.flatMap((process) => process.devices ?? [])) {
    const before = most.get(each.number);
    if (!before || each.used_bytes > before.used_bytes) most.set(each.number, each);
  }
  if (!most.size) return "What the devices held is not recorded.";
  const held = [...most].map(([place, each]) => `device ${place} held ${bytes(each.used_bytes)} of ${bytes(each.total_bytes)}`);
  return `When the processes were ready, ${held.join(", ")}; later peaks are not recorded.`;
}

/** Return where a prediction comes from, as a sentence. */
function sourceOf({ by, about, time }) {
  if (!by) return "The memory was counted when the run began.";
  return `By ${by}${about ? ` (${about})` : ""}${time ? `, ${moment(time).slice(0, 16)}` : ""}.`;
}

/** Return the panel of a comparison: each real run against its own plan, or against a simulated run beside it. */
export function predictionsOf(all) {
  const real = all.filter(({ status }) => !status.simulated);
  const simulated = all.filter(({ status }) => status.simulated);
  const pairs = real.flatMap((run) => {
    const models = simulated.filter(({ status }) => status.simulated.fitted_to === run.id);
    const used = models.length ? models : simulated;
    const own = run.forecast?.prediction && Object.values(run.forecast.prediction.figures).some((value) => value !== null) ? [{ run, about: sourceOf(run.forecast.prediction), predicted: run.forecast.prediction.figures }] : [];
    return [...own, ...used.map((model) => ({ run, about: `Against the simulated run ${model.id}${model.status.simulated.fitted_to === run.id ? ", which was fitted to it" : ""}.`, predicted: model.forecast?.measured }))];
  });
  if (!real.length) return h("p", { class: "muted" }, `${plural(all.length, "run")}, all simulated: add the real run to see how far the prediction is off.`);
  if (!pairs.length) return empty("These runs keep no prediction", "A run that begins from the configuration of a plan (penstock plan CONFIG --accelerators N) keeps what the plan predicted. For a run that has ended, penstock simulate --calibrate RUN makes a simulated run to compare it with.");
  return pairs.map(({ run, about, predicted }) => h("div", { class: "section" }, h("p", {}, h("span", { class: "mono" }, run.id), " ", h("span", { class: "muted" }, about)), predictionTable(predicted, run.forecast?.measured, `Predicted and measured figures of ${run.id}: ${about}`)));
}
