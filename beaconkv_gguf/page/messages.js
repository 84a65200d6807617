// The messages of the open chat on the screen.

import { $, copy, duration, element, iconButton, number, plural } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const NEAR_BOTTOM = 48; // px within which new text is followed
const LONG_PROMPT = 200; // tokens from which reading shows a bar

export class MessageList {
  #log = $("#log");
  #scroll = $("#scroll");
  #jump = $("#jump");
  #views = new Map(); // by message
  #actions;
  #follow = true;

  // `actions`: {regenerate, resume, edit}
  constructor(actions) {
    this.#actions = actions;
    this.#scroll.addEventListener("scroll", () => this.#look(), { passive: true });
    this.#jump.addEventListener("click", () => this.followEnd());
    const grown = new ResizeObserver(() => (this.#follow ? this.#toEnd() : this.#look()));
    grown.observe(this.#log);
    grown.observe(this.#scroll);
    this.#log.addEventListener("click", (event) => {
      const button = event.target.closest(".copy-code");
      if (button) copy($("code", button.closest(".code")).textContent);
    });
  }

  show(chat, reply) {
    const old = this.#views;
    this.#views = new Map();
    chat.messages.forEach((message, i) => {
      const view = old.get(message) ?? this.#newView(chat, message);
      view.place(i === chat.messages.length - 1, message === reply?.message ? reply : undefined);
      this.#views.set(message, view);
    });
    this.#log.replaceChildren(...[...this.#views.values()].map((view) => view.root));
    $("#empty").hidden = this.#views.size > 0;
    this.followEnd();
  }

  // After a change to `reply`, which belongs to the chat on the screen.
  update(reply) {
    this.#views.get(reply.message)?.invalidate();
  }

  finish(reply) {
    this.#views.get(reply.message)?.place(true, undefined);
  }

  followEnd() {
    this.#follow = true;
    this.#toEnd();
  }

  #newView(chat, message) {
    return message.role === "user"
      ? new UserView(message, this.#actions)
      : new AssistantView(message, chat, this.#actions);
  }

  #toEnd() {
    this.#scroll.scrollTop = this.#scroll.scrollHeight;
    this.#jump.hidden = true;
  }

  #look() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroll;
    this.#follow = scrollHeight - scrollTop - clientHeight < NEAR_BOTTOM;
    this.#jump.hidden = this.#follow;
  }
}

class UserView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.root = element("article", { class: "message user", "aria-label": "You" });
  }

  place() {
    this.#show();
  }

  #show() {
    const edit = iconButton("pencil", "Edit and send again", () => this.#edit());
    this.root.replaceChildren(
      element("div", { class: "text" }, this.message.content),
      element(
        "div",
        { class: "actions" },
        edit,
        iconButton("copy", "Copy", () => copy(this.message.content)),
      ),
    );
    return edit;
  }

  #edit() {
    const area = element("textarea", { "aria-label": "Edit the message", rows: 1 });
    const cancel = () => this.#show().focus();
    const send = (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.edit(this.message, area.value);
    };
    area.value = this.message.content;
    area.addEventListener("input", () => fit(area));
    area.addEventListener("keydown", (event) => {
      if (isEnter(event)) send(event);
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
    });
    this.root.replaceChildren(
      element(
        "form",
        { class: "edit", onsubmit: send },
        area,
        element(
          "div",
          {},
          element("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"),
          element("button", { type: "submit", class: "primary" }, "Send"),
        ),
      ),
    );
    fit(area);
    area.focus();
  }
}

class AssistantView {
  #thinking; // MarkdownView
  #content; // MarkdownView
  #state; // what `state` shows while the reply is being written
  #bar = element("progress", { "aria-label": "Reading the conversation" });
  #barText = element("span");
  #scheduled = false;
  #restUntil = 0;

