// The page: wires the conversation, the server's answers and what the browser keeps to the elements of page.html.

import { beside, Chats, choose, decode, encode, encodeAll, matches, MOST_BYTES, messagesOf, nameOf, sound, storageOf } from "./chats.js";
import { pictureOf, shown } from "./pictures.js";
import { showNone, showStatus } from "./status.js";
import { ask, headersOf, Trouble } from "./talk.js";
import { workOf } from "./timing.js";
import { button, copy, made, Message, timeOf, troubleNode, versions, wordsBelow, wordsMeanwhile } from "./view.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const SETTINGS = "rabbitllm.settings";
const KEY = "rabbitllm.key";
const MODEL = "rabbitllm.model";
const COLORS = "rabbitllm.colors";

const lasting = storageOf("localStorage");
const ofTab = storageOf("sessionStorage");
const chats = new Chats(lasting);
let models = [];  // as the server lists them
let model = "";
let chat = chats.fresh();
let pictures = [];  // of the next question
let work = null;  // the answer that is coming: {chat, answer, before, abort, started, first, pieces, message}
let isFull = false;  // the browser's storage
const troubles = new Map();  // id of a chat -> what went wrong with its last question

// what is kept ---------------------------------------------------------------------------------------------------------

function keep(changed, now = Date.now()) {
  changed.changed = now;
  // an answer that is asked for again goes when another one comes
  const waits = work?.chat === changed && !changed.messages.includes(work.answer) ? work.before ?? [] : [];
  put(() => chats.put({ ...changed, messages: [...changed.messages, ...waits] }));
  list();
}

/** Puts something in the browser's storage; the page says so for as long as there is no room. */
function put(action) {
  try {
    action();
    isFull = false;
  } catch {
    isFull = true;
    notify();
  }
}

const stored = (storage, name) => {
  try {
    return JSON.parse(storage.getItem(name)) ?? {};
  } catch {
    return {};
  }
};
const keyOf = () => ofTab.getItem(KEY) ?? "";

function useKey(key) {
  put(() => ofTab.setItem(KEY, key.trim()));
  findModel();
}

// what is seen ---------------------------------------------------------------------------------------------------------

function notify(words = "", ...actions) {
  const full = isFull ? "The browser's storage is full. Export this conversation, and delete old ones." : "";
  const passes = lasting.isPassing && chats.all().length ? "This browser keeps nothing: export what you need later." : "";
  $("notice").replaceChildren(...[words, ...actions, full, passes].filter(Boolean));
}

function list() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const entries = chats.all().filter((kept) => matches(kept, words)).map((kept) => {
    const open = button(nameOf(kept), () => show(kept.id === work?.chat.id ? work.chat : kept));
    open.dir = "auto";
    if (kept.id === chat.id) open.setAttribute("aria-current", "true");
    return made("li", {}, open);
  });
  const hadFocus = $("chats").contains(document.activeElement);
  $("chats").replaceChildren(...entries);
  $("chats").hidden = !($("none").hidden = !!entries.length || !words.length);
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
  notify();
  list();
  draw();
  $("log").scrollTop = $("log").scrollHeight;
}

const nodes = new WeakMap();  // message -> its Message and what that shows

function nodeOf(message, at) {
  if (message === work?.answer) return work.message.node;
  const { role, content, branches, took, reasoning } = message;
  const isLast = role === "assistant" && at === chat.messages.length - 1 && !work;
  const shows = JSON.stringify([isLast, at, branches?.map((tail) => !tail), took]);
  if (nodes.get(message)?.shows !== shows) {
    const actions = [button("Copy", () => copied(content))];
    if (role === "user") actions.push(button("Edit", () => edit(message)));
    if (isLast) actions.push(button("Ask again", () => again(chat)));
    if (branches) actions.unshift(versions(branches, (version) => idly(() => switchTo(at, version))));
    if (took) actions.push(timeOf(message));
    const drawn = new Message(role, actions, message.pictures);
    drawn.change(content, role === "assistant" ? wordsBelow(message) : "", reasoning);
    nodes.set(message, { drawn, shows });
  }
  return nodes.get(message).drawn.node;
}

/** Does what must not be done while an answer comes. */
function idly(action) {
  if (work) notify("Stop the answer first.", button("Stop", stop));
  else action();
}

