// The list of the chats that this browser stores: finds, opens, renames, exports, imports and deletes them.
import { deleteChat, exportedChat, importChat, keptChats, renameChat } from "./conversation.js";

const $ = (id) => document.getElementById(id);

export class ChatList {
  // onOpen, onDelete, onRename: receive the id of a chat. currentId: returns the id of the chat that is shown.
  constructor({ currentId, onOpen, onDelete, onRename }) {
    Object.assign(this, { currentId, onOpen, onDelete, onRename });
    $("chat-list-toggle").addEventListener("click", () => this.open($("chat-list").hidden));
    $("chat-search").addEventListener("input", () => this.show());
    $("chat-import").addEventListener("click", () => $("chat-import-file").click());
    $("chat-import-file").addEventListener("change", ({ target }) => this.#import(target));
  }

  open(isOpen) {
    $("chat-list").hidden = !isOpen;
    $("chat-list-toggle").setAttribute("aria-expanded", isOpen);
    if (!isOpen) return;
    $("chat-search").value = "";
    $("chat-import-error").textContent = "";
    this.show();
  }

  show() {
    const chats = keptChats($("chat-search").value);
    $("chats").replaceChildren(...chats.map((chat) => this.#itemOf(chat)));
    $("no-chats").hidden = chats.length > 0;
  }

  #itemOf({ id, title, savedAt }) {
    const item = $("chat-item-template").content.firstElementChild.cloneNode(true);
    const open = item.querySelector(".open");
    open.textContent = title;
    if (id === this.currentId()) open.setAttribute("aria-current", "true");
    item.querySelector("time").textContent = new Date(savedAt).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const actions = { open: () => this.#open(id), rename: () => this.#rename(id, title), export: () => download(id), delete: () => this.#delete(id, title) };
    for (const [name, act] of Object.entries(actions)) {
      const button = item.querySelector(`.${name}`);
      button.addEventListener("click", act);
      if (name !== "open") button.setAttribute("aria-label", `${button.textContent} ${title}`);
    }
    return item;
  }

  #open(id) {
    this.open(false);
    this.onOpen(id);
  }

  #rename(id, title) {
    const name = prompt("Name of the chat", title)?.trim();
    if (!name) return;
    renameChat(id, name);
    this.onRename(id, name);
    this.show();
  }

  async #import(input) {
    const [file] = input.files;
    input.value = ""; // the same file may be chosen again
    try {
      importChat(await file.text());
      this.open(true);
    } catch (error) {
      $("chat-import-error").textContent = `${file.name} cannot be imported: ${error.message}. Choose a file that Export made.`;
    }
  }

  #delete(id, title) {
    if (!confirm(`Delete the chat “${title}”? It cannot be brought back.`)) return;
    deleteChat(id);
    this.onDelete(id);
    this.show();
  }
}

function download(id) {
  const chat = exportedChat(id);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(chat, null, 2)], { type: "application/json" }));
  link.download = `${chat.title.replace(/[^\p{L}\p{N} ._-]/gu, "").trim() || "chat"}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}
