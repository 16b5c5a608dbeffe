// Conversations: kept by the browser, one entry each, and as files that `rabbitllm chat` writes and reads too.
// A chat is {id, title, changed, system, messages}; messages are questions and answers in turn, the last of them
// perhaps a question without an answer. A question may have `pictures`, data: URLs; an answer `stopped`, `reasoning`,
// `model` and `took`. A message of which there are several versions has `branches`: for each version that is not shown
// the messages from there on, and null in the place of the one that is.

import { isPicture } from "./pictures.js";

const FORMAT = "rabbitllm chat";
const FORMAT_OF_ALL = "rabbitllm chats";
const VERSION = 1;
const DEEPEST = 100;
const PREFIX = "rabbitllm.chat.";
export const MOST_BYTES = 32 << 20;

/** Text without halves of characters, which no tokenizer takes. */
export const sound = (text) => (text.toWellFormed ? text.toWellFormed() : text);

export const nameOf = (chat) => chat.title || chat.messages[0]?.content.trim().replace(/\s+/g, " ").slice(0, 80) || "New conversation";

/** What a browser keeps, in a page of a browser that keeps nothing: gone with the page. */
class Passing {
  isPassing = true;
  #kept = new Map();
  get length() { return this.#kept.size; }
  key(at) { return [...this.#kept.keys()][at]; }
  getItem(key) { return this.#kept.get(key) ?? null; }
  setItem(key, value) { this.#kept.set(key, value); }
  removeItem(key) { this.#kept.delete(key); }
}

/** `localStorage` or `sessionStorage`; where the browser blocks it, one that passes. */
export function storageOf(name) {
  try {
    return window[name] ?? new Passing();
  } catch {
    return new Passing();
  }
}

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

// versions of a message -----------------------------------------------------------------------------------------------

/** Makes a message another version of what stood in its place: the messages from there on. */
export function beside(tail, message) {
  const { branches = [null] } = tail[0];
  delete tail[0].branches;
  message.branches = [...branches.map((other) => other ?? tail), null];
}

/** Shows another version of the message at a place, and what followed that. */
export function choose(chat, at, version) {
  const tail = chat.messages.splice(at);
  const { branches } = tail[0];
  delete tail[0].branches;
  branches[branches.indexOf(null)] = tail;
  const [first, ...rest] = branches[version];
  branches[version] = null;
  chat.messages.push({ ...first, branches }, ...rest);
}

/** Whether all these words, in lower case, are in a title or a message, of any version. */
export function matches(chat, words) {
  const texts = (messages) => messages.flatMap(({ content, branches = [] }) => [content, ...branches.flatMap((tail) => texts(tail ?? []))]);
  const text = [chat.title, ...texts(chat.messages)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

// what is sent and saved ----------------------------------------------------------------------------------------------

const partsOf = ({ content, pictures = [] }) => (
  pictures.length ? [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }] : content
);
const withSystem = (chat, said) => (chat.system.trim() ? [{ role: "system", content: chat.system }, ...said] : said);

/** What the server is asked: everything said, with the system prompt before it. */
export const messagesOf = (chat, messages = chat.messages) => (
  withSystem(chat, messages.map((message) => ({ role: message.role, content: partsOf(message) })))
);

const filed = ({ role, content, stopped, reasoning, pictures, branches }) => ({
  role,
  content,
  ...(reasoning && { reasoning_content: sound(reasoning) }),
  ...(stopped && { stopped: true }),
  ...(pictures && { pictures }),
  ...(branches && { branches: branches.map((tail) => tail && tail.map(filed)) }),
});

const documentOf = (chat, model, messages = chat.messages) => (
  { format: FORMAT, version: VERSION, model, title: nameOf(chat), messages: withSystem(chat, messages.map(filed)) }
);

/** The text of a file; a command reads what is shown, this page the pictures and the other versions too. */
export function encode(chat, model) {
  const answered = structuredClone(chat);
  const last = answered.messages.length - 1;
  if (answered.messages.length % 2) {  // a question without an answer is no part of it; another version of it may be
    const version = answered.messages[last].branches?.findIndex((tail) => tail?.length % 2 === 0) ?? -1;
    if (version < 0) answered.messages.pop();
    else choose(answered, last, version);
  }
  return `${JSON.stringify(documentOf(answered, model), null, 1)}\n`;
}

export function encodeAll(chats, model) {
  const documents = chats.map((chat) => documentOf(chat, model));
  return `${JSON.stringify({ format: FORMAT_OF_ALL, version: VERSION, chats: documents }, null, 1)}\n`;
}

/** The title, system prompt and messages of each conversation in a file; throws an Error that says what is wrong with it. */
export function decode(text) {
  let table;
  try {
    table = JSON.parse(text);
  } catch {
    throw new Error("it is not valid JSON");
  }
  if (table?.format === FORMAT_OF_ALL && Array.isArray(table.chats)) return table.chats.map(chatOf);
  const chat = chatOf(table);
  if (chat.messages.length % 2) throw new Error("it ends with a question");
  return [chat];
}

function chatOf(table) {
  if (table?.format !== FORMAT) throw new Error(`it lacks "format": "${FORMAT}"`);
  if (!Number.isInteger(table.version) || table.version < 1) throw new Error("it has no version");
  if (table.version > VERSION) throw new Error(`it has version ${table.version}; this page reads ${VERSION}`);
  if (!Array.isArray(table.messages)) throw new Error('it has no list of "messages"');
  const hasSystem = table.messages[0]?.role === "system";
  if (hasSystem && !isText(table.messages[0].content)) throw new Error("message 1 is not the system's, or no text");
  const messages = messagesIn(table.messages.slice(hasSystem ? 1 : 0), 0, hasSystem ? 1 : 0);
  return {
    title: typeof table.title === "string" ? table.title : "",
    system: hasSystem ? table.messages[0].content : "",
    messages,
  };
}

const isText = (text) => typeof text === "string" && sound(text) === text;

/** Messages of a file as a chat has them; `first` is the place of the first, which says whose it is. */
function messagesIn(list, first, before, depth = 0) {
  return list.map((message, index) => {
    const [at, wrong] = [first + index, (words) => new Error(`message ${first + index + 1 + before} ${words}`)];
    const role = ["user", "assistant"][at % 2];
    const { content, stopped, reasoning_content: reasoning = "", pictures = [], branches } = message ?? {};
    if (message?.role !== role || ![content, reasoning].every(isText) || !["undefined", "boolean"].includes(typeof stopped))
      throw wrong(`is not the ${role}'s, or no text`);
    if (!Array.isArray(pictures) || !pictures.every(isPicture) || (pictures.length && role !== "user"))
      throw wrong("has a picture that is none");
    const read = { role, content, ...(stopped && { stopped }), ...(reasoning && { reasoning }), ...(pictures.length && { pictures }) };
    if (branches === undefined) return read;
    const sounds = Array.isArray(branches) && branches.filter((tail) => tail === null).length === 1
      && branches.every((tail) => tail === null || (Array.isArray(tail) && tail.length && tail[0]?.branches === undefined));
    if (!sounds || depth > DEEPEST) throw wrong("has versions that are none");
    return { ...read, branches: branches.map((tail) => tail && messagesIn(tail, at, before, depth + 1)) };
  });
}
