// Elements from values.
//
// Invariant: what comes from the broker always reaches the page as a text node or as the value of an attribute that is
// neither a style nor a script; markup is never parsed. A list of more than ROWS rows is never put into the page.

import { duration, number } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const HANDLERS = ["onclick", "oninput", "onchange", "onsubmit", "onpointermove", "onpointerleave"];
const KEPT = new Set(["open"]); // what the reader has opened stays open
export const ROWS = 500;
const OLD_S = 3;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (HANDLERS.includes(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
  return node;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** Return an HTML element; handlers are functions by their property's name. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return an SVG element. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Return an element that shows a number of the JSON: `data-field` and `data-value` are what the JSON says. */
export function shown(tag, field, value, text, attributes) {
  const known = value !== null && value !== undefined;
  const data = { "data-field": field, "data-value": known ? String(value) : "" };
  return h(tag, { ...data, ...attributes }, known ? (text ?? number(value)) : "–");
}

/** Make `parent` look like `fresh` and keep the nodes that are there, so that focus and reading position stay. */
export function show(parent, ...fresh) {
  const wanted = document.createElement("div");
  fill(wanted, null, fresh);
  morphChildren(parent, wanted);
}

function morph(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !KEPT.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value && !KEPT.has(name)) old.setAttribute(name, value);
  }
  for (const name of HANDLERS) {
    if (old[name] !== fresh[name]) old[name] = fresh[name];
  }
  if (!fresh.hasAttribute("data-own")) morphChildren(old, fresh); // data-own: its children are another's
}

function morphChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.children) if (child.dataset.key) keyed.set(child.dataset.key, child);
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = wanted.dataset?.key;
    const have = key ? keyed.get(key) : at;
    if (key) keyed.delete(key);
    if (!have || have.nodeName !== wanted.nodeName || have.dataset?.key !== key) {
      old.insertBefore(wanted, at);
      continue;
    }
    if (have !== at && have.contains(document.activeElement)) {
      const after = have.nextSibling; // a node that is moved loses the focus: those before it are moved instead
      while (at !== have) {
        const next = at.nextSibling;
        old.insertBefore(at, after);
        at = next;
      }
    }
    if (have === at) at = at.nextSibling;
    else old.insertBefore(have, at);
    morph(have, wanted);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** Mark a view, or take the mark away, by the age of its numbers; `late`: the seconds after which they are old. */
export function mark(view, seconds, late = OLD_S) {
  const isOld = seconds > Math.max(OLD_S, late);
  view.classList.toggle("stale", isOld);
  if (isOld) view.title = `as of ${duration(Math.round(seconds))} ago`;
  else view.removeAttribute("title");
  return view;
}

/** Return a table: `heads` are [text, class, attributes], `rows` elements; a caption names it for screen readers. */
export function table(caption, heads, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty ?? "None.");
  const head = heads.map(([text, kind, more]) => h("th", { scope: "col", class: kind, ...more }, text));
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", null, h("caption", { class: "unseen" }, caption), h("thead", null, h("tr", null, head)),
      h("tbody", null, rows.slice(0, ROWS))),
  );
}

/** Return a bar of a share 0…1 with its meaning for screen readers. */
export function bar(label, share, kind) {
  const percent = Math.round(Math.min(1, Math.max(0, share ?? 0)) * 1000) / 10;
  const role = { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent };
  const width = percent ? Math.max(percent, 1.5) : 0; // a little is not nothing
  return h("div", { class: `bar ${kind ?? ""}`, ...role },
    s("svg", { "aria-hidden": "true", preserveAspectRatio: "none" }, s("rect", { width: `${width}%`, height: "100%" })));
}
