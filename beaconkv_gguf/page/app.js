// The page: brings chats, messages, gauge and settings together.

import { properties, useKey } from "./api.js";
import { Reply, titleOf } from "./chat.js";
import { $, announce, icon, notice, toast } from "./dom.js";
import { Gauge } from "./gauge.js";
import { fit, isEnter, MessageList } from "./messages.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { keep, load, newChat, readChat, Store } from "./store.js";

const SAVE_EVERY = 2000; // ms, while a reply is being written
const ANNOUNCED = 600; // characters of a reply that a screen reader is told

const store = new Store(notice, {
  isBusy: (id) => replies.has(store.get(id)),
  onChange: (id) => (id === chat.id && store.get(id) ? open(store.get(id)) : show()),
});
const gauge = new Gauge();
const replies = new Map(); // the running ones, by chat
const settings = new Settings(() => {
  useKey(settings.key);
  if (!server) connect();
});
const messages = new MessageList({
  edit: (message, text) => answer(cut(message, text)),
  regenerate: () => answer(cut(chat.messages.at(-1))),
  resume: () => answer(),
});
const sidebar = new Sidebar({
  open: (other) => {
    open(other);
    sidebar.closeIfItCovers();
    focusPrompt();
  },
  rename: (other, title) => {
    other.title = title;
    store.save(other);
    show();
  },
  remove,
});
const prompt = $("#prompt");
// On a touch screen the focus would bring up the keyboard.
const focusPrompt = () => matchMedia("(hover: hover)").matches && prompt.focus();

let chat = newChat();
let server; // /props

// Chats

function open(other) {
  chat = other;
  const kept = store.get(chat.id);
  history.replaceState(null, "", kept ? `#${chat.id}` : location.pathname + location.search);
  messages.show(chat, replies.get(chat));
  show();
}

// Everything around the messages.
function show() {
  const title = chat.title || "New chat";
  $("#title").textContent = title;
  document.title = chat.title ? `${title} · beaconkv` : "beaconkv";
  $("#stop").hidden = !replies.has(chat);
  $("#send").hidden = replies.has(chat);
  $("#export").disabled = chat.messages.length === 0;
  gauge.show(chat, replies.get(chat)?.timings);
  sidebar.show(store.list(), chat, (other) => replies.has(other));
}

function startChat() {
  open(newChat());
  sidebar.closeIfItCovers();
  focusPrompt();
}

function remove(other) {
  replies.get(other)?.stop();
  store.remove(other);
  if (other === chat) startChat();
  else show();
  toast(`Deleted “${other.title}”`, "Undo", () => {
    store.save(other);
    open(other);
  });
}

