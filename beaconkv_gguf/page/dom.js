// Small helpers that every module uses.

export const $ = (selector, root = document) => root.querySelector(selector);

// An element with attributes, "on..." listeners and children.
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onclick) {
  const button = {
    type: "button",
    class: "icon-button",
    "aria-label": label,
    title: label,
    onclick,
  };
  return element("button", button, icon(name));
}

export const number = (value) => Math.round(value).toLocaleString("en");

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

export function bytes(value) {
  const mib = value / 1024 ** 2;
  const [size, unit] = mib < 1000 ? [mib, "MiB"] : [mib / 1024, "GiB"];
  return `${Number(size.toFixed(1))} ${unit}`;
}

export function duration(ms) {
  const seconds = ms / 1000;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

// Tell what happened in a few words, with a way back where there is one.
let toastTimer;
export function toast(text, action, onaction) {
  const box = $("#toast");
  const close = () => box.replaceChildren();
  const act = () => {
    close();
    onaction();
  };
  box.replaceChildren(element("span", {}, text));
  if (action) box.append(element("button", { type: "button", onclick: act }, action));
  clearTimeout(toastTimer);
  toastTimer = setTimeout(close, action ? 8000 : 4000);
}

// For screen readers alone.
export function announce(text) {
  $("#news").textContent = text;
}

// A line above the messages that stays until it is closed. One text is shown once.
export function notice(text) {
  const box = $("#notices");
  if ([...box.children].some((child) => child.dataset.text === text)) return;
  const line = element("div", { class: "notice", role: "alert", "data-text": text }, text);
  line.append(iconButton("close", "Close this notice", () => line.remove()));
  box.append(line);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard API is for https and localhost alone; a server in the local network is neither.
    const area = element("textarea", { class: "visually-hidden" });
    const focused = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    focused?.focus();
  }
  toast("Copied");
}
