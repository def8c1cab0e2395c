// One topic: its partitions and options, and its messages, looked up or followed live.
//
// Invariant: at most ROWS messages are in the page, and while following at most one redraw happens a frame, however
// fast the topic is.

import { ApiError, curl, get, lines, path, pause, post } from "./api.js";
import { command, form } from "./dialog.js";
import { ROWS, h, show, shown, table } from "./dom.js";
import { message, messages } from "./message.js";
import { OPTIONS, limits, option } from "./options.js";
import { bytes, count, number, visible } from "./text.js";

const STARTS = { latest: "the newest", earliest: "the first", offset: "an offset", seq: "a seq", time: "a time" };
const PAGE = 50;
const FOLLOWED = 200; // rows of a topic that is followed: a reader sees a few dozen

function sizes(topic) {
  const tiered = topic.partitions.some((one) => one.tierEndOffset !== undefined);
  const heads = [["Partition"], ["First offset", "n"], ["End offset", "n"], ["Bytes", "n"], ["Files", "n"],
    ...(tiered ? [["First on disk", "n"], ["End in the store", "n"], ["Bytes there", "n"]] : [])];
  const rows = topic.partitions.map((one) => h("tr", { "data-key": String(one.partition), "data-partition": String(one.partition) },
    h("th", { scope: "row" }, String(one.partition)),
    ...["startOffset", "endOffset"].map((name) => shown("td", name, one[name], null, { class: "n" })),
    shown("td", "bytes", one.bytes, bytes(one.bytes), { class: "n" }),
    shown("td", "segments", one.segments, null, { class: "n" }),
    tiered ? ["localStartOffset", "tierEndOffset"].map((name) => shown("td", name, one[name], null, { class: "n" })) : null,
    tiered ? shown("td", "tierBytes", one.tierBytes, bytes(one.tierBytes), { class: "n" }) : null));
  return [
    h("details", { class: "options", "data-key": "options" }, h("summary", null, `Options and ${count(rows.length, "partition")}`),
      h("dl", { class: "facts" }, Object.entries({ ...OPTIONS, partitioner: "Partitioner" }).filter(([name]) => topic[name] !== undefined)
        .map(([name, title]) => h("div", null, h("dt", null, title), h("dd", null, option(name, topic[name]))))),
      table("Partitions", heads, rows, "No partitions.")),
  ];
}

/** The messages of a topic: a form, what it found, and the live end. */
class Messages {
  constructor(topic, app, signal) {
    this.topic = topic;
    this.app = app;
    this.page = signal;
    this.running = null; // the request or stream that is on
    this.queue = [];
    this.looked = this.of = 0; // records
    this.list = messages("Messages");
    this.said = h("p", { class: "said", role: "status", tabindex: "-1" });
    this.more = h("p", { class: "more" });
    this.same = h("div", { class: "same" });
    this.form = this.#form();
    this.root = h("section", { "aria-labelledby": "messages" }, h("h2", { id: "messages" }, "Messages"), this.form, this.said, this.list, this.more,
      h("details", null, h("summary", null, "The same with curl"), this.same));
    signal.addEventListener("abort", () => this.stop());
  }

  #form() {
    const starts = Object.entries(STARTS).map(([value, text]) => h("option", { value }, text));
    const field = (title, name, more) => h("label", null, `${title} `, h("input", { name, autocomplete: "off", spellcheck: "false", placeholder: "any", size: "12", ...more }));
    return h("form", { class: "look", onsubmit: (event) => { event.preventDefault(); this.look(); } },
      h("label", null, "From ", h("select", { name: "start", onchange: () => this.#shape() }, starts)),
      h("label", { class: "value", hidden: true }, h("span", null, "Value "), h("input", { name: "value", inputmode: "numeric", size: "12", autocomplete: "off" })),
      h("label", { class: "value time", hidden: true }, "Time (UTC) ", h("input", { name: "time", type: "datetime-local", step: "1" })),
      field("Only key", "key"), field("Value contains", "contains", { size: "16" }), field("Header", "header", { placeholder: "name or name=value", size: "19" }),
      field("Partition", "partition", { inputmode: "numeric", size: "4", placeholder: "all" }),
      h("span", null, h("button", { type: "submit", class: "main" }, "Show"), " ",
        h("button", { type: "button", class: "follow", "aria-pressed": "false", onclick: () => (this.isFollowing ? this.stop("Stopped.") : this.follow()) }, "Follow live")));
  }

  #shape() {
    const start = this.form.elements.start.value;
    const value = this.form.elements.value.closest("label");
    value.hidden = !["offset", "seq"].includes(start);
    value.querySelector("span").textContent = start === "seq" ? "Seq " : "Offset ";
    this.form.elements.time.closest("label").hidden = start !== "time";
  }

  #query() {
    const { start, value, time, key, contains, header, partition } = this.form.elements;
    const asked = { limit: PAGE, partition: partition.value.trim(), key: key.value, value: contains.value, header: header.value };
    if (start.value === "time") asked.timestamp = Date.parse(`${time.value}Z`) || 0;
    else if (start.value === "latest" || start.value === "earliest") asked.from = start.value;
    else asked[start.value] = value.value.trim();
    return asked;
  }

