// Questions: what changes anything is shown by a dry run first, and done only after a yes.

import { h, show } from "./dom.js";
import { visible } from "./text.js";

/** Show a dialog and return true for yes; Escape and Cancel are no. */
export function ask({ title, body, yes, no = "Cancel", danger = false }) {
  return new Promise((resolve) => {
    const close = (said) => {
      dialog.remove();
      from?.focus?.();
      resolve(said);
    };
    const from = document.activeElement;
    const dialog = h(
      "dialog",
      { "aria-labelledby": "dialog-title" },
      h("form", { onsubmit: (event) => { event.preventDefault(); close(true); } },
        h("h2", { id: "dialog-title" }, title),
        h("div", { class: "body" }, body),
        h("p", { class: "buttons" },
          no ? h("button", { type: "button", onclick: () => close(false) }, no) : null,
          h("button", { type: "submit", class: danger ? "danger" : "main" }, yes))),
    );
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      close(false);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Return a command as text, and a button that copies it. */
export function command(text) {
  const shown = h("pre", { class: "command", tabindex: "0", "aria-label": "Command" }, visible(text));
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch { // over plain HTTP to another host there is no clipboard
      getSelection().selectAllChildren(shown);
      button.textContent = "Selected: copy it";
    }
  };
  const button = h("button", { type: "button", class: "small", onclick: copy }, "Copy as curl");
  return h("div", { class: "curl" }, button, shown);
}

/**
 * Change something: `dry()` returns what would happen, `preview(found)` shows it, `apply()` does it.
 * Results and refusals appear in `place`, which is a live region.
 */
export async function change({ title, dry, preview, apply, yes, done, place, note = "Dry run: nothing has been changed yet." }) {
  const tell = (text, kind) => show(place, h("p", { class: kind }, visible(text)));
  try {
    tell("Asking what would change…", "quiet");
    const found = await dry();
    const { body, isEmpty } = preview(found);
    if (isEmpty) {
      show(place, body);
      return false;
    }
    show(place);
    if (!(await ask({ title, body: [h("p", null, note), body], yes, danger: true }))) {
      tell("Nothing was changed.", "quiet");
      return false;
    }
    tell(done(await apply(found)), "good");
    return true;
  } catch (error) {
    tell(`Not done: ${error.message}`, "bad");
    return false;
  }
}

/**
 * Return a form, folded away, for a change that has no dry run: the command that does it is shown before it is done.
 * `bodyOf(elements)` returns the body or throws what is wrong. Call `refresh` when it may be known who is asking.
 */
export function form(app, { title, yes, fields, bodyOf, command: said, apply, done }) {
  const place = h("div", { role: "status", class: "result" });
  const why = h("p", { class: "quiet" });
  const button = h("button", { type: "submit", class: "danger", disabled: true }, `${yes}…`);
  const made = h("form", { class: "look", onsubmit: (event) => { event.preventDefault(); submit(); } }, fields, button);
  const submit = () => change({
    title, yes, place, apply, done, dry: async () => bodyOf(made.elements),
    note: "Nothing has been changed yet. This does it, and so does the button:",
    preview: (body) => ({ isEmpty: false, body: command(said(body)) }),
  });
  const refresh = () => {
    button.disabled = !app.session.writable;
    show(why, app.session.writable ? "" : "This session only reads: a token with the role admin may do this.");
  };
  return { root: h("details", { class: "options" }, h("summary", null, title), made, why, place), refresh };
}
