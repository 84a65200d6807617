// What the cache of the open chat holds, in words first. The numbers are the server's: `beaconkv_..`
// in the timings of a reply, `beaconkv` in /props. A server without them shows no gauge.

import { $, bytes, duration, element, number, plural } from "./dom.js";

const NEWS_EVERY = 10000; // ms between two announcements to a screen reader
const TRACE_LENGTH = 600; // points
const TEETH = 16; // compactions that the small picture shows

const PREFIX = "beaconkv_";

// The numbers in the timings of a reply, without their prefix.
export function memoryOf(timings) {
  const ours = Object.entries(timings).filter(([name]) => name.startsWith(PREFIX));
  const memory = ours.map(([name, value]) => [name.slice(PREFIX.length), value]);
  return memory.length ? Object.fromEntries(memory) : undefined;
}

// A chat keeps a trace of [tokens seen, tokens held, compactions].
export function recordMemory(chat, memory) {
  const trace = (chat.trace ??= []);
  // After an edit the chat goes back, and with it the trace.
  const isAhead = ([seen, , compactions]) =>
    seen > memory.n_logical || compactions > memory.n_compact;
  while (trace.length && isAhead(trace.at(-1))) trace.pop();
  const last = trace.at(-1);
  const before = chat.memory;
  const compacted = last && memory.n_compact > last[2];
  if (compacted && before?.n_compact === last[2] && before.n_logical > last[0]) {
    trace.push(point(before)); // the peak
  }
  const step = memory.n_logical / TRACE_LENGTH;
  if (!last || compacted || memory.n_logical - last[0] >= step) trace.push(point(memory));
  // A long trace is thinned out by pairs: a peak and what is left of it.
  if (trace.length > TRACE_LENGTH) chat.trace = trace.filter((_, i) => i % 4 < 2);
  chat.memory = memory;
}

const point = (memory) => [memory.n_logical, memory.n_held, memory.n_compact];

export class Gauge {
  #root = $("#gauge");
  #server; // what /props says of a chat
  #chat;
  #shown; // the memory that is on the screen, of #chat
  #frame;
  #newsAt = 0;
  #newsTimer;

