// Shows one of the two views: the chat at #chat if the model can chat, else the dashboard.
const NAMES = ["chat", "dashboard"];

const $ = (id) => document.getElementById(id);

export class Views {
  constructor() {
    this.canChat = null; // not known yet
    addEventListener("hashchange", () => this.#show());
    this.#show();
  }

  setServer({ can_chat: canChat }) {
    if (canChat === this.canChat) return;
    this.canChat = canChat;
    $("views").hidden = !canChat;
    this.#show();
  }

  #show() {
    const shown = location.hash === "#chat" && this.canChat !== false ? "chat" : "dashboard";
    document.body.dataset.view = shown;
    for (const name of NAMES) {
      $(`${name}-view`).hidden = name !== shown;
      const link = $("views").querySelector(`[href="#${name}"]`);
      if (name === shown) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (shown === "chat") $("chat-input").focus();
  }
}
