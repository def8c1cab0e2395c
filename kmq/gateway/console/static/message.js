// Messages as a table: a row each, which opens to the line as it is stored beside what it means.

import { curl, path } from "./api.js";
import { ask, command } from "./dialog.js";
import { h } from "./dom.js";
import { LAYOUT, bytes, count, cut, decoded, moment, number, visible } from "./text.js";

const IN_ROW = 300; // characters: what a line of a screen has room for
const IN_DETAIL = 1500; // the rest is shown when asked for
const IN_DIALOG = 1 << 16;
const HEADS = [["Message"], ["Time (UTC)", "wide"], ["Key"], ["Value"], ["Size", "n wide"]];

function value(one, most) {
  if (one.value === null || one.value === undefined) return [h("p", { class: "quiet" }, "no value (a tombstone)"), 0];
  const text = one.encoding === "base64" ? one.value : decoded(one.value);
  const [shownText, rest] = cut(text, most, LAYOUT);
  return [h("pre", { class: "value" }, shownText), rest];
}

function fields(one) {
  const key = one.key === null || one.key === undefined ? h("span", { class: "quiet" }, "none") : h("code", null, cut(one.key, 300)[0]);
  const rows = [[one.key_encoding === "base64" ? "Key (base64)" : "Key", key]];
  for (const header of (one.headers ?? []).slice(0, 50)) {
    rows.push([cut(header.name, 100)[0], header.value === null ? h("span", { class: "quiet" }, "null") : h("code", null, cut(header.value, 300)[0])]);
  }
  return h("dl", null, rows.map(([name, content]) => h("div", null, h("dt", null, name), h("dd", null, content))));
}

function pair(one, most) {
  const [raw, rawRest] = cut(one.raw ?? "", most, LAYOUT);
  const [decodedValue, valueRest] = value(one, most);
  const isCut = rawRest > 0 || valueRest > 0;
  const columns = h("div", { class: "pair" },
    h("div", { class: "left" }, h("p", { class: "side" }, "Line"), h("pre", { class: "raw" }, raw, rawRest ? h("span", { class: "quiet" }, ` … ${number(rawRest)} more`) : null)),
    h("div", { class: "right" }, h("p", { class: "side" }, one.encoding === "base64" ? "Message (base64: not UTF-8)" : "Message"), fields(one), decodedValue,
      valueRest ? h("p", { class: "quiet" }, `… ${count(valueRest, "character")} more`) : null));
  return [columns, isCut];
}

function detail(topic, one, more) {
  const [columns, isCut] = pair(one, IN_DETAIL);
  const whole = () => ask({
    title: `Partition ${one.partition}, offset ${one.offset}`,
    body: [one.truncated ? h("p", { class: "warn" }, `The gateway sent the first part of ${bytes(one.bytes)}; kmq consume has all of it.`) : null, pair(one, IN_DIALOG)[0]],
    yes: "Close", no: null,
  });
  const names = { partition: one.partition, offset: one.offset, maxMessages: 1, format: "text" };
  return h("tr", { class: "whole" }, h("td", { colspan: HEADS.length },
    h("p", { class: "small" }, `seq ${one.seq ?? "–"} · `, h("time", null, moment(one.timestamp)), ` · ${bytes(one.bytes)}`, one.truncated ? h("span", { class: "warn" }, " · shortened") : null,
      isCut || one.truncated ? h("button", { type: "button", class: "small", onclick: whole, "aria-label": `All of ${one.partition}:${one.offset}` }, "All of it") : null),
    columns, command(curl(path("topics", topic, "consume"), { names })), more?.(one)));
}

function short(text, none) {
  return text === null || text === undefined ? h("span", { class: "quiet" }, none) : cut(text, IN_ROW)[0];
}

/** Return a box to tick; its label is there for screen readers. */
function box(label) {
  return h("label", { class: "tick" }, h("input", { type: "checkbox" }), h("span", { class: "unseen" }, label));
}

/**
 * Return a row of a table of messages; `more(one)`: what else an open one has; `canTick`: it begins with a box. A refresh
 * leaves open what is open, and ticked what is ticked.
 */
export function message(topic, one, more, canTick) {
  const at = `${one.partition}:${one.offset}`;
  const turn = () => {
    const isOpen = toggle.getAttribute("aria-expanded") === "true";
    toggle.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) body.lastElementChild.remove();
    else body.append(detail(topic, one, more));
  };
  const toggle = h("button", { type: "button", class: "open", "aria-expanded": "false", "aria-label": `Message ${at}`, onclick: turn }, at);
  const body = h("tbody", { class: "message", "data-key": `${at}:${one.seq}`, "data-own": true, "data-offset": String(one.offset), "data-partition": String(one.partition), "data-seq": String(one.seq ?? "") },
    h("tr", null, h("th", { scope: "row" }, canTick ? box(`Select letter ${at}`) : null, toggle), h("td", { class: "wide" }, h("time", null, moment(one.timestamp))),
      h("td", { class: "key-of" }, short(one.key, "none")), h("td", { class: "short" }, short(one.value, "no value")),
      h("td", { class: "n wide" }, bytes(one.bytes))));
  return body;
}

/** Return a table of messages; `all`: the label of a box that ticks all rows. */
export function messages(label, rows = [], all) {
  return h("table", { class: "messages" }, h("caption", { class: "unseen" }, label),
    h("thead", null, h("tr", null, HEADS.map(([text, kind], column) => h("th", { scope: "col", class: kind }, all && !column ? box(all) : null, text)))), rows);
}

/** Return a short list of messages to tick: the examples of a dead letter's reason. */
export function examples(topic, reason, all, more) {
  return messages(`Examples: ${visible(all.length)}`, all.map((one) => message(topic, one, more, true)), `Select all shown: ${reason}`);
}