  constructor(message, chat, actions) {
    Object.assign(this, { message, chat, actions });
    const thinking = element("div", { class: "markdown" });
    const content = element("div", { class: "markdown" });
    this.summary = element("summary");
    this.details = element("details", { class: "thinking" }, this.summary, thinking);
    this.state = element("div", { class: "state" });
    this.root = element(
      "article",
      { class: "message assistant", "aria-label": "Reply" },
      this.details,
      content,
      this.state,
    );
    this.#thinking = new MarkdownView(thinking);
    this.#content = new MarkdownView(content);
    this.details.addEventListener("toggle", () => this.#renderThinking());
  }

  // `reply`: the one that writes this message at the time.
  place(isLast, reply) {
    this.isLast = isLast;
    this.reply = reply;
    this.root.setAttribute("aria-busy", Boolean(reply));
    this.#state = undefined;
    this.#render();
  }

  // Draws at the next frame, and leaves the browser three times as long for other things as it
  // took: a very long block costs a slower refresh and not a page that hangs.
  invalidate() {
    if (this.#scheduled) return;
    this.#scheduled = true;
    const draw = () =>
      requestAnimationFrame(() => {
        this.#scheduled = false;
        const start = performance.now();
        this.#render();
        const end = performance.now();
        this.#restUntil = end + 3 * (end - start);
      });
    const rest = this.#restUntil - performance.now();
    if (rest > 16) setTimeout(draw, rest);
    else draw();
  }

  #render() {
    const { message, reply } = this;
    this.#content.render(message.content, !reply);
    this.#renderThinking();
    if (reply) this.#renderProgress();
    else this.#renderEnd();
  }

  #renderThinking() {
    const { message, reply } = this;
    this.details.hidden = !message.reasoning;
    if (!message.reasoning) return;
    const time = message.reasoningMs === undefined ? "" : ` ${duration(message.reasoningMs)}`;
    const tokens = message.reasoningTokens ? `, ${plural(message.reasoningTokens, "token")}` : "";
    const isThinking = reply?.status === "thinking";
    this.summary.textContent = isThinking
      ? `Thinking…${time}${tokens}`
      : `Thought${time && ` for${time}`}${tokens}`;
    this.summary.classList.toggle("live", isThinking);
    if (this.details.open) this.#thinking.render(message.reasoning, !isThinking);
  }

  #renderProgress() {
    const { status, progress } = this.reply;
    const todo = progress ? progress.total - progress.cache : 0;
    if (status === "reading" && todo >= LONG_PROMPT && progress.processed < progress.total) {
      const done = progress.processed - progress.cache;
      const left = done ? ((todo - done) * progress.time_ms) / done : 0;
      this.#bar.max = todo;
      this.#bar.value = done;
      this.#barText.textContent =
        `Reading ${number(done)} of ${plural(todo, "token")}` +
        (left > 2000 ? `, ${duration(left)} left` : "");
      if (this.#state !== "bar") this.state.replaceChildren(this.#bar, this.#barText);
      this.#state = "bar";
      return;
    }
    const text =
      status === "loading" ? "The model is being loaded. The reply begins when it is ready." : "";
    if (this.#state === text) return;
    this.#state = text;
    const dots = element("span", { class: "dots" }, element("i"), element("i"), element("i"));
    this.state.replaceChildren(dots, text);
  }

  #renderEnd() {
    const { message, isLast, actions } = this;
    const { content, reasoning, error, end } = message;
    const parts = [];
    const canResume = isLast && Boolean(content || reasoning);
    const button = (label, onclick) =>
      element("button", { type: "button", class: "small-button", onclick }, label);
    const why = error ?? this.#ending(end, content);
    if (why) {
      const line = element(
        "div",
        { class: error ? "error" : "ending", role: error ? "alert" : null },
        why,
      );
      if (canResume && !this.#isFull()) line.append(button("Continue", actions.resume));
      if (isLast && !canResume) line.append(button("Try again", actions.regenerate));
      parts.push(line);
    }
    const row = element("div", { class: "actions" });
    if (content) row.append(iconButton("copy", "Copy the reply", () => copy(content)));
    if (canResume) row.append(iconButton("again", "Write the reply again", actions.regenerate));
    if (message.tokens) {
      const speed = message.perSecond ? ` · ${message.perSecond.toFixed(1)} tokens/s` : "";
      row.append(element("span", { class: "meta" }, plural(message.tokens, "token") + speed));
    }
    this.state.replaceChildren(...parts, row);
  }

  #isFull() {
    const memory = this.chat.memory;
    return Boolean(memory) && memory.n_logical + 1 >= memory.n_ctx;
  }

  #ending(end, content) {
    if (end === "length" && this.#isFull()) {
      return "The context is full. Start a new chat, or the server with a larger context.";
    }
    if (end === "length") return "The reply has reached the longest length that is set.";
    if (end === "stopped") return content ? "Stopped." : "Stopped before the answer.";
    if (end === "interrupted") return "The reply is not complete.";
    return content || this.message.reasoning ? "" : "The model gave an empty reply.";
  }
}

export function isEnter(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

// As high as its text; the style sheet sets the limit.
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}
