// Health: every finding with what to do, and the processes in full.

import { get, path } from "./api.js";
import { h, show, shown, table } from "./dom.js";
import { finding } from "./findings.js";
import { old, state } from "./overview.js";
import { clock, count, duration, moment, visible } from "./text.js";

const HEADS = [["Process"], ["State"], ["pid", "n wide"], ["Started (UTC)", "wide"], ["Restarts", "n"], ["Heartbeat", "n wide"], ["Messages", "n"],
  ["Refused", "n"], ["Dropped", "n wide"], ["Connections", "n wide"]];

function processes(stages) {
  return table("Processes", HEADS, stages.map((stage) => old(h("tr", { "data-key": stage.name, "data-stage": stage.name },
    h("th", { scope: "row" }, stage.name), h("td", null, state(stage.state)),
    shown("td", "pid", stage.pid, String(stage.pid), { class: "n wide" }),
    h("td", { class: "wide" }, stage.started ? moment(stage.started * 1000).slice(0, 19) : "–"),
    shown("td", "restarts", stage.restarts, null, { class: "n" }),
    shown("td", "age_s", stage.age_s, duration(Math.round(stage.age_s * 10) / 10), { class: "n wide" }),
    ...["messages", "refused"].map((name) => shown("td", name, stage[name], null, { class: "n" })),
    ...["dropped", "connections"].map((name) => shown("td", name, stage[name], null, { class: "n wide" }))), stage)), "The broker is not up.");
}

function facts(status) {
  const pairs = [["Supervisor", status.supervisor], ["Clock", status.clock], ["Instance", status.instance], ["Version", status.version]];
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value)
    .map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, visible(value)))));
}

function certificates(status) {
  const rows = (status.certificates ?? []).map((one) => h("tr", { "data-key": `${one.process} ${one.file}` },
    h("th", { scope: "row" }, one.process), h("td", null, one.setting), h("td", { class: "path" }, visible(one.file)), h("td", null, visible(one.not_after))));
  if (!rows.length) return null;
  return [h("h2", null, "Certificates"), table("Certificates", [["Process"], ["Setting"], ["File"], ["Valid until"]], rows)];
}

/** Open the page. */
export function open(main, _rest, app, signal) {
  show(main, h("h1", null, "Health"), h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…")));
  const view = main.querySelector(".now");
  app.watch([view], (stop) => get(path("overview"), null, stop), (doc) => {
    main.dataset.asOf = String(doc.as_of);
    const { status } = doc;
    const found = status.findings ?? [];
    show(view,
      h("p", { class: status.ready ? "good" : "bad", role: "status", "data-field": "ready", "data-value": String(status.ready) },
        status.ready ? "Ready." : "Not ready.", ` ${count(found.length, "finding")} at ${clock(doc.as_of)} UTC.`),
      found.length ? h("ul", { class: "findings" }, found.map(finding)) : h("p", { class: "empty" }, "Nothing is wrong."),
      h("h2", null, "Processes"), processes(status.stages), certificates(status), h("h2", null, "Broker"), facts(status));
  }, 2000, signal);
}
