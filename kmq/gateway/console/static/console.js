// The frame of the console: pages by hash, who is asking, how old the numbers are.
//
// Invariant: one page is open at a time, and everything it started ends with its signal. Numbers are marked as old when they
// are, and from the first failure on.

import { ApiError, get, keepToken, path, poll, token } from "./api.js";
import { ask } from "./dialog.js";
import { h, mark, show } from "./dom.js";
import * as groups from "./groups.js";
import * as health from "./health.js";
import * as letters from "./letters.js";
import * as overview from "./overview.js";
import { clock, duration, visible } from "./text.js";
import * as topic from "./topic.js";
import * as topics from "./topics.js";

const PAGES = { overview, topics, groups, letters, health };
const at = (id) => document.getElementById(id);
let session = { role: "none", name: "", writable: false };
let open = new AbortController();
let goneSince = null;
let refused = null; // whose document was refused last, and the text: what other views get does not end that
let newest = null; // as_of of the newest document
let isAsking = false;
let asked = null; // the token of the last dialog: whoever cancels it is not asked again
const drawn = new Map(); // view → when it was drawn last, and after how many seconds its numbers are old

/** What a page may use of the frame. */
const app = {
  get session() {
    return session;
  },
  announce(text) {
    at("announce").textContent = text;
  },
  /** Load and render into `views` again and again while the page is open. */
  watch(views, load, render, everyMs, signal) {
    return poll(load, render, everyMs, signal, (error, wait, found) => {
      if (!error) for (const view of views) drawn.set(view, { at: Date.now(), late: everyMs / 1000 + 1 });
      markViews();
      report(views, error, wait, found);
    });
  },
};

function markViews() {
  for (const [view, { at, late }] of drawn) mark(view, (Date.now() - at) / 1000, late);
}

function report(views, error, wait, found) {
  if (!error) {
    const seen = found?.as_of;
    newest = seen ?? Date.now() / 1000;
    show(at("as-of"), seen ? h("span", { "data-field": "as_of", "data-value": String(seen) }, `As of ${clock(seen)} UTC`) : `Received at ${clock(newest)} UTC`);
    if (refused?.views === views) refused = null;
    if (goneSince !== null) {
      learnSession();
      if (refused) showTrouble(refused.text, "");
    }
    goneSince = null;
    document.body.classList.remove("stale");
    at("connection").hidden = refused === null;
    return;
  }
  if (error.status === 401) askAboutToken();
  if (error instanceof ApiError && !error.isGone) {
    refused = { views, text: `Refused: ${visible(error.message)}.` };
    showTrouble(refused.text, "");
    const loading = at("main").querySelector(".now > .loading");
    if (loading) loading.textContent = "Nothing to show.";
    return;
  }
  goneSince ??= Date.now() / 1000;
  document.body.classList.add("stale");
  const age = newest ? `What you see is as of ${clock(newest)} UTC.` : "There is no data yet.";
  const what = error instanceof ApiError ? error.message : `the page cannot show an answer (${error.message})`;
  const next = wait ? `Next try in ${duration(Math.round(wait / 1000) || 1)}.` : "Still waiting for it.";
  showTrouble(`No answer since ${clock(goneSince)} UTC: ${visible(what)}. ${age}`, next);
}

function showTrouble(text, next) {
  at("connection").hidden = false;
  at("connection").dataset.since = goneSince ?? "";
  show(at("connection"), h("strong", null, text), " ", h("span", { "aria-hidden": "true" }, next));
}

async function learnSession() {
  try {
    session = await get(path("session"));
  } catch (error) {
    if (error.status === 401) askAboutToken();
    return;
  }
  const may = session.writable ? "may change" : "reads only";
  show(at("who"), session.name ? `${visible(session.name)}: ${session.role}, ${may}` : may);
  show(at("instance"), visible(session.instance ?? ""));
  show(at("version"), `KMQ ${visible(session.version ?? "")}`);
  document.body.dataset.role = session.role;
}

function askAboutToken() {
  if (isAsking || token() === asked) return;
  asked = token();
  askToken(asked ? "The gateway does not know this token, or it was revoked." : "The gateway wants a token.");
}

async function askToken(why) {
  if (isAsking) return;
  isAsking = true;
  try {
    const field = h("input", { id: "token-text", type: "password", autocomplete: "off", spellcheck: "false", value: token() });
    const said = await ask({
      title: "Token",
      body: [
        h("p", null, `${why} Make one with `, h("code", null, "kmq token new <name>"), ", where the broker runs. It stays in this tab until you close it."),
        h("label", { for: "token-text" }, "Token"), field,
      ],
      yes: "Use it",
    });
    if (said) {
      keepToken(field.value.trim());
      await learnSession();
      route();
    }
  } finally {
    isAsking = false;
  }
}

function parts() {
  const found = location.hash.replace(/^#\/?/, "").split("/");
  return found.map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
}

function route(isFirst) {
  open.abort();
  open = new AbortController();
  drawn.clear();
  asked = refused = null;
  const [name, ...rest] = parts();
  const known = Object.hasOwn(PAGES, name) ? name : "overview";
  for (const link of at("nav").querySelectorAll("a")) {
    if (link.hash === `#/${known}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const page = known === "topics" && rest[0] ? topic : PAGES[known];
  at("main").replaceChildren();
  at("main").dataset.page = known;
  page.open(at("main"), rest, app, open.signal);
  const heading = at("main").querySelector("h1");
  document.title = `${heading?.textContent ?? "Console"} · KMQ`;
  if (isFirst !== true && !document.querySelector("dialog[open]")) {
    heading?.setAttribute("tabindex", "-1");
    heading?.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

at("token").onclick = () => askToken("Empty: without a token.");
at("skip").onclick = (event) => {
  event.preventDefault(); // the hash is the page's name
  at("main").focus();
};
addEventListener("hashchange", route);
setInterval(markViews, 500);
learnSession();
route(true);
