// The chat: sends the conversation, shows the answer while it streams, and lets people stop, repeat and change it.
import { Announcer } from "./announcer.js";
import { Answer } from "./answer.js";
import { Attachments } from "./attachments.js";
import { ChatList } from "./chat_list.js";
import { ChatSettings } from "./chat_settings.js";
import { showLegend } from "./coloured_text.js";
import { Conversation, newAnswer } from "./conversation.js";
import { AnswerView, isSend, QuestionView, ResultView } from "./messages.js";
import { streamOf } from "./stream.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  constructor() {
    this.conversation = new Conversation();
    this.settings = new ChatSettings();
    this.announcer = new Announcer($("chat-said"));
    this.attachments = new Attachments((text) => this.#warn(text));
    this.list = new ChatList({
      currentId: () => this.conversation.id,
      onOpen: (id) => {
        this.#save();
        this.#open(id);
      },
      onRename: (id, name) => id === this.conversation.id && (this.conversation.name = name),
      onDelete: (id) => id === this.conversation.id && this.#open(null),
    });
    this.model = "";
    this.depth = null;
    this.stopping = null; // while an answer streams
    this.conversation.messages.forEach((message) => this.#append(message));
    this.#listen();
    this.#showState();
  }

  // parameters: see ChatSettings; null if they are unknown.
  setServer({ model, depth, chat_note: note, sampling }, parameters) {
    this.model = model;
    this.settings.setDefaults(sampling);
    $("chat-note").textContent = note ? `This model ${note}.` : "";
    if (depth !== null && depth !== this.depth) {
      this.depth = depth;
      showLegend($("chat-legend"), depth);
      this.settings.setDepth(depth);
    }
    if (parameters) this.settings.setParameters(parameters);
  }

  #listen() {
    const input = $("chat-input");
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(input.value);
    });
    input.addEventListener("keydown", (event) => {
      if (!isSend(event)) return;
      event.preventDefault();
      $("composer").requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) this.stopping?.abort();
    });
    $("chat-stop").addEventListener("click", () => {
      this.stopping?.abort();
      input.focus();
    });
    $("chat-new").addEventListener("click", () => {
      this.#save();
      this.#open(null);
    });
    for (const button of document.querySelectorAll("#chat-empty button")) {
      button.addEventListener("click", () => this.#send(button.textContent));
    }
    $("chat-colours").addEventListener("change", () => this.#showState());
    addEventListener("pagehide", () => this.#save());
  }

  // --- what people do ---
  #send(content) {
    if (this.stopping) return this.#warn("Wait for the end of the answer, or stop it, before you send the next message.");
    if (!content.trim()) return;
    const calls = this.conversation.openCalls;
    if (calls.length) {
      this.#warn(`Enter the result of ${calls[0].name} first, or regenerate the answer.`);
      $("messages").lastElementChild.querySelector("form textarea").focus();
      return;
    }
    this.#ask(() => {
      $("chat-input").value = "";
      this.#add({ role: "user", content, files: this.attachments.take() });
    });
  }

  #edit(message, content) {
    this.#ask(() => {
      this.#cutBefore(message);
      this.#add({ ...message, content });
    });
  }

  #regenerate(message) {
    this.#ask(() => this.#cutBefore(message));
  }

  // Lets the model continue an answer that was cut off.
  #continue(message) {
    this.#ask(() => {}, message);
  }

  #sendResults(calls, contents) {
    this.#ask(() => calls.forEach(({ id, name }, i) => this.#add({ role: "tool", callId: id, name, content: contents[i] })));
  }

  // Shows a stored chat, or a new one for null. An answer that streams is stopped.
  #open(id) {
    this.stopping?.abort();
    this.stopping = null;
    this.conversation.open(id);
    this.#warn("");
    $("messages").replaceChildren();
    this.conversation.messages.forEach((message) => this.#append(message));
    this.#showState();
    $("chat-scroll").scrollTop = $("chat-scroll").scrollHeight;
    this.announcer.say(id === null ? "A new chat has begun." : "The chat is open.");
    $("chat-input").focus();
  }

  #save() {
    if (!this.conversation.save()) this.#warn("This browser's storage is full: this chat is lost when you leave the page. Export or delete others.");
  }

  // --- the answer ---
  // change: brings the conversation to the point of the answer; skipped if a setting is invalid. cut: an answer to continue; null for
  // a new one.
  async #ask(change, cut = null) {
    const fields = this.stopping ? null : this.settings.read();
    if (!fields) return;
    const stopping = new AbortController();
    this.stopping = stopping;
    this.#warn("");
    change();
    if (this.conversation.last.role === "tool") delete fields.tool_choice; // it has made the call that it had to make
    const messages = this.conversation.asMessages(this.settings.system);
    if (cut) Object.assign(fields, { continue_final_message: true, add_generation_prompt: false });
    const message = cut ?? this.#add(newAnswer(this.model));
    const before = { ...message };
    Object.assign(message, { ending: null, error: "" });
    this.#showState();
    $("chat-input").focus();
    this.announcer.begin();
    try {
      const answer = new Answer();
      const body = { messages, ...fields, stream: true };
      for await (const event of streamOf("v1/chat/completions", body, stopping.signal)) {
        answer.take(event);
        this.#show(message, before, answer);
      }
      message.ending = answer.finishReason ?? "stop";
    } catch (error) {
      message.ending = error.name === "AbortError" ? "stopped" : "failed";
      if (message.ending === "failed") message.error = error.message;
    }
    if (this.stopping !== stopping) return; // a new chat has begun
    this.stopping = null;
    this.#end(message);
  }

  // before: the message as it was when its answer, or the rest of it, was requested.
  #show(message, before, answer) {
    const content = before.content + answer.content.value;
    this.announcer.hear(content.slice(message.content.length));
    Object.assign(message, {
      content,
      contentRuns: [...before.contentRuns, ...answer.content.runs],
      reasoning: before.reasoning + answer.reasoning.value,
      reasoningRuns: [...before.reasoningRuns, ...answer.reasoning.runs],
      reasoningSeconds: answer.reasoningSeconds ?? before.reasoningSeconds,
      calls: answer.calls,
      numTokens: before.numTokens + answer.numTokens,
      acceptedPerStep: acceptedPerStep(answer),
      tokensPerSecond: answer.tokensPerSecond,
    });
    this.#keepingEnd(() => this.view.show());
  }

  #end(message) {
    this.#keepingEnd(() => this.view.show());
    this.#showState();
    this.#save();
    if (!$("chat-list").hidden) this.list.show();
    this.announcer.end(spoken(message));
  }

  // --- the list ---
  #add(message) {
    this.conversation.add(message);
    this.#append(message);
    $("chat-scroll").scrollTop = $("chat-scroll").scrollHeight;
    return message;
  }

  #append(message) {
    $("messages").append(this.#viewOf(message).element);
  }

  #viewOf(message) {
    if (message.role === "user") return new QuestionView(message, (content) => this.#edit(message, content));
    if (message.role === "tool") return new ResultView(message);
    if (message.ending === null && !this.stopping) message.ending = "stopped"; // restored: the page was left while it streamed
    this.view = new AnswerView(message, {
      onRegenerate: () => this.#regenerate(message),
      onContinue: () => this.#continue(message),
      onResults: (contents) => this.#sendResults(message.calls, contents),
    });
    return this.view;
  }

  #cutBefore(message) {
    const place = this.conversation.messages.indexOf(message);
    this.conversation.cutBefore(message);
    [...$("messages").children].slice(place).forEach((element) => element.remove());
  }

  #showState() {
    const isStreaming = this.stopping !== null;
    $("chat").toggleAttribute("data-streaming", isStreaming);
    $("chat").toggleAttribute("data-coloured", $("chat-colours").checked);
    $("chat-stop").hidden = !isStreaming;
    $("chat-send").hidden = isStreaming;
    $("chat-empty").hidden = this.conversation.messages.length > 0;
    $("chat-new").hidden = this.conversation.messages.length === 0;
  }

  #warn(text) {
    $("chat-warning").textContent = text;
  }

  // Follows the answer unless people have scrolled up.
  #keepingEnd(change) {
    const box = $("chat-scroll");
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    change();
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }
}

// Returns null if no drafts were requested.
function acceptedPerStep({ report, tokensPerStep }) {
  return tokensPerStep === null || report?.max_draft_tokens === 0 ? null : tokensPerStep - 1;
}

// Returns how an answer ended, for screen readers. The error is an alert of its own.
function spoken({ ending, calls }) {
  if (ending === "failed") return "";
  if (calls.length) return `The model calls ${calls.map(({ name }) => name).join(", ")}. Enter what it returns.`;
  return { stopped: "Stopped.", length: "The answer was cut off at the limit of tokens." }[ending] ?? "End of the answer.";
}
