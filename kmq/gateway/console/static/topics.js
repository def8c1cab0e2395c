// Topics: all of them, with the rates of the busiest.
//
// Invariant: rates, records and bytes come from one /api/overview document; names and options from the list of topics.

import { get, path } from "./api.js";
import { ROWS, h, show, shown, table } from "./dom.js";
import { bytes, duration, number, visible } from "./text.js";

const HEADS = [["Topic"], ["Partitions", "n wide"], ["msg/s", "n"], ["Bytes/s", "n wide"], ["Records", "n"], ["On disk", "n"], ["Kept for", "n wide"], ["Cleanup", "wide"]];

/** Return an option as people say it. */
export function option(name, value) {
  if (value === -1) return "no limit";
  if (value === null || value === undefined) return "–";
  if (name.endsWith("Ms")) return duration(value / 1000);
  if (name.endsWith("Bytes")) return bytes(value);
  return visible(value);
}

function row(topic, live) {
  const name = topic.name;
  return h("tr", { "data-key": name, "data-topic": name },
    h("th", { scope: "row" }, h("a", { href: `#/topics/${encodeURIComponent(name)}` }, visible(name))),
    h("td", { class: "n wide" }, number(topic.partitions)),
    shown("td", "rate", live?.rate, number(Math.round(live?.rate ?? 0)), { class: "n" }),
    shown("td", "bytes_rate", live?.bytes_rate, `${bytes(live?.bytes_rate)}/s`, { class: "n wide" }),
    shown("td", "records", live?.records, null, { class: "n" }),
    shown("td", "bytes", live?.bytes, bytes(live?.bytes), { class: "n" }),
    h("td", { class: "n wide" }, option("retentionMs", topic.retentionMs)),
    h("td", { class: "wide" }, visible(topic.cleanupPolicy ?? "–")));
}

/** Open the page. */
export function open(main, _rest, app, signal) {
  let doc = null;
  let all = [];
  const draw = () => {
    const wanted = filter.value.trim().toLowerCase();
    const live = new Map((doc?.topics ?? []).map((topic) => [topic.topic, topic]));
    const found = all.filter((topic) => topic.name.toLowerCase().includes(wanted));
    found.sort((a, b) => (live.get(b.name)?.rate ?? -1) - (live.get(a.name)?.rate ?? -1) || (a.name < b.name ? -1 : 1));
    const limit = Math.min(ROWS, 200);
    show(view, h("p", { class: "quiet" }, `${number(Math.min(limit, found.length))} of `,
      shown("span", "topics_total", doc?.topics_total ?? all.length), " topics", (doc?.topics_total ?? 0) > live.size ? `; rates of the ${live.size} busiest` : "", "."),
    table("Topics", HEADS, found.slice(0, limit).map((topic) => row(topic, live.get(topic.name))), wanted ? "No topic has that in its name." : "No topics yet: a first message makes one."));
  };
  const box = h("p", { class: "filter" }, h("label", { for: "filter" }, "Name contains"), " ", h("input", { id: "filter", type: "search", autocomplete: "off", oninput: draw }));
  const inner = h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…"));
  main.append(h("h1", null, "Topics"), box, inner);
  const filter = box.querySelector("input");
  const view = inner;
  app.watch(async (stop) => {
    const [overview, topics] = await Promise.all([get(path("overview"), null, stop), get(path("admin", "topics"), null, stop)]);
    return { ...overview, all: topics };
  }, (found) => {
    doc = found;
    all = found.all;
    main.dataset.asOf = String(found.as_of);
    draw();
  }, 2000, signal);
}