function switchTo(at, version) {
  choose(chat, at, version);
  troubles.delete(chat.id);
  keep(chat);
  draw();
}

const edit = (message) => idly(() => {
  nodes.get(message).drawn.edit(message.content, (text) => idly(() => {
    const tail = chat.messages.splice(chat.messages.indexOf(message));
    const edited = { role: "user", content: sound(text), ...(message.pictures && { pictures: message.pictures }) };
    if (tail.length > 1) beside(tail, edited);
    else if (message.branches) edited.branches = message.branches;  // without an answer it is no version
    chat.messages.push(edited);
    $("question").focus();
    answer(chat);
  }));
});

/** What is there already stays: screen readers read what is new, and what is selected stays so. */
function draw() {
  const found = chat.messages.map(nodeOf);
  if (work?.chat === chat && !chat.messages.includes(work.answer)) found.push(work.message.node);
  const trouble = work?.chat === chat ? null : troubles.get(chat.id) ?? unanswered();
  if (trouble) {
    const withKey = (key) => {
      useKey(key);
      again(chat);
    };
    const question = chat.messages.at(-1)?.role === "user" ? chat.messages.at(-1) : null;
    found.push(troubleNode(trouble, work ? {} : { again: () => again(chat), edit: question && (() => edit(question)) }, withKey));
  }
  if (!found.length) found.push(hello());
  const [log, focused] = [$("log"), document.activeElement];
  const place = [...log.childNodes].findIndex((node) => node.contains(focused));
  for (const node of [...log.childNodes]) if (!found.includes(node)) node.remove();
  found.forEach((node, at) => log.childNodes[at] === node || log.insertBefore(node, log.childNodes[at] ?? null));
  if (place >= 0 && !focused.isConnected) {  // Tab goes on from what has come in its place
    const buttons = [...log.childNodes[place]?.querySelectorAll("button:enabled") ?? []];
    (buttons.find(({ textContent }) => textContent === focused.textContent) ?? log).focus({ preventScroll: true });
  }
  log.ariaBusy = String(work?.chat === chat);
  $("send").hidden = !!work;
  $("stop").hidden = !work;
}

function unanswered() {
  return chat.messages.at(-1)?.role === "user" ? new Trouble("This question has no answer.") : null;
}

function hello() {
  const icon = made("img", { src: "static/icon.svg", alt: "", width: 56, height: 56 });
  const where = lasting.isPassing ? "go with this page: this browser keeps nothing. They are" : "are stored in this browser and";
  return made("p", { className: "hello" }, icon, `Your messages ${where} sent to this server only.`);
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
  const question = { role: "user", content: sound($("question").value), ...(pictures.length && { pictures }) };
  if (!(question.content.trim() || pictures.length) || work) return;
  if (chat.messages.length % 2) {  // a question that got no answer is not part of it
    const { branches } = chat.messages.pop();
    if (branches) question.branches = branches;
  }
  chat.messages.push(question);
  $("question").value = "";
  attach([]);
  fit();
  answer(chat);
}

function again(asked) {
  if (work) return;
  const before = asked.messages.at(-1)?.role === "assistant" ? [asked.messages.pop()] : null;
  if (asked.messages.length) answer(asked, before);
}

function bodyOf(asked) {
  const settings = stored(lasting, SETTINGS);
  const numbers = NUMBERS.filter((name) => Number.isFinite(settings[name])).map((name) => [name, settings[name]]);
  const fixed = { messages: messagesOf(asked), stream: true, stream_options: { include_usage: true } };
  return { ...(model && { model }), ...fixed, ...Object.fromEntries(numbers) };
}

