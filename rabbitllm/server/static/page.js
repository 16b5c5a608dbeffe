// The page: wires the conversation, the server's answers and what the browser keeps to the elements of page.html.

import { Chats, MOST_BYTES, decode, encode, messagesOf, nameOf, sound } from "./chats.js";
import { showNone, showStatus } from "./status.js";
import { ask, headersOf, Trouble } from "./talk.js";
import { button, copy, made, Message, troubleNode, wordsBelow, wordsMeanwhile } from "./view.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const SETTINGS = "rabbitllm.settings";
const KEY = "rabbitllm.key";

const chats = new Chats(localStorage);
let model = "";
let chat = chats.fresh();
let work = null;  // the answer that is coming: {chat, answer, abort, started, first, pieces, message}
const troubles = new Map();  // id of a chat -> what went wrong with its last question

// what is kept ---------------------------------------------------------------------------------------------------------

function keep(changed) {
  changed.changed = Date.now();
  try {
    chats.put(changed);
  } catch {
    notify("The browser's storage is full. Export this conversation, and delete old ones.");
  }
  list();
}

const stored = (storage, name) => {
  try {
    return JSON.parse(storage.getItem(name)) ?? {};
  } catch {
    return {};
  }
};
const keyOf = () => sessionStorage.getItem(KEY) ?? "";

function useKey(key) {
  sessionStorage.setItem(KEY, key.trim());
  findModel();
}

// what is seen ---------------------------------------------------------------------------------------------------------

function notify(words, ...actions) {
  $("notice").replaceChildren(...(words ? [words, ...actions] : []));
}

function list() {
  const entries = chats.all().map((kept) => {
    const open = button(nameOf(kept), () => show(kept.id === work?.chat.id ? work.chat : kept));
    open.dir = "auto";
    if (kept.id === chat.id) open.setAttribute("aria-current", "true");
    return made("li", {}, open);
  });
  const hadFocus = $("chats").contains(document.activeElement);
  $("chats").replaceChildren(...entries);
  if (hadFocus) $("chats").querySelector("[aria-current]")?.focus();
}

/** The list of conversations, which covers a narrow page. */
function openMenu(open) {
  document.body.classList.toggle("menu", open);
  $("menu").ariaExpanded = String(open);
}

function show(shown) {
  chat = shown;
  openMenu(false);
  $("title").value = chat.title || (chat.messages.length ? nameOf(chat) : "");
  $("title").placeholder = "New conversation";
  $("export").disabled = $("delete").disabled = !chat.messages.length;
  notify("");
  list();
  draw();
  $("log").scrollTop = $("log").scrollHeight;
}

const nodes = new WeakMap();  // message -> its node and what that shows

function nodeOf(message, isLast) {
  if (message === work?.answer) return work.message.node;
  const actions = [button("Copy", () => copied(message.content))];
  if (message.role === "assistant" && isLast && !work) actions.push(button("Ask again", () => again(chat)));
  if (nodes.get(message)?.actions !== actions.length) {
    const drawn = new Message(message.role, actions);
    drawn.change(message.content, message.role === "assistant" ? wordsBelow(message) : "", message.reasoning);
    nodes.set(message, { node: drawn.node, actions: actions.length });
  }
  return nodes.get(message).node;
}

/** What is there already stays: screen readers read what is new, and what is selected stays so. */
function draw() {
  const found = chat.messages.map((message, at) => nodeOf(message, at === chat.messages.length - 1));
  if (work?.chat === chat && !chat.messages.includes(work.answer)) found.push(work.message.node);
  const trouble = work?.chat === chat ? null : troubles.get(chat.id) ?? unanswered();
  if (trouble) {
    const withKey = (key) => {
      useKey(key);
      again(chat);
    };
    const edit = chat.messages.at(-1)?.role === "user" ? takeBack : null;
    found.push(troubleNode(trouble, work ? {} : { again: () => again(chat), edit }, withKey));
  }
  if (!found.length) found.push(hello());
  const log = $("log");
  for (const node of [...log.childNodes]) if (!found.includes(node)) node.remove();
  found.forEach((node, at) => log.childNodes[at] === node || log.insertBefore(node, log.childNodes[at] ?? null));
  log.ariaBusy = String(work?.chat === chat);
  $("send").hidden = !!work;
  $("stop").hidden = !work;
}

function unanswered() {
  return chat.messages.at(-1)?.role === "user" ? new Trouble("This question has no answer.") : null;
}

function hello() {
  const icon = made("img", { src: "static/icon.svg", alt: "", width: 56, height: 56 });
  return made("p", { className: "hello" }, icon, "Your messages are stored in this browser and sent to this server only.");
}

