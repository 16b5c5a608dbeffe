// What a conversation looks like, as DOM nodes. Knows neither the server nor what the browser keeps.

import { update } from "./markdown.js";
import { shown } from "./pictures.js";
import { duration, spent, took } from "./timing.js";

export function made(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const button = (words, onclick) => made("button", { type: "button", onclick }, words);

/** Puts text on the clipboard, also where the page did not come over TLS. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = made("textarea", { value: text, className: "unseen" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

export const facts = (pairs) => pairs.flatMap(([name, words]) => [made("dt", {}, name), made("dd", {}, words)]);

/** Steps through the versions of a message; `choose` is told which. */
export function versions(branches, choose) {
  const at = branches.indexOf(null);
  const step = (sign, label, to) => made("button", { type: "button", ariaLabel: label, disabled: !(to in branches), onclick: () => choose(to) }, sign);
  const row = made("span", { className: "versions" }, step("‹", "Earlier version", at - 1), `${at + 1} / ${branches.length}`, step("›", "Later version", at + 1));
  row.role = "group";
  row.ariaLabel = "Versions";
  return row;
}

/** Where the time of an answer went, folded. */
export function timeOf(answer) {
  return made("details", { className: "spent" }, made("summary", {}, "Time"), made("dl", {}, ...facts(spent(answer.took))));
}

/** A message; `change` shows what it has become. */
export class Message {
  #thoughts = made("div", { dir: "auto" });
  #reasoning = made("details", { className: "reasoning", hidden: true }, made("summary", {}, "Reasoning"), this.#thoughts);
  #text = made("div", { className: "text", dir: "auto" });
  #words = made("span");
  #under = made("div", { className: "under" });

  constructor(role, actions = [], pictures = []) {
    this.isAnswer = role === "assistant";
    this.#under.append(this.#words, ...actions);
    const who = made("h2", { className: "unseen" }, this.isAnswer ? "Model" : "You");
    const row = pictures.length ? [made("div", { className: "pictures" }, ...pictures.map((url) => shown(url)))] : [];
    this.node = made("article", { className: role }, who, ...row, this.#reasoning, this.#text, this.#under);
  }

  /** Lets a question be changed; `done` gets the new text. */
  edit(content, done) {
    const field = made("textarea", { value: content, dir: "auto", ariaLabel: "Your message, edited", rows: Math.min(12, content.split("\n").length + 1) });
    const focused = document.activeElement;
    const end = () => {
      form.replaceWith(this.#text);
      this.#under.hidden = false;
      focused.focus();
    };
    const send = () => field.value.trim() && done(field.value);
    const row = made("div", { className: "row" }, button("Cancel", end), made("button", { className: "chief" }, "Send"));
    const form = made("form", { className: "edit", onsubmit: (event) => [event.preventDefault(), send()] }, field, row);
    field.onkeydown = (event) => {
      if (event.key === "Escape") end();
      else if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      else send();
      event.preventDefault();
      event.stopPropagation();
    };
    this.#text.replaceWith(form);
    this.#under.hidden = true;
    field.focus();
  }

  change(content, words = "", reasoning = "") {
    if (this.#thoughts.textContent !== reasoning) this.#thoughts.textContent = reasoning;
    this.#reasoning.hidden = !reasoning;
    if (this.isAnswer) update(this.#text, content);
    else this.#text.textContent = content;
    this.#words.textContent = words;
    this.#under.hidden = !words && !this.#under.querySelector("button");
  }
}

const ENDS = { length: "reached the maximum tokens", timeout: "reached the time limit", cancelled: "ended by the server" };

const ALL_THOUGHTS = "all of them thoughts: raise the maximum tokens in the settings";

/** What stands below an answer. */
export function wordsBelow(answer) {
  const words = answer.took ? [took(answer.took)] : [];
  if (answer.model) words.unshift(answer.model);
  if (answer.stopped) words.push("stopped");
  else if (answer.ended === "length" && answer.reasoning && !answer.content.trim()) words.push(ALL_THOUGHTS);
  else if (answer.ended in ENDS) words.push(ENDS[answer.ended]);
  return words.join(" · ");
}

/** What stands there while it comes. */
export function wordsMeanwhile(first, pieces, seconds) {
  if (first === null) return "waiting for the first token" + (seconds < 1 ? "" : ` · ${duration(Math.floor(seconds))}`);
  return took({ tokens: pieces, about: true, first, seconds });
}

/** Says what went wrong; `again` asks once more, `edit` changes the question, `withKey` uses another key. */
export function troubleNode(trouble, { again, edit }, withKey) {
  const when = made("span");
  const node = made("div", { className: "trouble" }, trouble.message, when);
  node.setAttribute("role", "alert");
  const row = made("div", { className: "row" });
  if (trouble.wantsKey) {
    const field = made("input", { type: "password", autocomplete: "off", ariaLabel: "API key" });
    const use = () => field.value && withKey(field.value);
    field.onkeydown = (event) => event.key === "Enter" && use();
    row.append(field, button("Use this key", use));
  } else if (again) row.append(button("Try again", again));
  if (edit) row.append(button("Edit", edit));
  node.append(row);
  const count = () => {
    const left = Math.ceil((trouble.until - Date.now()) / 1000);
    when.textContent = left > 0 ? ` Try again in ${duration(left)}.` : " Try again now.";
    if (left > 0 && (node.isConnected || !count.begun)) setTimeout(count, 1000);
    count.begun = true;
  };
  if (trouble.until) count();
  return node;
}
