// The broker at a glance: findings, the pipeline as it is, an hour of history, events, the busiest topics and groups.
//
// Invariant: every number beside the charts comes from one /api/overview document; the charts from one /api/history.

import { get, path } from "./api.js";
import { chart } from "./chart.js";
import { bar, h, mark, show, shown, table } from "./dom.js";
import { banner } from "./findings.js";
import { bytes, clock, count, duration, number, visible } from "./text.js";

const LINKS = [
  { between: "ingress", names: { raw: "FIFO raw", received: "ring received" } },
  { between: "framer", names: { framed: "ring framed" } },
  { between: "durability", names: { durable: "ring durable" } },
];
const STAGES = ["ingress", "framer", "durability", "router"];
const GOOD = new Set(["ready", "running", "up", "ok", "serving", "stable"]);
const IDLE = new Set(["starting", "draining", "stopping", "empty", "preparing_rebalance", "completing_rebalance"]);

/** Return a state as a word with a mark; the colour says nothing that the word does not. */
export function state(word, tag = "span") {
  const kind = GOOD.has(word) ? "good" : IDLE.has(word) ? "quiet" : "bad";
  return h(tag, { class: `state ${kind}`, "data-field": "state", "data-value": word }, word);
}

function stageBox(stage, rate) {
  const perSecond = shown("b", "bytes_rate", rate?.bytes, `${bytes(rate?.bytes)}/s`);
  const lines = [h("h3", null, stage.name), state(stage.state, "p")];
  if (stage.name === "ingress") { // it takes bytes: the framer finds the messages, and numbers them
    const many = stage.connections === 1 ? " connection" : " connections";
    lines.push(h("p", { class: "big" }, perSecond), h("p", null, shown("span", "connections", stage.connections), many));
  } else {
    const rounded = number(Math.round(rate?.messages ?? 0));
    lines.push(h("p", { class: "big" }, shown("b", "rate", rate?.messages, rounded), h("span", { class: "unit" }, " msg/s")),
      h("p", null, perSecond), h("p", null, "seq ", shown("span", "seq", stage.seq)));
  }
  if (stage.restarts) lines.push(h("p", { class: "warn" }, count(stage.restarts, "restart")));
  return old(h("section", { class: "box", "data-stage": stage.name, "data-key": stage.name, "aria-label": `${stage.name}: ${stage.state}` }, lines), stage);
}

/** Mark what shows a process that has written no numbers for a while. */
export function old(element, stage) {
  return stage.pid ? mark(element, stage.age_s) : element;
}

function linkBox(place, links) {
  const shownLinks = Object.entries(place.names).flatMap(([name, title]) => {
    const link = links.find((one) => one.name === name);
    if (!link) return [];
    const waiting = link.messages ?? null;
    const words = waiting === null ? bytes(link.bytes) : `${number(waiting)} msg`;
    const kind = link.fill > 0.9 ? "full" : link.fill > 0.5 ? "half" : "";
    const fill = `${number(Math.round((link.fill ?? 0) * 1000) / 10)} %`;
    return [h("div", { class: "link", "data-link": name, "data-key": name },
      h("p", null, title),
      bar(`${title}: fill`, link.fill, kind),
      h("p", { class: "small" }, shown("span", "fill", link.fill, fill), " · ", shown("span", waiting === null ? "bytes" : "messages", waiting ?? link.bytes, words)))];
  });
  return h("div", { class: "links", "data-key": `after-${place.between}` }, h("span", { class: "arrow", "aria-hidden": "true" }), shownLinks);
}