/** Changes what is in the log, and keeps its end in view where it was in view. */
function following(change) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function copied(text) {
  await copy(text);
  notify("Copied.");
}

// one answer -----------------------------------------------------------------------------------------------------------

function send() {
  const question = sound($("question").value);
  if (!question.trim() || work) return;
  if (chat.messages.length % 2) chat.messages.pop();  // a question that got no answer is not part of it
  chat.messages.push({ role: "user", content: question });
  $("question").value = "";
  fit();
  answer(chat);
}

/** A question without an answer goes back into the field. */
function takeBack() {
  if (work) return;
  const question = chat.messages.pop().content;
  $("question").value = [question, $("question").value].filter(Boolean).join("\n");
  troubles.delete(chat.id);
  if (chat.messages.length) keep(chat);
  else chats.remove(chat.id);
  show(chat);
  fit();
  $("question").focus();
}

function again(asked) {
  if (work) return;
  const before = asked.messages.at(-1)?.role === "assistant" ? asked.messages.pop() : null;
  if (asked.messages.length) answer(asked, before);
}

function bodyOf(asked) {
  const settings = stored(localStorage, SETTINGS);
  const numbers = NUMBERS.filter((name) => Number.isFinite(settings[name])).map((name) => [name, settings[name]]);
  const fixed = { messages: messagesOf(asked), stream: true, stream_options: { include_usage: true } };
  return { ...(model && { model }), ...fixed, ...Object.fromEntries(numbers) };
}

/** Asks for an answer; `before` is the one that it takes the place of, which stays if nothing comes. */
async function answer(asked, before = null) {
  const body = bodyOf(asked);
  const message = new Message("assistant");
  const coming = { role: "assistant", content: "", stopped: true };
  const mine = { chat: asked, answer: coming, abort: new AbortController(), started: performance.now(), first: null, pieces: 0, message };
  work = mine;
  troubles.delete(asked.id);
  keep(asked);
  show(asked);
  const clock = setInterval(meanwhile, 500);
  let [drawn, saved, trouble, last, tokens, thoughts] = [0, Date.now(), null, 0, null, 0];
  meanwhile();
  poll();
  try {
    for await (const event of ask(body, { key: keyOf(), signal: mine.abort.signal })) {
      if (event.finish) [coming.stopped, coming.ended] = [false, event.finish];
      if (event.tokens !== undefined) ({ tokens, thoughts } = event);
      if (!event.text && !event.reasoning) continue;
      last = since(mine);
      mine.first ??= last;
      mine.pieces++;
      coming.content += event.text ?? "";
      if (event.reasoning) coming.reasoning = (coming.reasoning ?? "") + event.reasoning;
      if (asked.messages.at(-1) !== coming) asked.messages.push(coming);
      drawn ||= requestAnimationFrame(() => {
        drawn = 0;
        if (work === mine) meanwhile();
      });
      if (Date.now() - saved > 2000) {
        saved = Date.now();
        keep(asked);
      }
    }
  } catch (error) {
    if (error instanceof Trouble) trouble = error;
    else if (!mine.abort.signal.aborted) throw error;
    else if (mine.first === null) trouble = new Trouble("Stopped before the first token.");
  } finally {
    clearInterval(clock);
    cancelAnimationFrame(drawn);
    work = null;
    // an answer of no text is one too
    if (asked.messages.at(-1) !== coming && !(trouble && !before)) asked.messages.push(trouble ? before : coming);
    if (mine.first !== null) {
      coming.took = { tokens: tokens ?? mine.pieces, thoughts, about: tokens === null, first: mine.first, seconds: last };
    }
    if (!coming.stopped) delete coming.stopped;
    if (trouble) troubles.set(asked.id, trouble);
    if (chats.get(asked.id)) keep(asked);
    following(draw);
    notify(trouble ? "" : coming.stopped ? "Stopped." : "");
    poll();
  }
}

const since = (coming) => (performance.now() - coming.started) / 1000;

function meanwhile() {
  const { chat: asked, answer: coming, message, first, pieces } = work;
  if (asked !== chat) return;
  following(() => message.change(coming.content, wordsMeanwhile(first, pieces, since(work)), coming.reasoning));
}

const stop = () => work?.abort.abort();

/** Stop, as the user asks for it: what follows is the next question. */
function stopByHand() {
  if (!work) return;
  stop();
  $("question").focus();
}

// the server's state ---------------------------------------------------------------------------------------------------

