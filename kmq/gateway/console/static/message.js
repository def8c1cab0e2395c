// One message: the line as it is stored beside what it means.

import { ask } from "./dialog.js";
import { h } from "./dom.js";
import { bytes, cut, decoded, moment, number, visible } from "./text.js";

const IN_ROW = 1500; // characters of a row; the rest is shown when asked for
const IN_DIALOG = 1 << 16;

function value(one, most) {
  if (one.value === null || one.value === undefined) return [h("p", { class: "quiet" }, "no value (a tombstone)"), 0];
  const text = one.encoding === "base64" ? one.value : decoded(one.value);
  const [shownText, rest] = cut(text, most);
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
  const [raw, rawRest] = cut(one.raw ?? "", most);
  const [decodedValue, valueRest] = value(one, most);
  const isCut = rawRest > 0 || valueRest > 0;
  const columns = h("div", { class: "pair" },
    h("div", { class: "left" }, h("p", { class: "side" }, "Line"), h("pre", { class: "raw" }, raw, rawRest ? h("span", { class: "quiet" }, ` … ${number(rawRest)} more`) : null)),
    h("div", { class: "right" }, h("p", { class: "side" }, one.encoding === "base64" ? "Message (base64: not UTF-8)" : "Message"), fields(one), decodedValue,
      valueRest ? h("p", { class: "quiet" }, `… ${number(valueRest)} characters more`) : null));
  return [columns, isCut];
}

/** Return a row of the list of messages. */
export function message(one) {
  const [columns, isCut] = pair(one, IN_ROW);
  const whole = () => ask({
    title: `Partition ${one.partition}, offset ${one.offset}`,
    body: [one.truncated ? h("p", { class: "warn" }, `The gateway sent the first part of ${bytes(one.bytes)}; kmq consume has all of it.`) : null, pair(one, IN_DIALOG)[0]],
    yes: "Close", no: null,
  });
  return h("li", { class: "message", "data-offset": String(one.offset), "data-partition": String(one.partition), "data-seq": String(one.seq ?? "") },
    h("p", { class: "head" }, h("b", null, `${one.partition}:${one.offset}`), ` seq ${one.seq ?? "–"} · `,
      h("time", null, moment(one.timestamp)), ` · ${bytes(one.bytes)}`, one.truncated ? h("span", { class: "warn" }, " · shortened") : null,
      isCut || one.truncated ? h("button", { type: "button", class: "small", onclick: whole, "aria-label": `All of ${one.partition}:${one.offset}` }, "All of it") : null),
    columns);
}

/** Return a short list of messages, say the examples of a dead letter's reason. */
export function examples(all) {
  return h("ol", { class: "messages", "aria-label": `Examples: ${visible(all.length)}` }, all.map((one) => message(one)));
}