  constructor() {
    const button = $("#explain");
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", open);
      $("#explanation").hidden = !open;
      this.#draw();
    });
  }

  // `beaconkv` of /props: the budget, and the chats that the server has in memory.
  serve(beaconkv) {
    this.#server = beaconkv && { ...beaconkv.slots?.[0], ...beaconkv };
    this.#later();
  }

  show(chat, timings) {
    if (chat !== this.#chat) {
      this.#shown = undefined;
      $('[data-value="dropped"]', this.#root).textContent = "";
      $("#gauge-news").textContent = "";
    }
    this.#chat = chat;
    this.timings = timings;
    this.#later();
  }

  #later() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = undefined;
      this.#draw();
    });
  }

  // What the chat told last, unless the server has been started with another budget since.
  #memory() {
    const server = this.#server;
    const own = this.#chat?.memory;
    const zero = {
      n_logical: 0,
      n_held: 0,
      n_evicted: 0,
      n_pinned: 0,
      n_compact: 0,
      us_compact: 0,
    };
    if (!server) return own;
    if (own && own.budget === server.budget && own.n_ctx === server.n_ctx) return own;
    return { ...server, ...zero };
  }

  #draw() {
    const memory = this.#memory();
    this.#root.hidden = !memory;
    if (!memory) return;
    const bounded = memory.budget > 0;
    for (const node of this.#root.querySelectorAll("[data-only]")) {
      node.hidden = (node.dataset.only === "budget") !== bounded;
    }
    const text = {
      logical: number(memory.n_logical),
      context: number(memory.n_ctx),
      held: number(memory.n_held),
      budget: bounded ? `of ${plural(memory.budget, "place")}` : "all of it",
      compactions: number(memory.n_compact),
      times: memory.n_compact === 1 ? "time" : "times",
      bytes: bytes(memory.bytes_held),
      "bytes-full": bytes(memory.bytes_full),
      room: plural(memory.budget, "note"),
    };
    for (const [name, value] of Object.entries(text)) {
      const node = $(`[data-value="${name}"]`, this.#root);
      if (node.textContent !== value) node.textContent = value;
    }
    this.#meter(
      "logical",
      memory.n_logical,
      memory.n_ctx,
      `${text.logical} of ${text.context} tokens`,
    );
    this.#meter(
      "held",
      memory.n_held,
      memory.budget || memory.n_ctx,
      `${text.held} ${text.budget}`,
    );
    this.#meter(
      "bytes",
      memory.bytes_held,
      memory.bytes_full,
      `${text.bytes} of ${text["bytes-full"]}`,
    );
    if (bounded) this.#saw(memory);
    if (!$("#explanation").hidden) this.#explain(memory, bounded);
    if (this.#shown && memory.n_compact > this.#shown.n_compact) {
      this.#pulse(memory.n_evicted - this.#shown.n_evicted);
    }
    if (this.#shown && memory.n_logical !== this.#shown.n_logical) this.#news();
    this.#shown = memory;
  }

  #meter(name, value, max, words) {
    const meter = $(`[data-meter="${name}"]`, this.#root);
    meter.setAttribute("aria-valuemin", 0);
    meter.setAttribute("aria-valuemax", max);
    meter.setAttribute("aria-valuenow", Math.min(value, max));
    meter.setAttribute("aria-valuetext", words.trim());
    $("i", meter).style.width = `${max ? Math.min(100, (100 * value) / max) : 0}%`;
  }

  // A tooth for each of the last compactions.
  #saw(memory) {
    const all = this.#points(memory);
    const points = all.filter(([, , compactions]) => compactions >= memory.n_compact - TEETH);
    const least = Math.min(...points.map(([, held]) => held));
    const x = scale(points[0][0], memory.n_logical, 0, 100);
    const y = scale(least, memory.budget, 9, 1);
    const path = line(points, ([seen, held]) => [x(seen), y(held)]);
    $(".saw path", this.#root).setAttribute("d", memory.n_logical ? path : "");
  }

  #points(memory) {
    const trace = this.#chat?.trace ?? [];
    const fromStart = !trace.length || trace[0][0] === trace[0][1];
    return [...(fromStart ? [[0, 0, 0]] : []), ...trace, point(memory)];
  }

  #explain(memory, bounded) {
    if (bounded) {
      const points = this.#points(memory);
      const most = Math.max(memory.n_logical, memory.budget);
      const x = scale(0, most, 1, 99);
      const y = scale(0, most, 99, 1);
      const kept = line(points, ([seen, held]) => [x(seen), y(held)]);
      $(".chart .kept").setAttribute("d", kept);
      $(".chart .area").setAttribute("d", `${kept}V99H${x(points[0][0])}Z`);
      $(".chart .full").setAttribute("d", `M1 99L${x(memory.n_logical)} ${y(memory.n_logical)}`);
    }
    const timings = this.timings ?? {};
    const facts = [];
    const fact = (name, value) =>
      facts.push(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    if (bounded) {
      fact("Dropped so far", plural(memory.n_evicted, "token"));
      fact("Never dropped", plural(memory.n_pinned, "token"));
      fact("Time spent tidying up", duration(memory.us_compact / 1000));
    }
    if (timings.prompt_n) fact("Read", `${number(timings.prompt_per_second)} tokens/s`);
    if (timings.predicted_n > 1)
      fact("Written", `${timings.predicted_per_second.toFixed(1)} tokens/s`);
    if (timings.cache_n) fact("Not read again", plural(timings.cache_n, "token"));
    $("#facts").replaceChildren(...facts);
  }

  // A compaction is seen as it happens.
  #pulse(dropped) {
    const chip = $('[data-value="dropped"]', this.#root);
    chip.textContent = dropped > 0 ? `−${number(dropped)}` : "";
    const tile = $(".saw", this.#root).closest(".tile");
    tile.classList.remove("pulse");
    void tile.offsetWidth; // starts the animation anew
    tile.classList.add("pulse");
  }

  #news() {
    if (this.#newsTimer) return;
    const wait = Math.max(0, this.#newsAt + NEWS_EVERY - Date.now());
    this.#newsTimer = setTimeout(() => {
      this.#newsTimer = undefined;
      this.#newsAt = Date.now();
      const memory = this.#shown;
      if (!memory) return;
      const tidied = memory.budget ? `, tidied up ${plural(memory.n_compact, "time")}` : "";
      const seen = plural(memory.n_logical, "token");
      $("#gauge-news").textContent =
        `Conversation: ${seen}, ${number(memory.n_held)} in memory${tidied}.`;
    }, wait);
  }
}

// Maps from..to to a..b.
function scale(from, to, a, b) {
  return (value) => (to > from ? a + ((value - from) * (b - a)) / (to - from) : a);
}

function line(points, place) {
  const step = (point, i) =>
    (i ? "L" : "M") +
    place(point)
      .map((v) => v.toFixed(2))
      .join(" ");
  return points.map(step).join("");
}