  /** Show messages from where the form says: the newest first, or from a place on in their order. */
  look() {
    const asked = this.#query();
    this.#empty();
    show(this.same, command(curl(this.#path("messages"), { names: asked })));
    return this.#read(asked, async (signal) => {
      const found = await this.#ask(asked, signal);
      return { found: [found], next: found.next, before: found.before };
    });
  }

  /** Show older messages. */
  #older(asked, before) {
    return this.#read(asked, async (signal) => {
      const found = await this.#ask({ ...asked, before }, signal);
      return { found: [found], next: [], before: found.before };
    });
  }

  /** Show what comes behind: a page of one partition after the other, until there are enough. */
  #onward({ limit, key, value, header }, places) {
    const asked = { limit, key, value, header };
    return this.#read(asked, async (signal) => {
      const found = [];
      const next = [...places];
      for (let turn = 0, count = 0; turn < places.length && count < PAGE; turn += 1) {
        const { partition, offset } = next.shift();
        const part = await this.#ask({ ...asked, partition, offset }, signal);
        count += part.messages.length;
        found.push(part);
        next.push(...part.next);
      }
      return { found, next };
    });
  }

  #path(what) {
    return path("topics", this.topic, what);
  }

  #ask(asked, signal) {
    return get(this.#path("messages"), asked, signal);
  }

  #empty() {
    for (const body of [...this.list.tBodies]) body.remove();
    this.looked = this.of = 0;
    show(this.more);
  }

  async #read(asked, work) {
    const signal = this.#begin();
    this.#say("Reading…");
    try {
      const { found, next, before } = await work(signal);
      const isTail = asked.from === "latest";
      const all = found.flatMap((part) => (isTail ? [...part.messages].reverse() : part.messages));
      const room = ROWS - this.list.tBodies.length;
      this.list.append(...all.slice(0, room).map((one) => message(this.topic, one)));
      this.#count(found, isTail);
      const damage = found.map((part) => part.error).find(Boolean);
      const isSearch = Boolean(asked.key || asked.value || asked.header);
      const text = `${this.#found(isSearch, all.length)}${damage ? ` Damaged: ${visible(damage.message)}` : ""}`;
      this.#say(text, found.at(-1)?.as_of, { looked: this.looked, of: this.of });
      const goOn = isTail ? before !== null && (() => this.#older(asked, before)) : next.length > 0 && (() => this.#onward(asked, next));
      this.#offer(room > PAGE && goOn, isSearch ? "Search on" : isTail ? "Older" : "Read on");
    } catch (error) {
      if (!signal.aborted) this.#say(`Not read: ${visible(error.message)}`);
    }
  }

  #count(found, isTail) {
    for (const part of found) {
      this.looked = isTail ? part.looked : this.looked + part.looked; // backwards it is counted from the end
      if (isTail || !this.of) this.of = part.of;
    }
    this.of = Math.max(this.of, this.looked);
  }

  #found(isSearch, added) {
    const rows = this.list.tBodies.length;
    if (isSearch) return `${count(rows, "message")} found. Looked at ${number(this.looked)} of ${number(this.of)}.`;
    return `${count(rows, "message")} shown${added ? "" : "; no more found"}.`;
  }

  #offer(goOn, title) {
    const had = this.more.contains(document.activeElement);
    show(this.more, goOn ? h("button", { type: "button", onclick: goOn }, title) : null);
    if (had && !goOn) this.said.focus();
  }

  /** Show new messages as they come: a sample, whose share is said. */
  async follow() {
    const signal = this.#begin();
    this.isFollowing = true;
    this.#press(true);
    this.#empty();
    this.#say("Following; nothing new yet.");
    let seen = 0;
    let taken = 0;
    for (let wait = 500; !signal.aborted; wait = Math.min(15000, wait * 2)) {
      try {
        for await (const part of lines(this.#stream(), signal)) {
          wait = 500;
          seen += part.seen;
          taken += part.shown;
          this.#take(part.messages);
          if (part.error) throw new ApiError(part.error.code === "damaged" ? 0 : 404, part.error.code, part.error.message);
          const share = part.share < 1 ? ` That is ${number(Math.round(part.share * 10000) / 100)} % now.` : "";
          this.#say(`Following: ${number(taken)} of ${count(seen, "message")} shown.${share}`, part.as_of, { seen, shown: taken, share: part.share });
        }
      } catch (error) {
        if (signal.aborted) return;
        this.#say(`The stream ended (${visible(error.message)}); next try in ${Math.round(wait / 1000) || 1} s.`);
        if (error.status >= 400 && error.status < 500 && error.status !== 429) return this.stop(`Not followed: ${visible(error.message)}`);
      }
      await pause(wait, signal);
    }
  }

  #stream() {
    const partition = this.form.elements.partition.value.trim();
    return `${this.#path("follow")}${partition ? `?partition=${encodeURIComponent(partition)}` : ""}`;
  }

  #take(messages) {
    this.queue.push(...messages);
    if (this.queue.length > FOLLOWED) this.queue.splice(0, this.queue.length - FOLLOWED);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      const fresh = this.queue.splice(0).reverse().map((one) => message(this.topic, one));
      this.list.tHead.after(...fresh);
      while (this.list.tBodies.length > FOLLOWED) this.list.lastElementChild.remove();
    });
  }

  #begin() {
    this.stop();
    this.running = new AbortController();
    return this.running.signal;
  }

  stop(text) {
    this.running?.abort();
    this.isFollowing = false;
    this.#press(false);
    if (text) this.#say(text);
  }

  #press(on) {
    const button = this.form.querySelector(".follow");
    button.setAttribute("aria-pressed", String(on));
    button.textContent = on ? "Stop" : "Follow live";
  }

  #say(text, asOf, data = {}) {
    this.said.textContent = text;
    if (asOf) this.root.dataset.asOf = String(asOf);
    for (const [name, value] of Object.entries(data)) this.root.dataset[name] = String(value);
  }
}

