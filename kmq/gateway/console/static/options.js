// Options of topics: how they are said and typed, and the forms that create a topic and change its limits.

import { curl, patch, path, post } from "./api.js";
import { form } from "./dialog.js";
import { h } from "./dom.js";
import { bytes, count, duration, visible } from "./text.js";

export const OPTIONS = { retentionMs: "Kept for", retentionBytes: "Kept up to", segmentMs: "New file after", segmentBytes: "New file at", cleanupPolicy: "Cleanup",
  deleteRetentionMs: "Tombstones kept", tier: "Old records to the tier", localRetentionMs: "On disk for", localRetentionBytes: "On disk up to",
  maxDeliveries: "Deliveries at most", messageTimestampType: "Timestamp",
  kafkaSettings: "Kafka settings, of no effect" };
const CHOICES = { cleanupPolicy: ["delete", "compact"], tier: ["on", "off"], messageTimestampType: ["CreateTime", "LogAppendTime"] };
const TIMES = { ms: 1, s: 1e3, min: 6e4, h: 36e5, d: 864e5 };
const SIZES = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };

/** Return an option as people say it. */
export function option(name, value) {
  if (value === -1) return "no limit";
  if (value === null || value === undefined) return "–";
  if (name.endsWith("Ms")) return duration(value / 1000);
  if (name.endsWith("Bytes")) return bytes(value);
  return visible(value);
}

/** Return the option that was typed; null: as the settings of the broker say. Throws if it is not one. */
function typed(name, text) {
  if (text === "default") return null;
  if (text === "no limit") return -1;
  if (Object.hasOwn(CHOICES, name) || name === "kafkaSettings") return text;
  const units = name.endsWith("Ms") ? TIMES : name.endsWith("Bytes") ? SIZES : { "": 1 };
  const [, amount, unit] = /^(\d+(?:\.\d+)?) *([A-Za-z]*)$/.exec(text) ?? [];
  if (amount === undefined || !Object.hasOwn(units, unit)) {
    const names = Object.keys(units).filter(Boolean).join(", ");
    throw new Error(`${OPTIONS[name]}: ${text} is not a number${names ? ` with ${names} behind it` : ""}, nor: no limit, default`);
  }
  return Math.round(Number(amount) * units[unit]);
}

function fields() {
  return Object.entries(OPTIONS).map(([name, title]) => h("label", null, `${title} `, Object.hasOwn(CHOICES, name)
    ? h("select", { name }, [["", "as it is"], ...CHOICES[name].map((value) => [value, value])].map(([value, text]) => h("option", { value }, text)))
    : h("input", { name, size: "10", autocomplete: "off", spellcheck: "false" })));
}

function options(elements) {
  const given = Object.keys(OPTIONS).map((name) => [name, elements[name].value.trim()]).filter(([, text]) => text);
  return Object.fromEntries(given.map(([name, text]) => [name, typed(name, text)]));
}

/** Return the form that creates a topic. */
export function creation(app) {
  return form(app, {
    title: "Create a topic", yes: "Create",
    fields: [h("label", null, "Name ", h("input", { name: "name", required: true, autocomplete: "off", spellcheck: "false" })),
      h("label", null, "Partitions ", h("input", { name: "partitions", inputmode: "numeric", size: "4", value: "1", autocomplete: "off" })), fields()],
    bodyOf: (elements) => ({ name: elements.name.value.trim(), partitions: Number(elements.partitions.value), ...options(elements) }),
    command: (body) => curl(path("admin", "topics"), { body }),
    apply: (body) => post(path("admin", "topics"), body),
    done: (topic) => `Done: topic ${topic.name} has ${count(topic.partitions.length, "partition")}.`,
  });
}

/** Return the form that changes the limits of a topic; `refresh` takes the topic as it is. */
export function limits(name, app) {
  const where = path("admin", "topics", name);
  const made = form(app, {
    title: "Change its limits", yes: "Change", fields: fields(), bodyOf: options,
    command: (body) => curl(where, { method: "PATCH", body }),
    apply: (body) => patch(where, body),
    done: () => `Done: limits of ${name} changed.`,
  });
  const refresh = (topic) => {
    made.refresh();
    for (const input of made.root.querySelectorAll("input")) input.placeholder = option(input.name, topic[input.name]);
  };
  return { root: made.root, refresh };
}
