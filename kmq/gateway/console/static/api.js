// The JSON of the gateway: requests with the token, streams, and polling that survives a gateway that is gone.
//
// Invariant: the token is only ever sent to the page's own origin, in a header, and kept in sessionStorage alone. Every
// poll ends before the next begins.

import { json } from "./text.js";

const TOKEN = "kmq-token";
const TIMEOUT_MS = 15000;
const SLOW_MS = 3000; // a poll without an answer for so long is reported, and goes on
const CHANGE_MS = 70000; // a replay ends after 50 s
const MOST_WAIT_MS = 15000;

/** What the gateway refused, by its code, or that it does not answer (status 0). */
export class ApiError extends Error {
  constructor(status, code, message, field) {
    super(field && !message.startsWith(`${field}:`) ? `${field}: ${message}` : message);
    this.status = status;
    this.code = code;
  }

  /** Whether the gateway is not there or not itself, so that the same request may succeed later. */
  get isGone() {
    return this.status === 0 || this.status === 502 || this.status === 503 || this.status === 504;
  }
}

export function token() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

export function keepToken(text) {
  if (text) sessionStorage.setItem(TOKEN, text);
  else sessionStorage.removeItem(TOKEN);
}

function headers(body) {
  const all = { accept: "application/json" };
  if (token()) all.authorization = `Bearer ${token()}`;
  if (body !== undefined) all["content-type"] = "application/json";
  return all;
}

async function send(path, { method = "GET", body, signal, accept } = {}) {
  const options = { method, headers: headers(body), signal, cache: "no-store", credentials: "omit", redirect: "error" };
  if (accept) options.headers.accept = accept;
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted && signal.reason?.name !== "TimeoutError") throw signal.reason;
    throw new ApiError(0, "unreachable", "the gateway does not answer");
  }
  if (response.ok) return response;
  let refusal = {};
  try {
    refusal = await response.json();
  } catch {
    // not ours, say a proxy's page: the status alone speaks
  }
  const text = refusal.message ?? `HTTP ${response.status}`;
  throw new ApiError(response.status, refusal.code ?? "unknown", text, refusal.field);
}

function bounded(signal, method) {
  const clock = AbortSignal.timeout(method ? CHANGE_MS : TIMEOUT_MS);
  return signal ? AbortSignal.any([signal, clock]) : clock;
}

async function document_(path, options) {
  const response = await send(path, { ...options, signal: bounded(options?.signal, options?.method) });
  if (response.status === 204) return {};
  try {
    return await response.json();
  } catch (error) {
    if (options?.signal?.aborted) throw options.signal.reason;
    throw new ApiError(0, "broken_off", "the gateway's answer broke off");
  }
}

/** Return a document; `names` are the parameters of the query, those without a value are left out. */
export function get(path, names, signal) {
  return document_(withQuery(path, names), { signal });
}

function withQuery(path, names) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(names ?? {})) {
    if (value !== undefined && value !== null && value !== "") query.set(name, String(value));
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** Send a document and return the answer's. */
export function post(path, body, signal) {
  return document_(path, { method: "POST", body, signal });
}

/** Change what is there, as `post`. */
export function patch(path, body) {
  return document_(path, { method: "PATCH", body });
}

/** Return the command that asks the same from a shell. The token itself is never in it. */
export function curl(path, { method, names, body } = {}) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = ["curl -s"];
  if (method && method !== "POST") parts.push(`-X ${method}`);
  if (token()) parts.push('-H "authorization: Bearer $token"');
  if (body !== undefined) parts.push(`-d ${quoted(json(body))}`);
  return [...parts, quoted(`${location.origin}${withQuery(path, names)}`)].join(" ");
}

/** Return a path with its parts encoded: `path("topics", name)` is "/api/topics/…". */
export function path(...parts) {
  return `/api/${parts.map(encodeURIComponent).join("/")}`;
}

/** Yield the documents of a stream of lines as they come. */
export async function* lines(where, signal) {
  const response = await send(where, { signal, accept: "application/x-ndjson" });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = value.split("\n");
      if (parts.length === 1) {
        rest.push(value);
        continue;
      }
      const whole = [rest.join("") + parts[0], ...parts.slice(1, -1)];
      rest = [parts.at(-1)];
      for (const line of whole) if (line) yield JSON.parse(line);
    }
  } catch (error) {
    if (signal?.aborted || error instanceof ApiError) throw error;
    throw new ApiError(0, "broken_off", "the stream broke off");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Wait; ends early, with false, when the signal is raised. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    if (signal.aborted) return resolve(false);
    const end = (whole) => {
      clearTimeout(timer);
      signal.removeEventListener("abort", stop);
      resolve(whole);
    };
    const stop = () => end(false);
    const timer = setTimeout(() => end(true), milliseconds);
    signal.addEventListener("abort", stop);
  });
}

/**
 * Load and render until the signal is raised. A refusal is asked about seldom: the leader of a shard, or a token, may change.
 * `report(error, waitMs)` hears of each failure, and of an answer that is late, `report(null)` of success.
 */
export async function poll(load, render, everyMs, signal, report) {
  for (let failures = 0; !signal.aborted; ) {
    let wait = everyMs;
    const late = setTimeout(() => signal.aborted || report(new ApiError(0, "late", "the gateway does not answer"), 0), SLOW_MS);
    try {
      const found = await load(signal);
      if (signal.aborted) return;
      failures = 0;
      render(found);
      report(null, 0, found);
    } catch (error) {
      if (signal.aborted) return;
      failures += 1;
      const isRefused = error.status === 401 || error.status === 403;
      wait = isRefused ? MOST_WAIT_MS : Math.min(MOST_WAIT_MS, Math.max(everyMs, 500 * 2 ** failures));
      wait *= 0.8 + 0.4 * Math.random();
      report(error, wait);
    } finally {
      clearTimeout(late);
    }
    await pause(wait, signal);
  }
}
