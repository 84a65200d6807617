// The server: https://github.com/ggml-org/llama.cpp, tools/server. Addresses are relative, so that
// the page works under a path prefix.

import { number } from "./dom.js";

let apiKey = "";

export function useKey(key) {
  apiKey = key ?? "";
}

// What went wrong in plain words. `kind`: "loading", "key", "context", "network" or "server".
export class ServerError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

const UNREACHABLE =
  "The server can’t be reached. Is it still running? " +
  "What you wrote is kept; try again when it is back.";
const LOST = "The connection to the server was lost in the middle of the reply.";

function inPlainWords(status, error = {}) {
  const type = error.type ?? error.code;
  if (status === 401 || type === "authentication_error") {
    return new ServerError("key", "The server asks for an API key. Enter it in the settings.");
  }
  if (status === 503 || type === "unavailable_error") {
    return new ServerError("loading", "The model is still being loaded.");
  }
  if (type === "exceed_context_size_error" || error.code === "context_length_exceeded") {
    const count = error.n_prompt_tokens ? `${number(error.n_prompt_tokens)} tokens` : "too many";
    const room = error.n_ctx ? `${number(error.n_ctx)} fit` : "fewer fit";
    return new ServerError(
      "context",
      `This conversation is longer than the server’s context: it has ${count}, ${room}. ` +
        "Shorten a message, start a new chat, or start the server with a larger context.",
    );
  }
  const detail = error.message ?? `status ${status}`;
  return new ServerError("server", `The server could not answer: ${detail}`);
}

async function request(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("network", UNREACHABLE);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw inPlainWords(response.status, body.error);
  }
  return response;
}

export async function properties() {
  return (await request("props")).json();
}

// Returns when the model is loaded.
export async function ready(signal) {
  for (;;) {
    try {
      await request("health", { signal });
      return;
    } catch (error) {
      if (error.kind !== "loading") throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
    signal?.throwIfAborted();
  }
}

// The chunks of a streamed reply.
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw inPlainWords(chunk.error.code, chunk.error);
    yield chunk;
  }
  throw new ServerError("network", LOST);
}

// The data of server-sent events, each on one line.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("network", LOST);
    }
    if (read.done) return;
    const lines = (rest + read.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
