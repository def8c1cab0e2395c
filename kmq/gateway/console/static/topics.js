// Topics: a table of all of them, sorted by any column, a page at a time.
//
// Invariant: what one screen shows comes from one /api/overview/topics document, which the gateway sorts and cuts: a
// page costs the same at 20 topics and at 20,000.

import { get, path } from "./api.js";
import { h, show, shown, table } from "./dom.js";
import { creation, option } from "./options.js";
import { bytes, count, number, visible } from "./text.js";

const COLUMNS = { topic: ["Topic"], partitions: ["Partitions", "n wide"], rate: ["msg/s", "n"], bytes_rate: ["Bytes/s", "n wide"],
  records: ["Records", "n"], bytes: ["On disk", "n"], retentionMs: ["Kept for", "n wide"], cleanupPolicy: ["Cleanup", "wide"] };
const PAGE = 100;

function row(topic) {
  const name = topic.topic;
  return h("tr", { "data-key": name, "data-topic": name },
    h("th", { scope: "row" }, h("a", { href: `#/topics/${encodeURIComponent(name)}` }, visible(name))),
    shown("td", "partitions", topic.partitions, null, { class: "n wide" }),
    shown("td", "rate", topic.rate, number(Math.round(topic.rate)), { class: "n" }),
    shown("td", "bytes_rate", topic.bytes_rate, `${bytes(topic.bytes_rate)}/s`, { class: "n wide" }),
    shown("td", "records", topic.records, null, { class: "n" }),
    shown("td", "bytes", topic.bytes, bytes(topic.bytes), { class: "n" }),
    h("td", { class: "n wide" }, option("retentionMs", topic.retentionMs)),
    h("td", { class: "wide" }, visible(topic.cleanupPolicy ?? "–")));
}

/** Open the page. */
export function open(main, _rest, app, signal) {
  const wanted = { contains: "", sort: "rate", order: "desc", first: 0, limit: PAGE };
  let watching = new AbortController();
  const load = (changes) => {
    Object.assign(wanted, changes);
    watching.abort();
    watching = new AbortController();
    const asked = { ...wanted };
    app.watch([view], (stop) => get(path("overview", "topics"), asked, stop), draw, 2000, AbortSignal.any([signal, watching.signal]));
  };
  const sort = (column) => {
    const isSame = wanted.sort === column;
    const first = column === "topic" || column === "cleanupPolicy" ? "asc" : "desc"; // of numbers people look for the largest
    load({ sort: column, order: isSame ? (wanted.order === "asc" ? "desc" : "asc") : first, first: 0 });
  };
  const heads = () => Object.entries(COLUMNS).map(([column, [title, kind]]) => [
    h("button", { type: "button", onclick: () => sort(column) }, title), kind,
    { "aria-sort": wanted.sort === column ? (wanted.order === "asc" ? "ascending" : "descending") : null }]);
  const turn = (title, can, first) => h("button", // not disabled, because that would take the focus away
    { type: "button", "aria-disabled": can ? null : "true", onclick: () => can && load({ first: Math.max(0, first) }) }, title);
  const draw = (found) => {
    main.dataset.asOf = String(found.as_of);
    create.refresh();
    const end = wanted.first + found.topics.length;
    const said = wanted.contains ? `${count(found.found, "topic")} of ${number(found.total)}` : count(found.total, "topic");
    show(view, h("p", { class: "quiet" }, shown("span", "topics_total", found.total, said), "."),
      table("Topics", heads(), found.topics.map(row), wanted.contains ? "No topic has that in its name." : "No topics yet: a first message makes one."),
      found.found > PAGE || wanted.first ? h("p", { class: "pages" },
        turn("Back", wanted.first > 0, wanted.first - PAGE),
        h("span", { role: "status" }, found.topics.length ? `${number(wanted.first + 1)} to ${number(end)} of ${number(found.found)}` : "none here"),
        turn("Next", end < found.found, wanted.first + PAGE)) : null);
  };
  const search = h("input", { id: "filter", type: "search", autocomplete: "off", oninput: () => load({ contains: search.value.trim(), first: 0 }) });
  const create = creation(app);
  const view = h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…"));
  main.append(h("h1", null, "Topics"), h("p", { class: "filter" }, h("label", { for: "filter" }, "Name contains"), " ", search), create.root, view);
  load({});
}
