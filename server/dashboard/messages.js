// One message each, as an item of the list of messages. Answers are Markdown; all other texts of models and people are set as text.
import { ColouredText } from "./coloured_text.js";
import { copy } from "./copy.js";
import { loadMarkdown, MarkdownText } from "./markdown.js";
import { duration, number } from "./numbers.js";

const COPIED_MILLISECONDS = 2000;
const ENDINGS = { length: "cut off at the limit of tokens", stopped: "stopped" };

function clone(name) {
  return document.getElementById(name).content.firstElementChild.cloneNode(true);
}

class MessageView {
  constructor(template, message) {
    this.message = message;
    this.element = clone(template);
    this.find(".copy")?.addEventListener("click", (event) => this.#copy(event.currentTarget));
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  async #copy(button) {
    try {
      await copy(this.copied);
      button.textContent = "Copied";
    } catch (error) {
      button.textContent = `Not copied: ${error.message}`;
    }
    setTimeout(() => (button.textContent = "Copy"), COPIED_MILLISECONDS);
  }

  get copied() {
    return this.message.content;
  }
}

// A message of the user. onEdit: receives the new text.
export class QuestionView extends MessageView {
  constructor(message, onEdit) {
    super("question-template", message);
    this.find(".text").textContent = message.content;
    this.find(".files").append(...(message.files ?? []).map(folded));
    const form = this.find("form");
    const box = this.find("textarea");
    this.find(".edit").addEventListener("click", () => this.#show(true));
    this.find(".cancel").addEventListener("click", () => this.#show(false));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (box.value.trim()) onEdit(box.value);
    });
    box.addEventListener("keydown", (event) => {
      if (isSend(event)) {
        event.preventDefault();
        form.requestSubmit();
      } else if (event.key === "Escape") this.#show(false);
    });
  }

  #show(isEditing) {
    const box = this.find("textarea");
    for (const part of [".text", ".actions"]) this.find(part).hidden = isEditing;
    this.find("form").hidden = !isEditing;
    if (isEditing) {
      box.value = this.message.content;
      box.focus();
      box.setSelectionRange(box.value.length, box.value.length);
    } else this.find(".edit").focus();
  }
}

function folded({ name, text }) {
  const element = clone("call-template");
  element.querySelector("summary").textContent = name;
  element.querySelector("pre").textContent = text;
  return element;
}

// An answer of the model. onRegenerate, onContinue. onResults: receives a text for each of its calls.
export class AnswerView extends MessageView {
  constructor(message, { onRegenerate, onContinue, onResults }) {
    super("answer-template", message);
    this.find("h3").textContent = message.model;
    this.reasoning = new ColouredText(this.find(".thinking .text"));
    this.content = new MarkdownText(this.find(".content"));
    loadMarkdown().then(() => this.content.show(this.message.contentRuns), () => {});
    this.find(".regenerate").addEventListener("click", onRegenerate);
    this.find(".continue").addEventListener("click", onContinue);
    this.find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      onResults([...this.element.querySelectorAll("form textarea")].map((box) => box.value));
    });
    this.find("form").addEventListener("keydown", (event) => {
      if (!isSend(event) || event.target.localName !== "textarea") return;
      event.preventDefault();
      this.find("form").requestSubmit();
    });
    this.show();
  }

  // Shows a message that has grown, or ended. While it grows, showing it takes at most a fifth of the time.
  show() {
    const { message } = this;
    const isRunning = message.ending === null;
    const began = performance.now();
    clearTimeout(this.timer);
    if (isRunning && began < this.due) {
      this.timer = setTimeout(() => this.show(), this.due - began);
      return;
    }
    this.element.toggleAttribute("data-running", isRunning);
    this.reasoning.show(message.reasoningRuns);
    this.content.show(message.contentRuns);
    this.find(".thinking").hidden = !message.reasoning;
    this.find(".thinking summary").textContent = thinkingTitle(message, isRunning);
    message.calls.slice(this.find(".calls").childElementCount).forEach((call) => this.#addCall(call));
    this.find("form").hidden = isRunning || !message.calls.length;
    this.find(".actions").hidden = isRunning;
    this.find(".copy").hidden = !this.copied;
    this.find(".continue").hidden = message.ending !== "length" || !message.content || message.calls.length > 0;
    this.find(".facts").textContent = isRunning ? "" : facts(message);
    this.find(".error").textContent = message.error;
    this.due = performance.now() + 4 * (performance.now() - began);
  }

  #addCall(call) {
    this.find(".calls").append(folded({ name: `Calls ${call.name}`, text: indented(call.arguments) }));
    const label = this.find(".results").appendChild(document.createElement("label"));
    label.textContent = `Result of ${call.name}`;
    label.appendChild(document.createElement("textarea")).rows = 2;
  }

  get copied() {
    const { content, calls } = this.message;
    return content || calls.map((call) => `${call.name}(${call.arguments})`).join("\n");
  }
}

// The result of a tool.
export class ResultView extends MessageView {
  constructor(message) {
    super("result-template", message);
    this.find("summary").textContent = `Result of ${message.name}`;
    this.find("pre").textContent = message.content;
  }
}

// Returns whether Enter sends: without Shift, and not while a character is composed.
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

function thinkingTitle({ reasoningSeconds, content, calls }, isRunning) {
  const isThinking = isRunning && !content && !calls.length;
  return isThinking ? "Thinking …" : `Thought for ${duration(reasoningSeconds)}`;
}

function facts({ numTokens, acceptedPerStep, tokensPerSecond, ending }) {
  const told = [];
  if (numTokens) told.push(`${number(numTokens)} ${numTokens === 1 ? "token" : "tokens"}`);
  if (acceptedPerStep !== null) told.push(`${number(acceptedPerStep, 2)} drafts accepted a step on average`);
  if (tokensPerSecond) told.push(`${number(tokensPerSecond)} tokens/s`);
  if (ENDINGS[ending]) told.push(ENDINGS[ending]);
  return told.join(" · ");
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
