// Conversations: kept by the browser, one entry each, and as files that `rabbitllm chat` writes and reads too.
// A chat is {id, title, changed, system, messages}; messages are questions and answers in turn, the last of them
// perhaps a question without an answer. An answer may have `stopped`, `reasoning`, and `took`.

const FORMAT = "rabbitllm chat";
const VERSION = 1;
const PREFIX = "rabbitllm.chat.";
export const MOST_BYTES = 32 << 20;

/** Text without halves of characters, which no tokenizer takes. */
export const sound = (text) => (text.toWellFormed ? text.toWellFormed() : text);

export const nameOf = (chat) => chat.title || chat.messages[0]?.content.trim().replace(/\s+/g, " ").slice(0, 80) || "New conversation";

export class Chats {
  #storage;

  constructor(storage) {
    this.#storage = storage;
  }

  fresh() {
    const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
    return { id, title: "", changed: Date.now(), system: "", messages: [] };
  }

  /** The latest first; entries that cannot be read are left alone. */
  all() {
    const found = [];
    for (let at = 0; at < this.#storage.length; at++) {
      const key = this.#storage.key(at);
      const chat = key.startsWith(PREFIX) ? this.get(key.slice(PREFIX.length)) : null;
      if (chat) found.push(chat);
    }
    return found.sort((a, b) => b.changed - a.changed);
  }

  get(id) {
    try {
      const chat = JSON.parse(this.#storage.getItem(PREFIX + id));
      return Array.isArray(chat?.messages) ? chat : null;
    } catch {
      return null;
    }
  }

  /** Throws where the browser has no room left. */
  put(chat) {
    this.#storage.setItem(PREFIX + chat.id, JSON.stringify(chat));
  }

  remove(id) {
    this.#storage.removeItem(PREFIX + id);
  }
}

/** What the server is asked: everything said, with the system prompt before it. */
export function messagesOf(chat) {
  const said = chat.messages.map(({ role, content }) => ({ role, content }));
  return chat.system.trim() ? [{ role: "system", content: chat.system }, ...said] : said;
}

/** The text of a file; a question without an answer is no part of it. */
export function encode(chat, model) {
  const answered = chat.messages.slice(0, chat.messages.length - (chat.messages.length % 2));
  const messages = messagesOf({ ...chat, messages: answered });
  answered.forEach(({ stopped, reasoning }, at) => {
    const message = messages[messages.length - answered.length + at];
    if (reasoning) message.reasoning_content = sound(reasoning);
    if (stopped) message.stopped = true;
  });
  return `${JSON.stringify({ format: FORMAT, version: VERSION, model, title: nameOf(chat), messages }, null, 1)}\n`;
}

/** A file's title, system prompt and messages; throws an Error that says what is wrong with it. */
export function decode(text) {
  let table;
  try {
    table = JSON.parse(text);
  } catch {
    throw new Error("it is not valid JSON");
  }
  if (table?.format !== FORMAT) throw new Error(`it lacks "format": "${FORMAT}"`);
  if (!Number.isInteger(table.version) || table.version < 1) throw new Error("it has no version");
  if (table.version > VERSION) throw new Error(`it has version ${table.version}; this page reads ${VERSION}`);
  if (!Array.isArray(table.messages)) throw new Error('it has no list of "messages"');
  const hasSystem = table.messages[0]?.role === "system";
  table.messages.forEach((message, at) => {
    const wanted = hasSystem && !at ? "system" : ["user", "assistant"][(at - hasSystem) % 2];
    const { content, reasoning_content: reasoning = "" } = message ?? {};
    const fits = message?.role === wanted && [content, reasoning].every((text) => typeof text === "string" && sound(text) === text);
    if (!fits || !["undefined", "boolean"].includes(typeof message.stopped))
      throw new Error(`message ${at + 1} is not the ${wanted}'s, or no text`);
  });
  const said = table.messages.slice(hasSystem ? 1 : 0);
  if (said.length % 2) throw new Error("it ends with a question");
  return {
    title: typeof table.title === "string" ? table.title : "",
    system: hasSystem ? table.messages[0].content : "",
    messages: said.map(({ role, content, stopped, reasoning_content: reasoning }) => (
      { role, content, ...(stopped && { stopped }), ...(reasoning && { reasoning }) }
    )),
  };
}