function exportChat() {
  const file = new Blob([JSON.stringify({ format: "beaconkv-chat", chat }, null, 2)], {
    type: "application/json",
  });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = `${chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40).replace(/^-|-$/g, "") || "chat"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function importChat(file) {
  let read = null;
  try {
    read = readChat(JSON.parse(await file.text()).chat);
  } catch {
    // Not JSON.
  }
  if (!read) return toast("This file holds no chat of this page.");
  if (store.get(read.id)) read.id = newChat().id;
  store.save(read);
  open(read);
}

// Messages

function send() {
  const text = prompt.value.trim();
  if (!text || replies.has(chat)) return;
  chat.messages.push({ role: "user", content: text });
  chat.title ||= titleOf(text);
  prompt.value = "";
  keep("draft", "");
  fit(prompt);
  answer();
}

// Takes `message` and all after it away; `text` takes its place.
function cut(message, text) {
  replies.get(chat)?.stop();
  chat.messages.splice(chat.messages.indexOf(message));
  if (text !== undefined) chat.messages.push({ role: "user", content: text.trim() });
}

async function answer() {
  const own = chat; // the user may look at another one before the end
  const reply = new Reply(own, settings, changed);
  replies.set(own, reply);
  own.updated = Date.now();
  store.save(own);
  open(own);
  if (document.activeElement === document.body) focusPrompt(); // the button pressed is gone
  announce("The reply is being written.");
  const error = await reply.run();
  // A reply that was stopped for a new one has left its place to it.
  if (replies.get(own) === reply) replies.delete(own);
  if (store.get(own.id) === own) store.save(own);
  if (own === chat) messages.finish(reply);
  show();
  gauge.show(chat, own === chat ? reply.timings : undefined);
  if (own === chat && !error) announce(`The reply: ${reply.message.content.slice(0, ANNOUNCED)}`);
  if (error?.kind === "key") askForKey();
  if (error)
    server = undefined; // it may be another one when it is back
  else if (!server) connect();
}

function changed(reply) {
  if (reply.chat === chat) {
    messages.update(reply);
    gauge.show(chat, reply.timings);
  }
  if (Date.now() - reply.savedAt > SAVE_EVERY) save(reply);
}

function save(reply) {
  reply.savedAt = Date.now();
  if (store.get(reply.chat.id) === reply.chat) store.save(reply.chat);
}

// The server

function askForKey() {
  settings.open("key", settings.key ? "The server does not accept this key." : "The server asks for a key.");
}

async function connect() {
  const label = $("#model");
  try {
    server = await properties();
  } catch (error) {
    label.textContent = error.kind === "loading" ? "The model is being loaded…" : "Not connected";
    if (error.kind === "loading") setTimeout(connect, 1000);
    else if (error.kind === "key") askForKey();
    else notice(error.message);
    return;
  }
  const path = server.model_alias || server.model_path || "";
  label.textContent = path
    .split(/[\\/]/)
    .at(-1)
    .replace(/\.gguf$/i, "");
  label.title = path;
  $("#settings-model").textContent = label.textContent;
  settings.show(server);
  gauge.serve(server.beaconkv);
}

// The theme: as the system has it, light or dark

function showTheme() {
  const { theme } = document.documentElement.dataset;
  const names = {
    auto: ["auto", "as the system"],
    light: ["sun", "light"],
    dark: ["moon", "dark"],
  };
  const [image, name] = names[theme];
  const button = $("#theme");
  button.replaceChildren(icon(image));
  button.title = `Theme: ${name}`;
  button.setAttribute("aria-label", `Theme: ${name}`);
}

$("#theme").addEventListener("click", () => {
  const { theme } = document.documentElement.dataset;
  setTheme(themes[(themes.indexOf(theme) + 1) % themes.length]);
  keep("theme", document.documentElement.dataset.theme);
  showTheme();
});

// Buttons and keys

$("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("#stop").addEventListener("click", () => {
  replies.get(chat)?.stop();
  focusPrompt();
});
$("#new-chat").addEventListener("click", startChat);
$("#export").addEventListener("click", exportChat);
$("#import").addEventListener("click", () => $("#import-file").click());
$("#import-file").addEventListener("change", ({ target }) => {
  if (target.files[0]) importChat(target.files[0]);
  target.value = "";
});
$(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the chat
  prompt.focus();
});
prompt.addEventListener("input", () => {
  fit(prompt);
  keep("draft", prompt.value);
});
prompt.addEventListener("keydown", (event) => {
  if (!isEnter(event)) return;
  event.preventDefault();
  send();
});
const isMac = /Mac|iP/.test(navigator.platform);
$("#new-chat-key").textContent = isMac ? "⌘K" : "Ctrl K";
document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Escape" && sidebar.covers) sidebar.close();
  else if (event.key === "Escape" && !$("dialog[open]")) replies.get(chat)?.stop();
  if ((isMac ? event.metaKey : event.ctrlKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    startChat();
  }
});
addEventListener("pagehide", () => replies.forEach(save));
addEventListener("hashchange", () => {
  const other = store.get(location.hash.slice(1));
  if (other && other !== chat) open(other);
});

// Start

useKey(settings.key);
settings.show();
showTheme();
await store.open();
open(store.get(location.hash.slice(1)) ?? chat);
prompt.value = load("draft", "");
fit(prompt);
focusPrompt();
connect();