/** Asks for an answer; `before` is the one that it is another version of, which stays alone if nothing comes. */
async function answer(asked, before = null) {
  const body = bodyOf(asked);
  const message = new Message("assistant");
  const coming = { role: "assistant", content: "", stopped: true, ...(models.length > 1 && { model }) };
  const mine = { chat: asked, answer: coming, before, abort: new AbortController(), started: performance.now(), first: null, pieces: 0, message };
  const arrive = () => {
    if (before) beside(before, coming);
    asked.messages.push(coming);
  };
  work = mine;
  troubles.delete(asked.id);
  keep(asked);
  show(asked);
  const clock = setInterval(meanwhile, 500);
  let [drawn, saved, trouble, last, usage] = [0, Date.now(), null, 0, null];
  meanwhile();
  const atFirst = poll();
  try {
    for await (const event of ask(body, { key: keyOf(), signal: mine.abort.signal })) {
      if (event.finish) [coming.stopped, coming.ended] = [false, event.finish];
      if (event.usage) ({ usage } = event);
      if (!event.text && !event.reasoning) continue;
      last = since(mine);
      mine.first ??= last;
      mine.pieces++;
      coming.content += event.text ?? "";
      if (event.reasoning) coming.reasoning = (coming.reasoning ?? "") + event.reasoning;
      if (asked.messages.at(-1) !== coming) arrive();
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
    if (asked.messages.at(-1) !== coming) trouble ? asked.messages.push(...before ?? []) : arrive();
    if (mine.first !== null) {
      coming.took = { tokens: mine.pieces, about: !usage, first: mine.first, seconds: last, ...usage };
    }
    if (!coming.stopped) delete coming.stopped;
    if (trouble) troubles.set(asked.id, trouble);
    if (chats.get(asked.id)) keep(asked);
    following(draw);
    notify(trouble ? "" : coming.stopped ? "Stopped." : "");
  }
  const [first, end] = [await atFirst, await poll()];
  if (!first || !end || !coming.took || chats.get(asked.id)?.changed !== asked.changed) return;
  coming.took.work = workOf(first, end, usage?.tokens ?? Infinity);
  keep(asked, asked.changed);  // it was changed by the answer: a late status moves it to no other place
  following(draw);
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
    models = (await get("v1/models")).data;
    $("model").replaceChildren(...models.map(({ id }) => made("option", { value: id }, id)));
    $("model").disabled = models.length < 2;
    useModel(lasting.getItem(MODEL));
    notify();
    await poll();
  } catch (error) {
    if (!error.wantsKey) return;
    const open = button("Give it", () => openSettings());
    notify(error.message, open);
  }
}

function useModel(id) {
  const used = models.find((listed) => listed.id === id) ?? models[0];
  model = $("model").value = used.id;
  document.title = `${model} · RabbitLLM`;
  const kinds = used.input_modalities ?? ["image"];  // of a model that is not loaded they are not known
  $("attach").hidden = !kinds.includes("image");
}

function showSampling({ words, ...options }) {
  $("sampling").textContent = words && ` (${words})`;
  for (const name of NUMBERS) $(name).placeholder = options[name] ?? "";
}

let polling = 0;
/** Shows the server's state and returns it; nothing if there is none. */
async function poll() {
  clearTimeout(polling);
  let status;
  if (!document.hidden) {
    try {
      status = await get(models.length > 1 ? `status?model=${encodeURIComponent(model)}` : "status");
      showStatus(status, work);
      showSampling(status.sampling);
      if (!model) findModel();
    } catch (error) {
      showNone(error.wantsKey ? "the status needs an API key" : "no status from the server");
    }
  }
  clearTimeout(polling);
  polling = setTimeout(poll, work ? 1000 : 5000);
  return status;
}

// settings and files ---------------------------------------------------------------------------------------------------

function openSettings() {
  const settings = stored(lasting, SETTINGS);
  for (const name of NUMBERS) $(name).value = settings[name] ?? "";
  $("system").value = chat.system;
  $("key").value = keyOf();
  $("settings").showModal();
}

function closeSettings() {
  const given = NUMBERS.filter((name) => $(name).value !== "").map((name) => [name, $(name).valueAsNumber]);
  put(() => lasting.setItem(SETTINGS, JSON.stringify(Object.fromEntries(given))));
  const system = sound($("system").value);
  if (system !== chat.system) {
    chat.system = system;
    if (chat.messages.length) keep(chat);
  }
  if ($("key").value.trim() !== keyOf()) useKey($("key").value);
}

