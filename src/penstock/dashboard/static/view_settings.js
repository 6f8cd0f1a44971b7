/* All settings of a run: those that differ from the defaults first, and those that the scheduler has changed since. */

import { append, empty, fill, h } from "./dom.js";
import { ago, plural, setting } from "./format.js";

/** Show the settings of a run. */
export async function show(root, { run, api, live }) {
  const [{ settings }, first] = await Promise.all([api.get(["runs", run, "settings"]), api.get(["runs", run, "status"]).catch(() => ({}))]);
  let tuned = first.tuned ?? {};
  const search = h("input", { type: "search", placeholder: "name, value or meaning", "aria-label": "Filter the settings", oninput: () => draw() });
  const only = h("input", { type: "checkbox", onchange: () => draw() });
  const said = h("span", { class: "muted", role: "status" });
  const box = h("div", { class: "section" });
  append(root, [h("div", { class: "tools" }, search, h("label", {}, only, "only what differs from the defaults"), said), box]);

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = settings.filter((each) => (!only.checked || !each.is_default || each.name in tuned) && words.every((word) => `${each.name} ${setting(each.value)} ${each.about ?? ""}`.toLowerCase().includes(word)));
    const differs = found.filter((each) => !each.is_default || each.name in tuned);
    const same = found.filter((each) => each.is_default && !(each.name in tuned));
    said.textContent = `${plural(found.length, "setting")}, ${differs.length} differ`;
    fill(box, found.length ? null : empty("No setting has these words"),
      differs.length ? group("Differs from the defaults", differs, tuned, true) : null,
      same.length ? group("Defaults", same, tuned, false) : null);
  }

  draw();
  live.on("status", (status) => {
    if (JSON.stringify(status.tuned ?? {}) === JSON.stringify(tuned)) return;
    tuned = status.tuned ?? {};
    draw();
  });
}

function group(title, settings, tuned, hasDefault) {
  return h("section", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": title }, h("h2", {}, title), h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), h("th", { scope: "col" }, "value"), hasDefault ? h("th", { scope: "col" }, "default") : null, h("th", { scope: "col" }, "meaning"))),
    h("tbody", {}, settings.map((each) => h("tr", {},
      h("th", { scope: "row", class: "mono" }, each.name),
      h("td", { class: "mono break" }, each.is_default ? setting(each.value) : h("strong", {}, setting(each.value)), tuned[each.name] ? inForce(tuned[each.name]) : null),
      hasDefault ? h("td", { class: "mono break muted" }, each.is_default ? "same" : setting(each.default)) : null,
      h("td", { class: "break" }, each.about ?? ""))))));
}

function inForce(change) {
  return h("div", {}, h("span", { class: "pill calm" }, `in force: ${setting(change.value)}`), h("span", { class: "muted" }, ` since version ${change.policy_version}, ${ago(change.time)}: ${change.reason}`));
}
