// The list of chats: open, rename, delete.

import { $, element, iconButton } from "./dom.js";

const NARROW = matchMedia("(max-width: 800px)");

export class Sidebar {
  #root = $("#sidebar");
  #toggle = $("#toggle-sidebar");
  #actions;

  // `actions`: {open, rename, remove}, each called with a chat.
  constructor(actions) {
    this.#actions = actions;
    this.#toggle.addEventListener("click", () => this.#set(!this.isOpen));
    $("#close-sidebar").addEventListener("click", () => this.close());
    $("#backdrop").addEventListener("click", () => this.close());
    NARROW.addEventListener("change", () => this.#set(!NARROW.matches));
    this.#set(!NARROW.matches);
  }

  get isOpen() {
    return this.#root.classList.contains("open");
  }

  // On a narrow screen the list lies over the page.
  get covers() {
    return this.isOpen && NARROW.matches;
  }

  close() {
    this.#set(false);
    this.#toggle.focus();
  }

  closeIfItCovers() {
    if (this.covers) this.#set(false);
  }

  #set(open) {
    this.#root.classList.toggle("open", open);
    this.#root.inert = !open;
    this.#toggle.setAttribute("aria-expanded", open);
    $("#page").inert = open && NARROW.matches;
    if (this.covers) $("#new-chat").focus();
  }

  show(chats, open, isRunning) {
    const focused = document.activeElement?.closest?.("#chats li")?.dataset.id;
    $("#chats").replaceChildren(
      ...chats.map((chat) => this.#item(chat, chat === open, isRunning(chat))),
    );
    if (focused) $(`#chats li[data-id="${CSS.escape(focused)}"] .chat`)?.focus();
  }

  #item(chat, isOpen, isRunning) {
    const title = chat.title || "New chat";
    const item = element("li", { "data-id": chat.id, class: isRunning ? "running" : "" });
    const button = element(
      "button",
      {
        type: "button",
        class: "chat",
        "aria-current": isOpen && "page",
        title,
        onclick: () => this.#actions.open(chat),
      },
      title,
      isRunning
        ? element("span", { class: "visually-hidden" }, " (a reply is being written)")
        : null,
    );
    item.append(
      button,
      iconButton("pencil", `Rename “${title}”`, () => this.#rename(item, chat)),
      iconButton("trash", `Delete “${title}”`, () => this.#actions.remove(chat)),
    );
    return item;
  }

  #rename(item, chat) {
    const input = element("input", {
      class: "rename",
      value: chat.title,
      "aria-label": "Title of the chat",
    });
    let done = false;
    const finish = (save) => {
      if (done) return; // removing the field blurs it
      done = true;
      this.#actions.rename(chat, save && input.value.trim() ? input.value.trim() : chat.title);
      $(`#chats li[data-id="${CSS.escape(chat.id)}"] .chat`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        finish(false);
      }
    });
    input.addEventListener("blur", () => finish(true));
    item.replaceChildren(input);
    input.focus();
    input.select();
  }
}
