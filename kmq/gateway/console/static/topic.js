// One topic: its partitions and options, and its messages, looked up or followed live.
//
// Invariant: at most ROWS messages are in the page, and while following at most one redraw happens a frame, however
// fast the topic is.

import { ApiError, get, lines, path, pause } from "./api.js";
import { ROWS, h, show, shown, table } from "./dom.js";
import { message } from "./message.js";
import { bytes, number, visible } from "./text.js";
import { option } from "./topics.js";

const OPTIONS = { retentionMs: "Kept for", retentionBytes: "Kept up to", segmentMs: "New file after", segmentBytes: "New file at", cleanupPolicy: "Cleanup",
  deleteRetentionMs: "Tombstones kept", maxDeliveries: "Deliveries at most", partitioner: "Partitioner" };
const STARTS = { latest: "the newest", earliest: "the first", offset: "an offset", seq: "a seq", time: "a time" };
const PAGE = 50;
const FOLLOWED = 200; // rows of a topic that is followed: a reader sees a few dozen

function sizes(topic) {
  const heads = [["Partition"], ["First offset", "n"], ["End offset", "n"], ["Bytes", "n"], ["Files", "n"]];
  const rows = topic.partitions.map((one) => h("tr", { "data-key": String(one.partition), "data-partition": String(one.partition) },
    h("th", { scope: "row" }, String(one.partition)),
    ...["startOffset", "endOffset"].map((name) => shown("td", name, one[name], null, { class: "n" })),
    shown("td", "bytes", one.bytes, bytes(one.bytes), { class: "n" }),
    shown("td", "segments", one.segments, null, { class: "n" })));
  return [
    h("details", { class: "options", "data-key": "options" }, h("summary", null, `Options and ${rows.length} ${rows.length === 1 ? "partition" : "partitions"}`),
      h("dl", { class: "facts" }, Object.entries(OPTIONS).filter(([name]) => topic[name] !== undefined)
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
    this.list = h("ol", { class: "messages", "aria-label": "Messages" });
    this.said = h("p", { class: "said", role: "status" });
    this.more = h("p", { class: "more" });
    this.form = this.#form();
    this.root = h("section", { "aria-labelledby": "messages" }, h("h2", { id: "messages" }, "Messages"), this.form, this.said, this.list, this.more);
    signal.addEventListener("abort", () => this.stop());
  }

  #form() {
    const starts = Object.entries(STARTS).map(([value, text]) => h("option", { value }, text));
    return h("form", { class: "look", onsubmit: (event) => { event.preventDefault(); this.look(); } },
      h("label", null, "From ", h("select", { name: "start", onchange: () => this.#shape() }, starts)),
      h("label", { class: "value", hidden: true }, h("span", null, "Value "), h("input", { name: "value", inputmode: "numeric", size: "12", autocomplete: "off" })),
      h("label", { class: "value time", hidden: true }, "Time (UTC) ", h("input", { name: "time", type: "datetime-local", step: "1" })),
      h("label", null, "Only key ", h("input", { name: "key", size: "10", autocomplete: "off", spellcheck: "false", placeholder: "any" })),
      h("label", null, "Partition ", h("input", { name: "partition", inputmode: "numeric", size: "4", autocomplete: "off", placeholder: "all" })),
      h("button", { type: "submit", class: "main" }, "Show"),
      h("button", { type: "button", class: "follow", "aria-pressed": "false", onclick: () => (this.isFollowing ? this.stop("Stopped.") : this.follow()) }, "Follow live"));
  }

  #shape() {
    const start = this.form.elements.start.value;
    const value = this.form.elements.value.closest("label");
    value.hidden = !["offset", "seq"].includes(start);
    value.querySelector("span").textContent = start === "seq" ? "Seq " : "Offset ";
    this.form.elements.time.closest("label").hidden = start !== "time";
  }

  #query() {
    const { start, value, time, key, partition } = this.form.elements;
    const asked = { limit: PAGE, partition: partition.value.trim(), key: key.value };
    if (start.value === "time") asked.timestamp = Date.parse(`${time.value}Z`) || 0;
    else if (start.value === "latest" || start.value === "earliest") asked.from = start.value;
    else asked[start.value] = value.value.trim();
    return asked;
  }

  /** Show messages from where the form says. */
  look() {
    const asked = this.#query();
    return this.#read(async (signal) => {
      this.list.replaceChildren();
      const found = await this.#ask(asked, signal);
      return { found: [found], next: found.next };
    }, asked.key);
  }

  /** Show what comes behind: a page of one partition after the other, until there are enough. */
  #goOn(places, key) {
    return this.#read(async (signal) => {
      const found = [];
      const next = [...places];
      for (let asked = 0, count = 0; asked < places.length && count < PAGE; asked += 1) {
        const place = next.shift();
        const part = await this.#ask({ limit: PAGE, key, ...place }, signal);
        count += part.messages.length;
        found.push(part);
        next.push(...part.next);
      }
      return { found, next };
    }, key);
  }

  #ask(asked, signal) {
    return get(path("topics", this.topic, "messages"), asked, signal);
  }

  async #read(work, key) {
    const signal = this.#begin();
    this.#say("Reading…");
    show(this.more);
    try {
      const { found, next } = await work(signal);
      const all = found.flatMap((part) => part.messages);
      const room = ROWS - this.list.childElementCount;
      this.list.append(...all.slice(0, room).map((one) => message(one)));
      const damage = found.map((part) => part.error).find(Boolean);
      const text = damage ? ` Damaged: ${visible(damage.message)}` : "";
      this.#say(`${number(this.list.childElementCount)} shown${all.length ? "" : "; no more found"}.${text}`, found.at(-1)?.as_of);
      const can = next.length > 0 && room > PAGE;
      show(this.more, can ? h("button", { type: "button", onclick: () => this.#goOn(next, key) }, key ? "Search on" : "Read on") : null);
    } catch (error) {
      if (!signal.aborted) this.#say(`Not read: ${visible(error.message)}`);
    }
  }

  /** Show new messages as they come: a sample, whose share is said. */
  async follow() {
    const signal = this.#begin();
    this.isFollowing = true;
    this.#press(true);
    this.list.replaceChildren();
    show(this.more);
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
          this.#say(`Following: ${number(taken)} of ${number(seen)} messages shown.${share}`, part.as_of, { seen, shown: taken, share: part.share });
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
    return `${path("topics", this.topic, "follow")}${partition ? `?partition=${encodeURIComponent(partition)}` : ""}`;
  }

  #take(messages) {
    this.queue.push(...messages);
    if (this.queue.length > FOLLOWED) this.queue.splice(0, this.queue.length - FOLLOWED);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      const fresh = this.queue.splice(0).reverse().map((one) => message(one));
      this.list.prepend(...fresh);
      while (this.list.childElementCount > FOLLOWED) this.list.lastElementChild.remove();
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

/** Open the page of the topic `rest[0]`. */
export function open(main, rest, app, signal) {
  const name = rest[0];
  const messages = new Messages(name, app, signal);
  const view = h("div", { class: "now" }, h("p", { class: "quiet loading" }, "Loading…"));
  main.append(h("p", { class: "crumb" }, h("a", { href: "#/topics" }, "Topics")), h("h1", null, visible(name)), view, messages.root);
  app.watch((stop) => get(path("admin", "topics", name), null, stop), (topic) => show(view, sizes(topic)), 5000, signal);
  messages.look();
}