function pipeline(doc) {
  const stages = new Map(doc.status.stages.map((stage) => [stage.name, stage]));
  const parts = STAGES.flatMap((name) => {
    const stage = stages.get(name);
    if (!stage) return [];
    const link = LINKS.find((place) => place.between === name);
    return [stageBox(stage, doc.rates?.[name]), link ? linkBox(link, doc.status.links ?? []) : null];
  });
  const others = doc.status.stages.filter((stage) => !STAGES.includes(stage.name));
  const queues = h("section", { class: "box files", "data-key": "queues", "aria-label": "queue files" },
    h("h3", null, "queue files"), h("p", null, "<topic>.log"),
    h("p", null, shown("b", "topics_total", doc.topics_total), doc.topics_total === 1 ? " topic" : " topics"));
  const arrow = h("div", { class: "links last", "data-key": "after-router" }, h("span", { class: "arrow", "aria-hidden": "true" }));
  const ack = h("p", { class: "ack", "data-key": "ack" }, h("span", null, "!ack, after the fsync"));
  return h("section", { "aria-labelledby": "pipeline", "data-key": "pipeline" },
    h("h2", { id: "pipeline" }, "Pipeline"),
    stages.size ? h("div", { class: "pipeline" }, parts, arrow, queues, ack) : h("p", { class: "empty" }, "The broker is not up."),
    others.length ? h("ul", { class: "others" }, others.map((stage) => h("li", { "data-key": stage.name, "data-stage": stage.name },
      h("b", null, stage.name), " ", state(stage.state), stage.restarts ? ` · ${count(stage.restarts, "restart")}` : "",
      stage.name === "tier" ? copy(doc.status.copy) : null))) : null,
    kafka(doc.status.kafka),
    latency(doc.latency));
}

function copy(found) { // off the machine, in KMQ_TIER
  if (!found) return null;
  const behind = [" · ", shown("span", "behind", found.behind), " msg behind, the oldest of them ", shown("span", "age_s", found.age_s, duration(found.age_s))];
  const topics = [" · ", shown("span", "tier_bytes", found.bytes, bytes(found.bytes)), " of topics there"];
  const due = [" · ", shown("span", "behind_bytes", found.behind_bytes, bytes(found.behind_bytes)), " of old messages wait on the disk"];
  return [" · copied to seq ", shown("span", "copied", found.seq), found.behind ? behind : " · nothing is behind",
    found.objects ? topics : null, found.behind_bytes ? due : null,
    found.problem ? ` · ${found.problem}` : ""];
}

function kafka(found) {
  if (!found) return null;
  const facts = [["connections", "connections"], ["producers", "producers"], ["batches_from_cache", "batches from the cache"],
    ["batches_from_lines", "batches from lines"]];
  return h("p", { "data-key": "kafka", "data-kafka": String(found.port) }, h("b", null, "Kafka"), ` on port ${found.port}`,
    facts.map(([name, title]) => [" · ", shown("span", name, found[name]), ` ${title}`]));
}

function latency(found) {
  const names = { ack: "acknowledge", sync: "fdatasync", routed: "receive to routed" };
  return h("dl", { class: "facts", "data-key": "latency" }, Object.entries(names).map(([name, title]) => {
    const one = found?.[name];
    return h("div", { "data-latency": name }, h("dt", null, title),
      h("dd", null, "p50 ", shown("b", "p50", one?.p50, duration(one?.p50)), " · p99 ", shown("b", "p99", one?.p99, duration(one?.p99))));
  }));
}

function intakes(doc) {
  if (!doc.intakes?.length) return null;
  const rows = doc.intakes.map((one, index) => h("tr", { "data-key": String(index), "data-intake": String(index) },
    h("th", { scope: "row" }, `${one.port}/${one.kind} → ${visible(one.topic)}`),
    shown("td", "rate", one.rate, number(Math.round(one.rate)), { class: "n" }),
    shown("td", "bytes_rate", one.bytes_rate, `${bytes(one.bytes_rate)}/s`, { class: "n wide" }),
    shown("td", "refused", one.refused, null, { class: "n" }),
    shown("td", "dropped", one.dropped, null, { class: "n" })));
  return h("section", { "data-key": "intakes", "aria-labelledby": "intakes" }, h("h2", { id: "intakes" }, "Intakes"),
    table("Intakes", [["Port"], ["lines/s", "n"], ["Bytes/s", "n wide"], ["Refused", "n"], ["Dropped", "n"]], rows, ""));
}

