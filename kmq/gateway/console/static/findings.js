// Findings: what is wrong and what to do, in the order of importance that the broker gives them.

import { h } from "./dom.js";
import { count, visible } from "./text.js";

const SERVED = /^docs\/([\w-]+\.md#[\w-]+)$/;

/** Return one finding as a list item. */
export function finding(one) {
  const [, page] = SERVED.exec(one.section ?? "") ?? [];
  const about = one.about ? `${visible(one.about)}: ` : "";
  return h("li", { class: `finding ${one.severity}`, "data-code": one.code, "data-key": `${one.code} ${one.about ?? ""}` },
    h("p", null, h("span", { class: "severity" }, one.severity), " ", h("code", null, visible(one.code)), " ", about, visible(one.why)),
    one.advice ? h("p", { class: "do" }, h("b", null, "Do this: "), visible(one.advice)) : null,
    page ? h("p", { class: "small" }, h("a", { href: `/console/${page}` }, `Runbook: ${visible(one.code)}`)) : null);
}

/** Return the banner of the overview: ready or not, and the findings. */
export function banner(status) {
  const found = status.findings ?? [];
  const errors = found.filter((one) => one.severity === "error").length;
  const kind = !status.ready ? "error" : found.length ? "warning" : "fine";
  const words = status.ready ? "Ready: a message sent now would be stored." : "Not ready: messages are not stored now.";
  const more = found.length ? ` ${count(errors, "error")}, ${count(found.length - errors, "warning")}.` : "";
  return h("section", { class: `banner ${kind}`, "data-key": "banner", "aria-label": "Findings" },
    h("p", { role: "status", "data-field": "ready", "data-value": String(status.ready) }, h("strong", null, words), more,
      found.length > 3 ? [" ", h("a", { href: "#/health" }, "All findings")] : null),
    found.length ? h("ul", { class: "findings" }, found.slice(0, 3).map(finding)) : null);
}
