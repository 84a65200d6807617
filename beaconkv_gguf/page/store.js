// Chats and settings, kept in this browser.
//
// All chats are in memory; the database has a copy of each. Where it fails, the page goes on
// without it and says so.

const DATABASE = "beaconkv";
const CHATS = "chats";

export function newChat() {
  const now = Date.now();
  // randomUUID is for https and localhost alone.
  const id = crypto.randomUUID?.() ?? `${now}-${Math.random()}`;
  return { id, title: "", created: now, updated: now, messages: [] };
}

// A chat of the database or of a file, or null where it is none.
export function readChat(value) {
  const ours = (message) =>
    message && ["user", "assistant"].includes(message.role) && typeof message.content === "string";
  if (typeof value?.id !== "string" || !Array.isArray(value.messages)) return null;
  if (!value.messages.every(ours)) return null;
  const { id, title, created, updated, messages, memory, trace } = value;
  return {
    id,
    title: typeof title === "string" ? title : "",
    created: Number(created) || 0,
    updated: Number(updated) || 0,
    messages: messages.map(readMessage),
    memory: memory && MEMORY.every((name) => Number.isFinite(memory[name])) ? memory : undefined,
    trace: Array.isArray(trace) ? trace.filter(isPoint).slice(-TRACE_LENGTH) : undefined,
  };
}

// What the gauge draws.
const MEMORY = `budget n_ctx n_logical n_held n_evicted n_pinned n_compact us_compact bytes_held
  bytes_full`.split(/\s+/);
const TRACE_LENGTH = 600;
const isPoint = (point) =>
  Array.isArray(point) && point.length === 3 && point.every((value) => Number.isFinite(value));

function readMessage(message) {
  const text = (name) => (typeof message[name] === "string" ? message[name] : undefined);
  const count = (name) => (Number.isFinite(message[name]) ? message[name] : undefined);
  return {
    role: message.role,
    content: message.content,
    reasoning: text("reasoning"),
    reasoningMs: count("reasoningMs"),
    reasoningTokens: count("reasoningTokens"),
    tokens: count("tokens"),
    perSecond: count("perSecond"),
    end: text("end"),
    error: text("error"),
  };
}

export class Store {
  #chats = new Map();
  #database;
  #others = new BroadcastChannel(DATABASE); // the page in other tabs
  #onProblem;
  #watch;

  // `watch`: {isBusy(id), onChange(id)}. A chat that another tab has changed is read again, unless
  // this one is at work on it.
  constructor(onProblem, watch) {
    this.#onProblem = onProblem;
    this.#watch = watch;
    this.#others.onmessage = ({ data }) => this.#reread(data);
  }

  async open() {
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(CHATS, { keyPath: "id" });
      this.#database = await result(request);
      const stored = await result(this.#read().getAll());
      const chats = stored.map(readChat);
      for (const chat of chats) if (chat) this.#chats.set(chat.id, chat);
      const damaged = chats.filter((chat) => chat === null).length;
      if (damaged === 1) this.#onProblem("One saved chat is damaged and was left out.");
      if (damaged > 1) this.#onProblem(`${damaged} saved chats are damaged and were left out.`);
    } catch {
      this.#onProblem(
        "This browser does not let the page save chats. They are here until you close it; " +
          "Export keeps one.",
      );
    }
  }

  // The newest first.
  list() {
    return [...this.#chats.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.#chats.get(id);
  }

  async save(chat) {
    this.#chats.set(chat.id, chat);
    await this.#write((chats) => chats.put(chat), chat.id);
  }

  async remove(chat) {
    this.#chats.delete(chat.id);
    await this.#write((chats) => chats.delete(chat.id), chat.id);
  }

  async #reread(id) {
    if (!this.#database || this.#watch.isBusy(id)) return;
    const chat = readChat(await result(this.#read().get(id)));
    if (chat) this.#chats.set(id, chat);
    else this.#chats.delete(id);
    this.#watch.onChange(id);
  }

  #read() {
    return this.#database.transaction(CHATS).objectStore(CHATS);
  }

  async #write(change, id) {
    if (!this.#database) return;
    try {
      const transaction = this.#database.transaction(CHATS, "readwrite");
      change(transaction.objectStore(CHATS));
      await new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      this.#others.postMessage(id);
    } catch (error) {
      const full = error?.name === "QuotaExceededError";
      this.#onProblem(
        `The chat could not be saved${full ? ": the browser’s storage is full" : ""}. ` +
          "It is here until you close the page. Delete old chats, or export this one to keep it.",
      );
    }
  }
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// Small values: settings, the draft, the theme. Without storage they last as long as the page.
export function load(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`beaconkv.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`beaconkv.${name}`, JSON.stringify(value));
  } catch {
    // Full or switched off.
  }
}
