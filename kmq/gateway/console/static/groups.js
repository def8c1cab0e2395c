// Groups: who reads what, how far behind, and a reset with its dry run.

import { curl, get, path, post } from "./api.js";
import { chart } from "./chart.js";
import { change, command } from "./dialog.js";
import { ROWS, h, mark, show, shown, table } from "./dom.js";
import { state } from "./overview.js";
import { count, duration, number, visible } from "./text.js";

function all(main, app, signal) {
  const view = h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…"));
  main.append(h("h1", null, "Groups"), view);
  const heads = [["Group"], ["State"], ["Members", "n wide"], ["Lag", "n"], ["Behind", "n"]];
  app.watch([view], async (stop) => {
    const [overview, groups] = await Promise.all([get(path("overview"), null, stop), get(path("groups"), null, stop)]);
    return { ...overview, all: groups };
  }, (doc) => {
    main.dataset.asOf = String(doc.as_of);
    const live = new Map(doc.groups.map((group) => [group.group, group]));
    const others = doc.all.filter((group) => !live.has(group.group)).sort((a, b) => (a.group < b.group ? -1 : 1));
    const rows = [...doc.groups, ...others].slice(0, ROWS).map((group) => mark(h("tr", { "data-key": group.group, "data-group": group.group },
      h("th", { scope: "row" }, h("a", { href: `#/groups/${encodeURIComponent(group.group)}` }, visible(group.group))),
      h("td", null, state(group.state)), shown("td", "members", group.members, null, { class: "n wide" }),
      shown("td", "lag", group.lag, null, { class: "n" }), shown("td", "lag_seconds", group.lag_seconds, duration(group.lag_seconds), { class: "n" })), doc.as_of - group.as_of));
    show(view, h("p", { class: "quiet" }, shown("span", "groups_total", doc.groups_total), doc.groups_total === 1 ? " group." : " groups, the largest lag first."),
      table("Groups", heads, rows, "No consumer groups: kmq consume TOPIC --group NAME makes one."));
  }, 2000, signal);
}

function members(group) {
  const rows = group.members.map((member) => h("tr", { "data-key": member.id },
    h("th", { scope: "row" }, visible(member.id)), h("td", null, visible(member.client ?? "")), h("td", { class: "wide" }, visible(member.host ?? "")),
    h("td", null, member.assignment.map((place) => visible(`${place.topic}/${place.partition}`)).join(", ") || "nothing")));
  return table("Members", [["Member"], ["Client"], ["Host", "wide"], ["Reads"]], rows, "No members: nobody reads for this group now.");
}

function partitions(group) {
  const owners = new Map(group.members.flatMap((member) => member.assignment.map((place) => [`${place.topic}/${place.partition}`, member.id])));
  const heads = [["Topic"], ["Partition", "n"], ["Committed", "n"], ["End", "n wide"], ["Lag", "n"], ["Behind", "n"], ["Given back", "n wide"], ["Member", "wide"]];
  const rows = group.partitions.map((one) => h("tr", { "data-key": `${one.topic}/${one.partition}`, "data-place": `${one.topic}/${one.partition}` },
    h("th", { scope: "row" }, h("a", { href: `#/topics/${encodeURIComponent(one.topic)}` }, visible(one.topic))),
    h("td", { class: "n" }, String(one.partition)),
    ...["committed", "end", "lag"].map((name) => shown("td", name, one[name], null, { class: name === "end" ? "n wide" : "n" })),
    shown("td", "lagSeconds", one.lagSeconds, duration(one.lagSeconds), { class: "n" }),
    shown("td", "nacked", one.nacked, null, { class: "n wide" }),
    h("td", { class: "wide" }, visible(owners.get(`${one.topic}/${one.partition}`) ?? "–"))));
  return table("Offsets and lag", heads, rows, "Nothing committed yet.");
}

function resetForm(name, app) {
  const place = h("div", { role: "status", class: "result" });
  const form = h("form", { class: "look", onsubmit: (event) => { event.preventDefault(); reset(); } },
    h("label", null, "Topic ", h("select", { name: "topic" })),
    h("label", null, "To ", h("select", { name: "to", onchange: () => { form.elements.time.closest("label").hidden = form.elements.to.value !== "time"; } },
      h("option", { value: "earliest" }, "the first message"), h("option", { value: "latest" }, "the end"), h("option", { value: "time" }, "a time"))),
    h("label", { hidden: true }, "Time (UTC) ", h("input", { name: "time", type: "datetime-local", step: "1" })),
    h("button", { type: "submit", class: "danger", disabled: true }, "Reset…"));
  const reset = () => {
    const { topic, to, time } = form.elements;
    const where = to.value === "time" ? { timestamp: Date.parse(`${time.value}Z`) || 0 } : to.value;
    const body = { topic: topic.value, to: where };
    const send = (dryRun) => post(path("groups", name, "reset"), { ...body, dryRun });
    return change({
      title: `Reset group ${visible(name)}`, yes: "Reset", place, dry: () => send(true), apply: () => send(false),
      preview: (found) => ({ isEmpty: false, body: [table("Offsets that would be set", [["Partition"], ["From", "n"], ["To", "n"]], found.partitions.map((one) =>
        h("tr", null, h("th", { scope: "row" }, String(one.partition)), h("td", { class: "n" }, number(one.from)), h("td", { class: "n" }, number(one.to)))), "No partition would move."),
        command(curl(path("groups", name, "reset"), { body: { ...body, dryRun: false } }))] }),
      done: (found) => `Done: ${count(found.partitions.length, "partition")} of ${topic.value} reset.`,
    });
  };
  const refresh = (group) => {
    const topics = [...new Set(group.partitions.map((one) => one.topic))];
    show(form.elements.topic, topics.map((topic) => h("option", { value: topic, "data-key": topic }, visible(topic))));
    const button = form.querySelector("button");
    button.disabled = !app.session.writable || group.members.length > 0 || !topics.length;
    const why = !app.session.writable ? "This session only reads: a token with the role admin may reset." :
      group.members.length ? "A group with members cannot be reset: stop them first." : "";
    show(note, why);
  };
  const note = h("p", { class: "quiet" });
  return { root: h("section", { "aria-labelledby": "reset" }, h("h2", { id: "reset" }, "Reset"), form, note, place), refresh };
}

function one(main, name, app, signal) {
  const view = h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…"));
  const history = h("div", { class: "charts" });
  const form = resetForm(name, app);
  main.append(h("p", { class: "crumb" }, h("a", { href: "#/groups" }, "Groups")), h("h1", null, visible(name)), view, history, form.root);
  app.watch([view], (stop) => get(path("groups", name), null, stop), (group) => {
    const lag = group.partitions.reduce((sum, row) => sum + row.lag, 0);
    show(view, h("p", null, state(group.state), ` · generation ${number(group.generation)} · lag `, shown("b", "lag_total", lag)),
      h("h2", null, "Offsets and lag"), partitions(group), h("h2", null, "Members"), members(group));
    form.refresh(group);
  }, 2000, signal);
  app.watch([history], (stop) => get(path("groups", name, "history"), null, stop), (found) => {
    history.dataset.asOf = String(found.as_of);
    const from = found.times_from ?? found.as_of - found.step * Math.max(0, found.lag.length - 1);
    show(history, chart({ title: "Lag", from, step: found.step, say: number, series: [{ name: "messages", values: found.lag, kind: "s0" }] }));
  }, 10000, signal);
}

/** Open all groups, or the group `rest[0]`. */
export function open(main, rest, app, signal) {
  if (rest[0]) one(main, rest[0], app, signal);
  else all(main, app, signal);
}
