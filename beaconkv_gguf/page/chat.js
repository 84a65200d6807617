// A chat's logic without its looks: what is sent to the server, and what comes back.

import { ready, ServerError, streamChat } from "./api.js";
import { memoryOf, recordMemory } from "./gauge.js";

const TITLE_LENGTH = 60;

export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_LENGTH
    ? `${line.slice(0, TITLE_LENGTH).replace(/\s\S*$/, "")}…`
    : line;
}

// The messages as the server takes them. After a failed reply two of the user's follow each other,
// which some models' templates refuse: they become one.
function conversation(messages, system) {
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, reasoning } of messages) {
    if (!content && !reasoning) continue;
    const last = sent.at(-1);
    if (role === "user" && last?.role === "user") last.content += `\n\n${content}`;
    else sent.push(reasoning ? { role, content, reasoning_content: reasoning } : { role, content });
  }
  return sent;
}

// A reply while it is being written. It writes into the last message of its chat and calls
// `onChange` after every change, `onEnd` once.
export class Reply {
  status = "waiting"; // then "loading" (the model), "reading" (the prompt), "thinking", "writing"
  progress; // of reading: {total, cache, processed, time_ms}
  timings;
  savedAt = Date.now();
  #controller = new AbortController();
  #before; // counts of a message that is continued
  #echo; // what the server says of it again, each as a whole
  #thinkingSince;

  // A chat that ends with an assistant's message has that one continued.
  constructor(chat, settings, onChange) {
    this.chat = chat;
    this.onChange = onChange;
    this.body = {
      messages: conversation(chat.messages, settings.system),
      stream: true,
      stream_options: { include_usage: true },
      timings_per_token: true,
      return_progress: true,
      cache_prompt: true,
      ...settings.request,
    };
    if (chat.messages.at(-1).role !== "assistant") {
      chat.messages.push({ role: "assistant", content: "" });
    }
    this.message = chat.messages.at(-1);
    const { content, reasoning, reasoningMs = 0, reasoningTokens = 0, tokens = 0 } = this.message;
    this.#before = { reasoningMs, reasoningTokens, tokens };
    this.#echo = { content, reasoning };
    this.message.error = undefined;
    this.message.end = "interrupted"; // if the page is closed now
  }

  stop() {
    this.#controller.abort();
  }

  // Returns the error that ended the reply, if one did.
  async run() {
    const { signal } = this.#controller;
    try {
      await this.#stream(signal);
    } catch (error) {
      if (signal.aborted) {
        this.message.end = "stopped";
      } else {
        this.message.error =
          error instanceof ServerError ? error.message : `The page failed: ${error.message}`;
        return error;
      }
    }
    return undefined;
  }

  async #stream(signal) {
    for (;;) {
      try {
        for await (const chunk of streamChat(this.body, signal)) {
          this.#take(chunk);
          this.onChange(this);
        }
        return;
      } catch (error) {
        if (error.kind !== "loading") throw error;
      }
      this.status = "loading";
      this.onChange(this);
      await ready(signal);
      this.status = "waiting";
      this.onChange(this);
    }
  }

  #take({ choices, prompt_progress: progress, timings, usage }) {
    const { message } = this;
    const choice = choices?.[0];
    if (progress) {
      this.status = "reading";
      this.progress = progress;
    }
    if (timings) this.#takeTimings(timings);
    else if (usage) message.tokens = this.#before.tokens + usage.completion_tokens;
    if (this.#append("reasoning", choice?.delta?.reasoning_content)) {
      this.status = "thinking";
      this.#thinkingSince ??= performance.now();
      message.reasoningMs = this.#before.reasoningMs + performance.now() - this.#thinkingSince;
      const written = this.timings?.predicted_n;
      if (written) message.reasoningTokens = this.#before.reasoningTokens + written;
    }
    if (this.#append("content", choice?.delta?.content)) this.status = "writing";
    if (choice?.finish_reason) message.end = choice.finish_reason;
  }

  // Returns whether `delta` has something new.
  #append(field, delta) {
    if (!delta) return false;
    const { message } = this;
    const text = delta.replaceAll("\r", ""); // Markdown's reader counts characters without them
    const echo = this.#echo[field];
    this.#echo[field] = "";
    if (echo && text.startsWith(echo.trimEnd())) {
      message[field] = text;
      return text.length > echo.length;
    }
    message[field] = (message[field] ?? "") + text;
    return true;
  }

  #takeTimings(timings) {
    this.timings = timings;
    this.message.tokens = this.#before.tokens + timings.predicted_n;
    this.message.perSecond = timings.predicted_per_second;
    const memory = memoryOf(timings);
    if (memory) recordMemory(this.chat, memory);
  }
}
