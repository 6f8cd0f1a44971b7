/* Elements without markup: every string that comes from a run becomes a text node. */

const SVG = "http://www.w3.org/2000/svg";
const heard = new WeakSet(); // elements with listeners

/**
 * Return a new element. `attributes`: `class`, `dataset: {}`, `style: {}` (set by script, as the content policy
 * allows), `onclick` and other listeners as functions, and any other attribute; `false`, `null` and `undefined` leave
 * one out, `true` writes it without a value. `children`: nodes, strings and numbers as text, arrays of these; `null`,
 * `undefined` and `false` are left out.
 */
export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Return a new SVG element, with the arguments of `h`. */
export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "style") setStyle(element, value);
    else if (name.startsWith("on")) {
      if (typeof value !== "function") throw new TypeError(`${name} of ${element.tagName} is no function`);
      element.addEventListener(name.slice(2), value);
      heard.add(element);
    } else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function setStyle(element, rules) {
  for (const [name, value] of Object.entries(rules)) element.style.setProperty(name, String(value));
}

/** Append children as `h` takes them. */
export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replace all that an element holds. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/**
 * Make an element hold `children`, and keep what is there already: focus, selection, scroll and open details survive
 * an update. Elements with listeners are kept only if they are equal, because a listener may know what has changed.
 */
export function refresh(element, ...children) {
  const next = h(element.tagName, {}, children);
  adopt(element, next);
  return element;
}

function adopt(before, next) {
  const [olds, news] = [[...before.childNodes], [...next.childNodes]];
  for (const [index, child] of news.entries()) {
    const old = olds[index];
    if (!old) before.append(child);
    else if (old.isEqualNode(child)) continue;
    else if (old.nodeType === Node.TEXT_NODE && child.nodeType === Node.TEXT_NODE) old.data = child.data;
    else if (old.nodeName === child.nodeName && old instanceof Element && !heard.has(old) && !heard.has(child)) {
      for (const { name } of [...old.attributes]) if (name !== "open" && !child.hasAttribute(name)) old.removeAttribute(name);
      for (const { name, value } of child.attributes) if (old.getAttribute(name) !== value && name !== "style") old.setAttribute(name, value);
      if (child.hasAttribute("style")) old.style.cssText = child.style.cssText;
      adopt(old, child);
    } else old.replaceWith(child);
  }
  for (const old of olds.slice(news.length)) old.remove();
}

/** Return a button; `label` is its text, or its accessible name if `icon` is shown instead. */
export function button(label, onclick, { icon, ...attributes } = {}) {
  const named = icon ? { "aria-label": label, title: label } : {};
  return h("button", { type: "button", ...named, ...attributes, onclick }, icon ?? label);
}

/** Return a box that says what is missing and when it will come. */
export function empty(title, ...about) {
  return h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, ...about));
}

/** Return a command to type, with a button that copies it. */
export function command(text, purpose) {
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // without the right to write: select it
      copy.textContent = "Selected";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  }, { class: "small quiet", "aria-label": `Copy ${text}` });
  const code = h("code", {}, text);
  return h("li", { class: "command" }, code, copy, purpose ? h("span", { class: "muted" }, purpose) : null);
}

/** Return a function that calls `action` after `wait_ms` without another call. */
export function debounced(action, wait_ms) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), wait_ms);
  };
}