function save(text, title) {
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  made("a", { href, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

async function importChats() {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  try {
    if (file.size > MOST_BYTES) throw new Error("it is too large");
    const read = decode(await file.text()).map((fields) => ({ ...chats.fresh(), ...fields }));
    const now = Date.now();
    read.forEach((imported, at) => keep(imported, now - at));  // in this order
    if (read.length) show(read[0]);
  } catch (error) {
    notify(`${file.name} was not imported: ${error.message}.`);
  }
}

/** The pictures of the next question. */
function attach(chosen) {
  pictures = chosen;
  $("pictures").replaceChildren(...pictures.map((url) => {
    const frame = made("div", { className: "picture" }, shown(url));
    frame.append(Object.assign(button("✕", () => attach(pictures.filter((other) => other !== url))), { ariaLabel: "Remove this picture" }));
    return frame;
  }));
}

async function addPictures(files) {
  if ($("attach").hidden) return notify("This model takes no pictures.");
  for (const file of files) {
    try {
      const url = await pictureOf(file);
      if (!pictures.includes(url)) attach([...pictures, url]);
    } catch {
      notify(`${file.name} is not a picture that this browser can read.`);
    }
  }
  $("question").focus();
}

function remove(removed, words) {
  if (removed.some(({ id }) => id === work?.chat.id)) stop();
  removed.forEach(({ id }) => chats.remove(id));
  show(chats.fresh());
  const undo = button("Undo", () => {
    removed.forEach((one) => keep(one, one.changed));
    show(removed[0]);
  });
  notify(words, undo);
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
$("question").onpaste = (event) => {
  const files = [...event.clipboardData.files].filter(({ type }) => type.startsWith("image/"));
  if (!files.length) return;
  event.preventDefault();
  addPictures(files);
};
document.ondragover = (event) => event.dataTransfer.types.includes("Files") && event.preventDefault();
document.ondrop = (event) => {
  if (!event.dataTransfer.files.length) return;  // text goes where it is dropped
  event.preventDefault();
  addPictures(event.dataTransfer.files);
};
document.onkeydown = (event) => {
  const control = event.ctrlKey || event.metaKey;
  const does = SHORTCUTS[[control && "ctrl", event.shiftKey && "shift", event.key.toLowerCase()].filter(Boolean).join(" ")];
  if (!does || $("settings").open || event.isComposing) return;
  if (does(event) !== false) event.preventDefault();
};
/** A shortcut that does nothing returns false. */
const SHORTCUTS = {
  "escape": () => {
    if (document.body.classList.contains("menu")) closeMenu();
    else if (document.activeElement === $("find") && $("find").value) return false;  // it is emptied
    else stopByHand();
  },
  "shift escape": () => $("question").focus(),
  "ctrl k": () => {
    if (getComputedStyle($("side")).display === "none") openMenu(true);
    $("find").focus();
  },
  "ctrl shift o": () => $("new").onclick(),
  "ctrl .": () => openSettings(),
  "arrowup": (event) => {
    const asked = chat.messages.findLast(({ role }) => role === "user");
    if (event.target !== $("question") || $("question").value || !asked || work) return false;
    edit(asked);
  },
};
$("attach").onclick = () => $("photos").click();
$("photos").onchange = async () => {
  await addPictures([...$("photos").files]);
  $("photos").value = "";
};
$("find").oninput = list;
$("model").onchange = () => {
  put(() => lasting.setItem(MODEL, $("model").value));
  useModel($("model").value);
};
$("colors").onchange = () => {
  put(() => lasting.setItem(COLORS, $("colors").value));
  useColors($("colors").value);
};
const useColors = (name) => (document.documentElement.dataset.colors = $("colors").value = name);
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
$("delete").onclick = () => remove([chat], `“${nameOf(chat)}” is deleted.`);
$("delete-all").onclick = () => {
  $("settings").close();
  const all = chats.all();
  if (all.length) remove(all, `All conversations are deleted: ${all.length}.`);
};
$("open").onclick = openSettings;
$("close").onclick = () => $("settings").close();
$("settings").onclose = closeSettings;
$("export").onclick = () => save(encode(chat, model), nameOf(chat));
$("export-all").onclick = () => save(encodeAll(chats.all(), model), "conversations");
$("import").onclick = () => $("file").click();
$("file").onchange = importChats;
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

useColors(lasting.getItem(COLORS) ?? "");
show(chats.all()[0] ?? chats.fresh());
findModel();
poll();
fit();
$("question").focus();
