// One answer of the server: the request, the events of its stream, and in words what went wrong. Knows no page.

/** Takes server-sent events apart, wherever the network cut them; comments, which keep a line open, are left out. */
export class Events {
  #rest = "";

  feed(text) {
    this.#rest += text;
    const held = this.#rest.endsWith("\r") ? 1 : 0;  // half of a line's end, perhaps
    const events = this.#rest.slice(0, this.#rest.length - held).replace(/\r\n?/g, "\n").split("\n\n");
    this.#rest = events.pop() + (held ? "\r" : "");
    return events.map(data).filter((found) => found !== null);
  }
}

function data(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n") : null;
}

/** What the page says in place of an answer, or below half of one. */
export class Trouble extends Error {
  constructor(words, { wantsKey = false, until = null } = {}) {
    super(words);
    this.wantsKey = wantsKey;
    /** When the server says to ask again: milliseconds since 1970. */
    this.until = until;
  }
}

/** Retry-After is a number of seconds or a date. */
export function untilWhen(header, now) {
  if (!header) return null;
  const at = /^\s*\d+\s*$/.test(header) ? now + 1000 * Number(header) : Date.parse(header);
  return Number.isFinite(at) ? at : null;
}

export function refused(status, message, header, now) {
  const until = untilWhen(header, now);
  const said = message ? ` ${message}` : "";
  if (status === 401) return new Trouble("This server requires an API key.", { wantsKey: true });
  if (status === 429) return new Trouble("The server's request queue is full.", { until });
  if (status === 503) return new Trouble(`The server is not available.${said}`, { until });
  if (status >= 500) return new Trouble(`The server failed.${said}`, { until });
  return new Trouble(`The server refused the request.${said || ` (HTTP ${status})`}`, { until });
}

const messageOf = (error) => (typeof error === "string" ? error : error?.message ?? "");

export const headersOf = (key) => (key ? { authorization: `Bearer ${key}` } : {});

/** Yields {text}, {reasoning}, {finish} and {usage: {tokens, thoughts, prompt, cached}}; throws a Trouble, or an AbortError where `signal` ended it. */
export async function* ask(body, { key, signal }) {
  let reply;
  try {
    const headers = { "content-type": "application/json", ...headersOf(key) };
    reply = await fetch("v1/chat/completions", { method: "POST", headers, signal, body: JSON.stringify(body) });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Trouble("The server cannot be reached.");
  }
  if (!reply.ok) {
    const said = await reply.json().catch(() => null);
    throw refused(reply.status, messageOf(said?.error), reply.headers.get("retry-after"), Date.now());
  }
  const [reader, events] = [reply.body.pipeThrough(new TextDecoderStream()).getReader(), new Events()];
  let whole = false;
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      piece = { done: true };
    }
    if (piece.done) break;
    for (const event of events.feed(piece.value)) {
      if (event.trim() === "[DONE]") return;
      const said = read(event);
      if (said.error) throw new Trouble(`The server ended the answer. ${messageOf(said.error)}`);
      const [choice] = said.choices ?? [];
      if (choice?.delta?.reasoning_content) yield { reasoning: choice.delta.reasoning_content };
      if (choice?.delta?.content) yield { text: choice.delta.content };
      if (choice?.finish_reason) {
        whole = true;
        yield { finish: choice.finish_reason };
      }
      if (said.usage) {
        const { completion_tokens: tokens, completion_tokens_details: parts, prompt_tokens: prompt } = said.usage;
        const cached = said.usage.prompt_tokens_details?.cached_tokens ?? 0;
        yield { usage: { tokens, thoughts: parts?.reasoning_tokens ?? 0, prompt, cached } };
      }
    }
  }
  if (!whole) throw new Trouble("The connection was lost. The partial answer is kept.");
}

function read(event) {
  try {
    return JSON.parse(event);
  } catch {
    throw new Trouble("The server sent an invalid reply. The partial answer is kept.");
  }
}