function busiest(doc) {
  const rows = doc.topics.map((topic) => h("tr", { "data-key": topic.topic, "data-topic": topic.topic },
    h("th", { scope: "row" }, h("a", { href: `#/topics/${encodeURIComponent(topic.topic)}` }, visible(topic.topic))),
    shown("td", "rate", topic.rate, number(Math.round(topic.rate)), { class: "n" }),
    shown("td", "bytes_rate", topic.bytes_rate, `${bytes(topic.bytes_rate)}/s`, { class: "n wide" }),
    shown("td", "records", topic.records, null, { class: "n" }),
    shown("td", "bytes", topic.bytes, bytes(topic.bytes), { class: "n" })));
  const heads = [["Topic"], ["msg/s", "n"], ["Bytes/s", "n wide"], ["Records", "n"], ["On disk", "n"]];
  return h("section", { "data-key": "topics", "aria-labelledby": "busiest" }, h("h2", { id: "busiest" }, "Busiest topics"),
    table("Busiest topics", heads, rows.slice(0, 8), "No topics yet: a first message makes one."),
    doc.topics_total > 8 ? h("p", null, h("a", { href: "#/topics" }, `All ${number(doc.topics_total)} topics`)) : null);
}

function lagging(doc) {
  const rows = doc.groups.slice(0, 8).map((group) => mark(h("tr", { "data-key": group.group, "data-group": group.group },
    h("th", { scope: "row" }, h("a", { href: `#/groups/${encodeURIComponent(group.group)}` }, visible(group.group))),
    h("td", null, state(group.state)),
    shown("td", "lag", group.lag, null, { class: "n" }),
    shown("td", "lag_seconds", group.lag_seconds, duration(group.lag_seconds), { class: "n" })), doc.as_of - group.as_of));
  return h("section", { "data-key": "groups", "aria-labelledby": "lagging" }, h("h2", { id: "lagging" }, "Groups by lag"),
    table("Groups by lag", [["Group"], ["State"], ["Lag", "n"], ["Behind", "n"]], rows, "No consumer groups."));
}

function events(doc) {
  const rows = [...doc.events].reverse().map((event) => h("li", { "data-key": String(event.id), class: `event ${event.kind}` },
    h("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)), " ",
    h("b", null, visible(event.kind).replaceAll("_", " ")), " ", visible(event.text ?? event.about)));
  return h("section", { "data-key": "events", "aria-labelledby": "events" }, h("h2", { id: "events" }, "Events"),
    rows.length ? h("ol", { class: "events scroll", tabindex: "0", role: "region", "aria-label": "Events, newest first" }, rows) : h("p", { class: "empty" }, "None since the gateway started."));
}

function charts(found) {
  const common = { from: found.times_from, step: found.step };
  const of = (name) => found.series[name] ?? [];
  const pairs = [
    ["Messages per second", [["framer", "rate.framer"], ["router", "rate.router"]], (value) => number(Math.round(value))],
    ["Latency, p99", [["ack", "ack.p99"], ["fdatasync", "sync.p99"]], duration],
    ["Fill of the rings", [["framed", "fill.framed"], ["durable", "fill.durable"]], (value) => `${number(Math.round(value * 100))} %`, 1],
    ["Lag of all groups", [["messages", "lag.total"]], number],
  ];
  return pairs.map(([title, names, say, ceiling]) => chart({
    title, say, ceiling, ...common,
    series: names.map(([name, key], index) => ({ name, values: of(key), kind: `s${index}` })),
  }));
}

/** Open the page. */
export function open(main, _rest, app, signal) {
  const now = h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…"));
  const history = h("div", { class: "charts" });
  const more = h("div", { class: "columns" });
  show(main, h("h1", null, "Overview"), now,
    h("section", { id: "history", "aria-labelledby": "hour" }, h("h2", { id: "hour" }, "The last hour"), history), more);
  const views = { now: main.querySelector(".now"), history: main.querySelector(".charts"), more: main.querySelector(".columns") };
  app.watch([views.now, views.more], (stop) => get(path("overview"), null, stop), (doc) => {
    main.dataset.asOf = String(doc.as_of);
    show(views.now, banner(doc.status), pipeline(doc));
    show(views.more, intakes(doc), busiest(doc), lagging(doc), events(doc));
  }, 2000, signal);
  app.watch([views.history], (stop) => get(path("history"), null, stop), (found) => {
    document.getElementById("history").dataset.asOf = String(found.as_of);
    show(views.history, charts(found));
  }, 10000, signal);
}
