// Dead letters: grouped by reason, with examples to tick, and a replay with its dry run and rate.

import { curl, get, path, post } from "./api.js";
import { change, command } from "./dialog.js";
import { h, show, shown, table } from "./dom.js";
import { examples } from "./message.js";
import { clock, count, moment, number, visible } from "./text.js";

const IS_DEAD = /(^dead$|\.dlq$|_dlq$|-dlq$)/;

function all(main, app, signal) {
  const view = h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…"));
  main.append(h("h1", null, "Dead letters"), view);
  app.watch([view], async (stop) => ({ topics: await get(path("admin", "topics"), null, stop) }), ({ topics }) => {
    const rows = topics.filter((topic) => IS_DEAD.test(topic.name)).slice(0, 200).map((topic) => h("tr", { "data-key": topic.name, "data-topic": topic.name },
      h("th", { scope: "row" }, h("a", { href: `#/letters/${encodeURIComponent(topic.name)}` }, visible(topic.name))),
      h("td", { class: "n" }, number(topic.partitions))));
    show(view, h("p", { class: "quiet" }, "Topics of messages that could not be routed or processed."),
      table("Topics of dead letters", [["Topic"], ["Partitions", "n"]], rows, "None: every message was routed, and no consumer gave up on one."));
  }, 5000, signal);
}

function period(group) {
  const [first, last] = [group.first_at, group.last_at].map((at) => moment(at * 1000).slice(0, 19));
  return first === last ? first : `${first} to ${last}`;
}

function reasons(found, more) {
  return found.groups.map((group) => {
    const reason = visible(group.reason) || "no reason given";
    return h("section", { class: "reason", "data-key": group.reason, "data-reason": group.reason },
      h("h3", null, reason),
      h("p", null, shown("b", "count", group.count), ` ${group.count === 1 ? "letter" : "letters"}, ${period(group)} UTC`),
      h("details", null, h("summary", null, count(group.examples.length, "example")), examples(found.topic, reason, group.examples, more)));
  });
}

/** Make the boxes in the heads say how many of their rows are ticked. Returns the seqs of the ticked rows. */
function ticked(view) {
  return [...view.querySelectorAll("table")].flatMap((table) => {
    const rows = [...table.querySelectorAll(".message")];
    const seqs = rows.filter((row) => row.querySelector(":checked")).map((row) => row.dataset.seq);
    const all = table.querySelector("thead input");
    all.indeterminate = seqs.length > 0 && seqs.length < rows.length;
    all.checked = seqs.length > 0 && !all.indeterminate;
    return seqs;
  });
}

function others(found) {
  const parts = Object.entries(found.stayed ?? {}).map(([why, n]) => `; ${number(n)} ${n === 1 ? "stays" : "stay"}: ${visible(why)}`);
  if (found.repeated) parts.unshift(`; ${number(found.repeated)} had gone back before`);
  if (found.strangers) parts.push(`; ${number(found.strangers)} ${found.strangers === 1 ? "says" : "say"} nothing about an origin: only kmq redrive can send that`);
  return parts.join("");
}

function replayForm(name, app, view) {
  const place = h("div", { role: "status", class: "result" });
  const form = h("form", { class: "look", onsubmit: (event) => { event.preventDefault(); replay(selection()); } },
    h("label", null, "Filter ", h("input", { name: "filter", autocomplete: "off", spellcheck: "false", placeholder: "error=*timeout*" })),
    h("label", null, "At most ", h("input", { name: "max", inputmode: "numeric", size: "8", autocomplete: "off", placeholder: "1000" })),
    h("label", null, "Messages a second ", h("input", { name: "rate", inputmode: "numeric", size: "8", autocomplete: "off", value: "100" })),
    h("button", { type: "submit", class: "danger" }, "Replay…"));
  const selection = () => {
    const body = {};
    const { filter, max, rate } = form.elements;
    if (filter.value) body.filter = filter.value;
    if (max.value.trim()) body.max = Number(max.value);
    if (rate.value.trim()) body.rate = Number(rate.value);
    return body;
  };
  const replay = (body, done) => {
    const where = path("topics", name, "replay");
    const send = (dryRun) => post(where, { ...body, dryRun });
    return change({
      title: `Replay ${visible(name)}`, yes: "Replay", place, dry: () => send(true), apply: () => send(false),
      preview: (found) => ({ isEmpty: !found.would_replay, body: [h("p", { class: found.would_replay ? "" : "quiet" },
        found.would_replay ? `${count(found.would_replay, "letter")} would be sent again to where ${found.would_replay === 1 ? "it" : "they"} came from${found.complete ? "" : ", and more by the same replay again"}${others(found)}. Letters stay in this topic, too.` : `No letter would be replayed${others(found)}.`),
        found.would_replay ? command(curl(where, { body: { ...body, dryRun: false } })) : null] }),
      done: (found) => {
        if (found.complete) done?.();
        return `${found.complete ? "Done" : "Not all, the same replay goes on"}: ${count(found.replayed, "letter")} replayed${others(found)}.`;
      },
    });
  };
  const note = h("p", { class: "quiet" });
  const refresh = () => { // who is asking may be known later than the page is open
    const { length } = ticked(view);
    several.disabled = !app.session.writable || !length;
    several.textContent = length ? `Replay ${count(length, "letter")}…` : "Replay ticked letters…";
    form.querySelector("button").disabled = !app.session.writable;
    show(note, app.session.writable ? "" : "This session only reads: a token with the role admin may replay.");
  };
  const tick = (boxes, checked) => {
    for (const box of boxes) box.checked = checked;
    refresh();
  };
  view.onchange = ({ target }) => tick(target.closest("thead") ? target.closest("table").querySelectorAll(".message input") : [], target.checked);
  const named = (seqs, done) => replay({ filter: `seq=${seqs.join(",")}` }, done);
  const several = h("button", { type: "button", class: "danger", onclick: () => {
    const boxes = view.querySelectorAll(".message :checked"); // others may be ticked before this is done
    named(ticked(view), () => tick(boxes, false));
  } });
  refresh();
  const alone = (letter) => h("button", { type: "button", class: "danger small", disabled: !app.session.writable,
    onclick: () => named([letter.seq]) }, "Replay this one…");
  return { root: [h("div", { class: "ticked" }, several, place), h("section", { "aria-labelledby": "replay" }, h("h2", { id: "replay" }, "Replay"), form, note)], refresh, one: alone };
}

function one(main, name, app, signal) {
  const view = h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…"));
  const form = replayForm(name, app, view);
  main.append(h("p", { class: "crumb" }, h("a", { href: "#/letters" }, "Dead letters")), h("h1", null, visible(name)), view, ...form.root);
  app.watch([view], (stop) => get(path("topics", name, "letters"), null, stop), (found) => {
    main.dataset.asOf = String(found.as_of);
    show(view, h("p", null, shown("b", "total", found.total), ` ${found.total === 1 ? "letter" : "letters"}${found.more ? " looked at; there are older ones" : ""}, as of ${clock(found.as_of)} UTC.`),
      found.error ? h("p", { class: "warn" }, `Damaged: ${visible(found.error.message)}`) : null,
      h("h2", null, "By reason"), found.groups.length ? h("div", null, reasons(found, form.one)) : h("p", { class: "empty" }, "No letters."));
    form.refresh();
  }, 5000, signal);
}

/** Open all topics of dead letters, or the topic `rest[0]`. */
export function open(main, rest, app, signal) {
  if (rest[0]) one(main, rest[0], app, signal);
  else all(main, app, signal);
}