/** Return the form that sends a message to a topic; `then` is called when it is stored. */
function production(topic, app, then) {
  const where = `${path("topics", topic, "produce")}?format=text`;
  const area = (title, name, more) => h("label", null, `${title} `, h("textarea", { name, rows: "2", cols: "30", spellcheck: "false", ...more }));
  return form(app, {
    title: "Produce a message", yes: "Produce",
    fields: [h("label", null, "Key ", h("input", { name: "key", autocomplete: "off", spellcheck: "false", placeholder: "none" })), area("Value", "value"),
      area("Headers", "headers", { placeholder: "name=value, one a line" }),
      h("label", null, "Partition ", h("input", { name: "partition", inputmode: "numeric", size: "4", autocomplete: "off", placeholder: "any" })),
      h("label", null, h("input", { name: "tombstone", type: "checkbox" }), " no value (a tombstone)")],
    bodyOf: ({ key, value, headers, partition, tombstone }) => {
      const pairs = headers.value.split("\n").filter((line) => line.trim()).map((line) => line.match(/^([^=]+)=(.*)$/) ?? [line, line, null]);
      return { value: tombstone.checked ? null : value.value, ...(key.value ? { key: key.value } : {}),
        ...(pairs.length ? { headers: pairs.map(([, name, text]) => ({ name, value: text })) } : {}),
        ...(partition.value.trim() ? { partition: Number(partition.value) } : {}) };
    },
    command: (body) => curl(where, { body }),
    apply: (body) => post(where, body),
    done: (found) => {
      then();
      return `Done: stored at ${found.partition}:${found.offset}.`;
    },
  });
}

/** Open the page of the topic `rest[0]`. */
export function open(main, rest, app, signal) {
  const name = rest[0];
  const found = new Messages(name, app, signal);
  const view = h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…"));
  const produce = production(name, app, () => found.look());
  const change = limits(name, app);
  main.append(h("p", { class: "crumb" }, h("a", { href: "#/topics" }, "Topics")), h("h1", null, visible(name)), view, change.root, produce.root, found.root);
  app.watch([view], (stop) => get(path("admin", "topics", name), null, stop), (topic) => {
    show(view, sizes(topic));
    change.refresh(topic);
    produce.refresh();
  }, 2000, signal);
  found.look();
}
