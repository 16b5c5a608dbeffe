// Where the time goes: what happened between two readings of /status, and numbers as people read them.

const KEPT = 9;
export const WHERE = ["disk", "copies", "computing"];

/** The latest readings between which passes were made. */
export class Readings {
  #kept = [];

  add(status) {
    const last = this.#kept.at(-1);
    if (last && (status.passes < last.passes || status.model !== last.model)) this.#kept = [];  // another server or model
    if (this.#kept.at(-1)?.passes !== status.passes) this.#kept.push(status);
    if (this.#kept.length > KEPT) this.#kept.shift();
  }

  /** Of the last passes, or of all since the server began where there is one reading only; null before any. */
  get work() {
    const last = this.#kept.at(-1);
    if (!last) return null;
    const first = this.#kept.length > 1 ? this.#kept[0] : null;
    const done = between(first, last);
    return done && { ...done, recent: !!first };
  }
}

/** What passes did between two readings, or before one; null where there was none. */
export function between(first, last) {
  const since = (name) => last[name] - (first ? first[name] : 0);
  const [passes, seconds] = [since("passes"), since("pass_seconds")];
  if (!(passes > 0 && seconds > 0)) return null;
  const disk = Math.min(since("disk_seconds"), seconds);
  const copies = Math.min(since("copy_seconds"), seconds - disk);
  return { passes, seconds, disk, copies, computing: seconds - disk - copies, bytes: since("streamed_bytes") };
}

/** The same of one answer of so many tokens, with what took no pass; `shared` with other requests. */
export function workOf(first, last, tokens) {
  if (first.model !== last.model) return null;
  const since = (name) => (last[name] ?? 0) - (first[name] ?? 0);
  const [drafted, accepted, forced] = ["drafted_tokens", "accepted_tokens", "forced_tokens"].map(since);
  const shared = last.running + last.waiting > 1 || since("new_tokens") > tokens;
  const done = between(first, last);
  return done && { ...done, drafted, accepted, forced, shared };
}

/** Whole percentages that add up to 100. */
export function percentages(parts) {
  const sum = parts.reduce((a, b) => a + b, 0);
  const exact = parts.map((part) => (100 * part) / sum);
  const whole = exact.map(Math.floor);
  const order = exact.map((_, at) => at).sort((a, b) => exact[b] - whole[b] - exact[a] + whole[a]);
  const missing = 100 - whole.reduce((a, b) => a + b, 0);
  for (const at of order.slice(0, missing)) whole[at]++;
  return whole;
}

export function size(bytes) {
  if (bytes < 100000) return `${bytes.toLocaleString("en")} bytes`;
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${(bytes / 1e6).toFixed(2)} MB`;
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 && !Number.isInteger(seconds) ? 1 : 0)} s`;
  const whole = Math.round(seconds);
  const [minutes, rest] = [Math.floor(whole / 60), String(whole % 60).padStart(2, "0")];
  return minutes < 60 ? `${minutes}:${rest} min` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
}

export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Of an answer: tokens, those that are thoughts, tokens a second after the first one, and how long that one took. */
export function took({ tokens, thoughts, about, first, seconds }) {
  const sign = about ? "about " : "";
  const ofThem = thoughts ? `, ${thoughts.toLocaleString("en")} of them thoughts` : "";
  const words = [sign + counted(tokens, "token") + ofThem];
  if (tokens > 1 && seconds > first) {
    const rate = (tokens - 1) / (seconds - first);
    words.push(`${rate.toFixed(rate < 10 ? 2 : 0)} a second`);
  }
  return [...words, `first after ${duration(first)}`].join(" · ");
}

/** Where the time of an answer went: [name, words] pairs. */
export function spent({ tokens, first, seconds, prompt, cached, work }) {
  const facts = [];
  const ofPrompt = prompt ? `; the prompt has ${counted(prompt, "token")}${cached ? `, ${cached.toLocaleString("en")} of them in the prefix cache` : ""}` : "";
  facts.push(["first token", `after ${duration(first)}${ofPrompt}`]);
  if (seconds > first) facts.push(["the others", `in ${duration(seconds - first)}`]);
  if (!work) return facts;
  const each = `${duration(work.seconds / work.passes)} each`;
  const moved = work.bytes ? `, ${size(work.bytes / work.passes)} read or copied` : "";
  facts.push([work.shared ? "passes, shared" : "passes", `${work.passes.toLocaleString("en")}: ${each}${moved}`]);
  const shares = percentages(WHERE.map((name) => work[name]));
  facts.push(["of their time", WHERE.map((name, at) => `${name} ${shares[at]} %`).join(", ")]);
  if (!work.shared && tokens > work.passes) facts.push(["tokens a pass", (tokens / work.passes).toFixed(2)]);
  if (work.drafted) facts.push(["drafts", `${work.accepted.toLocaleString("en")} of ${counted(work.drafted, "token")} accepted`]);
  if (work.forced) facts.push(["forced", `${counted(work.forced, "token")} without a pass`]);
  return facts;
}
