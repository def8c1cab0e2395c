// Charts of one hour, as SVG. A value that is not known is a gap, never a zero.

import { h, s } from "./dom.js";
import { clock } from "./text.js";

const WIDTH = 600;
const HEIGHT = 120;

function top(values) {
  const most = Math.max(0, ...values);
  if (!most) return 1;
  const step = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * step).find((limit) => limit >= most * 0.999) ?? most;
}

/** Return path data of a series; runs of unknown values are left out, a single value is a dot. */
export function line(values, most) {
  const x = (index) => ((index / Math.max(1, values.length - 1)) * WIDTH).toFixed(1);
  const y = (value) => (HEIGHT - (Math.min(value, most) / most) * HEIGHT).toFixed(1);
  let text = "";
  let isDrawing = false;
  values.forEach((value, index) => {
    if (value === null || value === undefined) {
      isDrawing = false;
      return;
    }
    text += `${isDrawing ? "L" : "M"}${x(index)} ${y(value)}`;
    if (!isDrawing && (values[index + 1] ?? null) === null) text += "h0.1";
    isDrawing = true;
  });
  return text;
}

/**
 * Return a chart. `series`: [{name, values, kind}], equally long; `say(value)` writes a value.
 * `from` and `step` are unix seconds; `ceiling`: the highest value of the axis, if it is fixed.
 */
export function chart({ title, series, from, step, say, ceiling }) {
  const known = series.map((one) => one.values.filter((value) => value !== null && value !== undefined));
  const most = ceiling ?? top(known.flat());
  const length = series[0]?.values.length ?? 0;
  const until = from + step * Math.max(0, length - 1);
  const words = series.map((one, index) => {
    const now = one.values.at(-1);
    const highest = known[index].length ? say(Math.max(...known[index])) : "–";
    return { kind: one.kind, name: one.name, now: now === null || now === undefined ? "–" : say(now), highest };
  });
  const label = `${title}: ${words.map((word) => `${word.name} now ${word.now}, highest ${word.highest}`).join("; ")}`;
  const caption = h("figcaption", null, h("strong", null, title), " ",
    words.map((word) => h("span", { class: `key ${word.kind}` }, `${word.name} `, h("b", null, word.now), h("small", null, ` max ${word.highest}`), " ")));
  const shade = known[0]?.length && series.length === 1 ? area(series[0].values, most) : null;
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    [0, 0.5, 1].map((part) => s("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part })),
    shade ? s("path", { class: `area ${series[0].kind}`, d: shade }) : null,
    series.map((one) => s("path", { class: `line ${one.kind}`, d: line(one.values, most) })));
  const axis = h("div", { class: "y", "aria-hidden": "true" }, marks(most, say, ceiling !== undefined || known.flat().length > 0));
  const times = h("div", { class: "x", "aria-hidden": "true" }, h("span", null, clock(from)), h("span", null, clock(until)));
  return h("figure", { class: "chart", "data-key": title }, caption, h("div", { class: "plot" }, axis, svg), times);
}

/** Return the labels of the axis: none if no value is known, and the one in the middle only if it says another number. */
function marks(most, say, isKnown) {
  const [high, middle, low] = isKnown ? [most, most / 2, 0].map(say) : ["", "", ""];
  return [high, middle === high || middle === low ? "" : middle, low].map((text) => h("span", null, text));
}

function area(values, most) {
  const runs = line(values, most).split("M").filter(Boolean);
  return runs.map((run) => {
    const points = run.replace(/h0\.1/g, "").split("L");
    const [first] = points[0].split(" ");
    const [last] = points.at(-1).split(" ");
    return `M${first} ${HEIGHT}L${points.join("L")}L${last} ${HEIGHT}Z`;
  }).join("");
}
