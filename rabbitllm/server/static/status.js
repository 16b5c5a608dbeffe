// The line at the bottom of the page: where the time of the last passes went, who is there, and what lies behind it.

import { counted, duration, percentages, Readings, size, WHERE } from "./timing.js";
import { facts as rows, made } from "./view.js";

const readings = new Readings();
const none = WHERE.map(() => 0);
const $ = (id) => document.getElementById(id);

function draw(shares) {
  WHERE.forEach((name, at) => (document.querySelector(`.bar .${name}`).style.flexGrow = shares[at]));
}

/** Shows a reading; `mine` where one of the requests is this page's. */
export function showStatus(status, mine) {
  readings.add(status);
  const done = readings.work;
  const yours = mine && status.running + status.waiting ? ", with yours" : "";
  const now = `${status.running} running, ${status.waiting} waiting${yours}`;
  const facts = [];
  if (done) {
    const shares = percentages(WHERE.map((name) => done[name]));
    draw(shares);
    const words = WHERE.map((name, at) => made("b", { className: name }, `${name} ${shares[at]} %`));
    const each = WHERE.map((name) => `${name} ${duration(done[name] / done.passes)}`).join(", ");
    const moved = `${size(done.bytes / done.passes)}, ${size(done.bytes / done.seconds)} a second`;
    const of = `${done.recent ? "last " : ""}${done.passes.toLocaleString("en")} ${done.passes === 1 ? "pass" : "passes"}`;
    const separated = words.flatMap((word, at) => (at ? [" · ", word] : [word]));
    $("shares").replaceChildren(...separated, made("span", { className: "passes" }, ` · ${of}`));
    facts.push(
      ["a pass", `${duration(done.seconds / done.passes)}: ${each}`],
      ["read or copied per pass", done.bytes ? moved : "nothing: all weights are resident"],
    );
  } else showNone("no pass yet");
  for (const [place, words] of Object.entries(status.placement.places)) {
    const parts = Object.entries(words).map(([word, bytes]) => `${size(bytes)} ${word.replace(/^disk, /, "")}`);
    facts.push([place, parts.join(", ")]);
  }
  const aside = status.aside_bytes ? `, and ${size(status.aside_bytes)} swapped out` : "";
  const kept = `${status.kept_tokens.toLocaleString("en")} found in the prefix cache`;
  if (status.most_running === null) facts.push(["weights", "not loaded; the first request loads them"]);
  else facts.push(
    ["KV cache", `${size(status.cache_bytes)} of ${size(status.cache_limit_bytes)}${aside}`],
    ["requests", `${now}; at most ${status.most_running} running, ${status.most_waiting} waiting`],
    ["since the start", `${counted(status.new_tokens, "token")} generated; of ${counted(status.prompt_tokens, "token")} in prompts ${kept}`],
  );
  $("requests").textContent = `requests: ${now}`;
  $("facts").replaceChildren(...rows(facts));
}

/** Says why there is nothing to show. */
export function showNone(words) {
  $("shares").textContent = words;
  $("requests").textContent = "";
  draw(none);
}