async function get(path) {
  const reply = await fetch(path, { headers: headersOf(keyOf()) });
  if (reply.status === 401) throw new Trouble("This server requires an API key.", { wantsKey: true });
  if (!reply.ok) throw new Trouble(`HTTP ${reply.status}`);
  return reply.json();
}

async function findModel() {
  try {
    model = (await get("v1/models")).data[0].id;
    $("model").textContent = model;
    document.title = `${model} · RabbitLLM`;
    notify("");
    await poll();
  } catch (error) {
    if (!error.wantsKey) return;
    const open = button("Give it", () => openSettings());
    notify(error.message, open);
  }
}

function showSampling({ words, ...options }) {
  $("sampling").textContent = ` (${words})`;
  for (const name of NUMBERS) $(name).placeholder = options[name] ?? "";
}

let polling = 0;
async function poll() {
  clearTimeout(polling);
  if (!document.hidden) {
    try {
      const status = await get("status");
      showStatus(status, work);
      showSampling(status.sampling);
      if (!model) findModel();
    } catch (error) {
      showNone(error.wantsKey ? "the status needs an API key" : "no status from the server");
    }
  }
  clearTimeout(polling);
  polling = setTimeout(poll, work ? 1000 : 5000);
}

// settings and files ---------------------------------------------------------------------------------------------------

function openSettings() {
  const settings = stored(localStorage, SETTINGS);
  for (const name of NUMBERS) $(name).value = settings[name] ?? "";
  $("system").value = chat.system;
  $("key").value = keyOf();
  $("settings").showModal();
}

function closeSettings() {
  const given = NUMBERS.filter((name) => $(name).value !== "").map((name) => [name, $(name).valueAsNumber]);
  localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(given)));
  const system = sound($("system").value);
  if (system !== chat.system) {
    chat.system = system;
    if (chat.messages.length) keep(chat);
  }
  if ($("key").value.trim() !== keyOf()) useKey($("key").value);
}

function exportChat() {
  const name = nameOf(chat).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
  const href = URL.createObjectURL(new Blob([encode(chat, model)], { type: "application/json" }));
  made("a", { href, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

async function importChat() {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  try {
    if (file.size > MOST_BYTES) throw new Error("it is too large");
    const read = { ...chats.fresh(), ...decode(await file.text()) };
    keep(read);
    show(read);
  } catch (error) {
    notify(`${file.name} was not imported: ${error.message}.`);
  }
}

function remove() {
  const removed = chat;
  if (work?.chat === removed) stop();
  chats.remove(removed.id);
  show(chats.fresh());
  const undo = button("Undo", () => {
    keep(removed);
    show(removed);
  });
  notify(`“${nameOf(removed)}” is deleted.`, undo);
}

function rename() {
  chat.title = sound($("title").value).trim();
  if (chat.messages.length) keep(chat);
  if (!chat.title) $("title").value = chat.messages.length ? nameOf(chat) : "";
}

// what the user does ---------------------------------------------------------------------------------------------------

function fit() {
  const field = $("question");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

$("form").onsubmit = (event) => {
  event.preventDefault();
  send();
};
$("question").oninput = fit;
$("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};
document.onkeydown = (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  if (document.body.classList.contains("menu")) closeMenu();
  else stopByHand();
};
$("stop").onclick = stopByHand;
$("new").onclick = () => {
  show(chats.fresh());
  $("question").focus();
};
const closeMenu = () => {
  openMenu(false);
  $("menu").focus();
};
$("menu").onclick = () => {
  openMenu(true);
  $("shut").focus();
};
$("shut").onclick = closeMenu;
document.querySelector("main").onclick = (event) => event.target === $("menu") || openMenu(false);
$("title").onchange = rename;
$("title").onkeydown = (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();  // or the field that gets the focus gets a new line too
  $("question").focus();
};
$("delete").onclick = remove;
$("open").onclick = openSettings;
$("close").onclick = () => $("settings").close();
$("settings").onclose = closeSettings;
$("export").onclick = exportChat;
$("import").onclick = () => $("file").click();
$("file").onchange = importChat;
$("log").onclick = (event) => {
  if (event.target.className === "copy") copied(event.target.closest(".code").querySelector("code").textContent);
};
addEventListener("pagehide", () => work && keep(work.chat));
addEventListener("storage", (event) => {  // another tab
  const changed = event.key?.endsWith(chat.id) && !work && chats.get(chat.id);
  if (changed) show(changed);
  else list();
});
document.onvisibilitychange = () => document.hidden || poll();

show(chats.all()[0] ?? chats.fresh());
findModel();
poll();
fit();
$("question").focus();
