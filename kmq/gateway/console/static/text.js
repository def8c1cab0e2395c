// How values are written: numbers, bytes, times, and text from strangers.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const FINE = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

/** Return a number with separators; small fractions keep three digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Math.abs(value) >= 100 || Number.isInteger(value) ? WHOLE.format(value) : FINE.format(value);
}

/** Return a number of things: `count(1, "topic")` is "1 topic". */
export function count(n, one, many) {
  return `${number(n)} ${n === 1 ? one : (many ?? `${one}s`)}`;
}

/** Return bytes in the unit a reader wants. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let rest = value;
  while (Math.abs(rest) >= 1024 && unit < units.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${unit ? FINE.format(rest) : WHOLE.format(rest)} ${units[unit]}`;
}

/** Return seconds as a duration: 820 µs, 3.1 ms, 12 s, 5 min, 3 h, 2 d. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${FINE.format(seconds * 1e6)} µs`;
  if (seconds < 1) return `${FINE.format(seconds * 1e3)} ms`;
  if (seconds < 120) return `${FINE.format(seconds)} s`;
  if (seconds < 7200) return `${WHOLE.format(seconds / 60)} min`;
  if (seconds < 172800) return `${FINE.format(seconds / 3600)} h`;
  return `${FINE.format(seconds / 86400)} d`;
}

const pad = (n, width = 2) => String(n).padStart(width, "0");

/** Return the time of day of unix seconds, in UTC like the log. */
export function clock(seconds) {
  if (!seconds) return "–";
  const at = new Date(seconds * 1000);
  return `${pad(at.getUTCHours())}:${pad(at.getUTCMinutes())}:${pad(at.getUTCSeconds())}`;
}

/** Return date and time of unix milliseconds, in UTC. */
export function moment(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  const at = new Date(milliseconds);
  return Number.isNaN(at.getTime()) ? "–" : at.toISOString().replace("T", " ").replace("Z", "");
}

// Default_Ignorable_Code_Point is whatever a font draws as nothing.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Default_Ignorable_Code_Point}]/gu;
const CONTROLS = "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");
export const LAYOUT = "\t\n"; // are seen as what they are where a text has several lines

/** Return text in which every character can be seen: control characters, and those that turn the text around, by name. */
export function visible(text, kept = "") {
  return String(text).replace(HIDDEN, (character) => {
    if (kept.includes(character)) return character;
    const code = character.codePointAt(0);
    return `‹${CONTROLS[code] ?? (code === 0x7f ? "DEL" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`)}›`;
  });
}

/** Return JSON in which every character can be seen, as it may be typed. */
export function json(value) {
  const units = (text) => [...Array(text.length).keys()].map((at) => `\\u${text.charCodeAt(at).toString(16).padStart(4, "0")}`);
  return JSON.stringify(value).replace(HIDDEN, (character) => units(character).join(""));
}

/** Return at most `most` characters of a text, and how many are left out. */
export function cut(text, most, kept) {
  const whole = String(text);
  if (whole.length <= most) return [visible(whole, kept), 0];
  return [visible(whole.slice(0, most), kept), whole.length - most];
}

/** Return text that may be JSON in lines that can be read, else as it is. */
export function decoded(text) {
  if (text.length > 1 << 18 || !/^\s*[[{]/.test(text)) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
