// The prompt box: streams a completion and colours each token by where it came from.
import { Answer } from "./answer.js";
import { ColouredText, showLegend } from "./coloured_text.js";
import { number, percent } from "./numbers.js";
import { streamOf } from "./stream.js";

const $ = (id) => document.getElementById(id);

export class Playground {
  constructor() {
    this.depth = null; // of the server
    this.stopping = null;
    $("try").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopping) this.stopping.abort();
      else this.#generate();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("try").requestSubmit();
    });
  }

  setServer({ depth, can_chat: canChat, chat_note: chatNote }) {
    if ($("as-chat-label").hidden && chatNote) {
      $("as-chat").checked = false; // the model is one that continues text
      $("as-chat-label").title = `This model ${chatNote}.`;
    }
    $("as-chat-label").hidden = !canChat;
    if (depth == null || depth === this.depth) return;
    this.depth = depth;
    $("depths").querySelectorAll("label").forEach((label) => label.remove());
    for (let i = 0; i <= depth; i += 1) $("depths").append(choice(i, i === depth));
    showLegend($("legend"), depth);
  }

  async #generate() {
    const chosen = Number(new FormData($("try")).get("depth") ?? 0);
    const depths = chosen > 0 && $("compare").checked ? [chosen, 0] : [chosen];
    const body = {
      max_tokens: Number($("max-tokens").value),
      temperature: Number($("temperature").value),
      repetition_penalty: Number($("repetition-penalty").value),
      seed: Math.floor(Math.random() * 2 ** 31), // the same for both, so that the text is the same
    };
    const asChat = !$("as-chat-label").hidden && $("as-chat").checked;
    const runs = depths.map((depth) => new Run(depth, asChat ? "" : $("prompt").value));
    $("runs").replaceChildren(...runs.map((run) => run.element));
    this.stopping = new AbortController();
    $("run").textContent = "Stop";
    say("");
    try {
      for (const run of runs) await run.stream(body, $("prompt").value, asChat, this.stopping.signal);
      say(verdict(runs));
    } catch (error) {
      if (error.name === "AbortError") say("stopped");
      else say(error.message, "error");
    } finally {
      this.stopping = null;
      $("run").textContent = "Generate";
    }
  }
}

function choice(depth, isChecked) {
  const label = document.createElement("label");
  const input = label.appendChild(document.createElement("input"));
  Object.assign(input, { type: "radio", name: "depth", value: depth, checked: isChecked });
  label.appendChild(document.createElement("span")).textContent = depth;
  return label;
}

function say(text, kind = "") {
  $("verdict").dataset.kind = kind;
  $("verdict").replaceChildren(...(Array.isArray(text) ? text : [text]));
}

// Two runs: tokens a step, which no other load changes, then the clock, and whether the text is the same.
function verdict(runs) {
  if (runs.length < 2) return "";
  const [fast, plain] = runs;
  const strong = document.createElement("strong");
  strong.textContent = `${number(fast.tokensPerStep, 2)} tokens a step of the model`;
  const same = fast.text === plain.text ? "and the same text, token for token." : "but another text.";
  const ratio = number(fast.tokensPerSecond / plain.tokensPerSecond, 2);
  return [
    strong,
    ` with ${drafts(fast.depth)} a round, ${number(plain.tokensPerStep, 2)} without, ${same}`,
    ` By the clock it was ${ratio} times as fast. The two ran one after the other, so other load on the machine counts in that.`,
  ];
}

function drafts(depth) {
  return `${depth} ${depth === 1 ? "draft" : "drafts"}`;
}

class Run {
  constructor(depth, prompt) {
    this.depth = depth;
    this.answer = new Answer();
    this.element = $("run-template").content.firstElementChild.cloneNode(true);
    this.element.querySelector("h3").textContent = depth ? `${drafts(depth)} a round` : "without drafts";
    this.element.querySelector(".shares").append(...Array.from({ length: depth + 1 }, (_, i) => shareOf(i)));
    this.pre = this.element.querySelector("pre");
    const shown = this.pre.appendChild(document.createElement("span"));
    shown.className = "prompt";
    shown.dataset.position = 0;
    shown.textContent = prompt;
    this.reasoning = new ColouredText(this.pre.appendChild(document.createElement("i")));
    this.content = new ColouredText(this.pre.appendChild(document.createElement("samp")));
  }

  get text() {
    return this.answer.reasoning.value + this.answer.content.value;
  }

  get tokensPerSecond() {
    return this.answer.tokensPerSecond;
  }

  get tokensPerStep() {
    return this.answer.tokensPerStep;
  }

  async stream(body, prompt, asChat, signal) {
    const asked = asChat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    const speculation = { max_draft_tokens: this.depth, draft_positions: true, report: true };
    const events = streamOf(
      asChat ? "v1/chat/completions" : "v1/completions", { ...asked, ...body, stream: true, speculation }, signal,
    );
    this.element.dataset.running = "";
    try {
      for await (const event of events) this.#take(event);
    } finally {
      delete this.element.dataset.running;
    }
  }

  #take(event) {
    const isAtEnd = this.pre.scrollHeight - this.pre.scrollTop - this.pre.clientHeight < 40;
    this.answer.take(event);
    this.reasoning.show(this.answer.reasoning.runs);
    this.content.show(this.answer.content.runs);
    if (isAtEnd) this.pre.scrollTop = this.pre.scrollHeight;
    if (this.answer.numTokens) this.#count();
    if (event.speculation) this.#tellDrafts(event.speculation);
  }

  // Shows at the end how many drafts of each position were accepted.
  #tellDrafts({ drafted_per_position: drafted, accepted_per_position: accepted }) {
    const sum = (counts) => counts.reduce((total, count) => total + count, 0);
    if (!sum(drafted)) return;
    const counts = this.element.querySelector(".counts");
    counts.textContent += ` · ${sum(accepted)} of ${sum(drafted)} drafts accepted`;
    this.element.querySelectorAll(".shares i").forEach((share, i) => {
      if (i) share.title = `draft ${i}: ${accepted[i - 1]} of ${drafted[i - 1]} accepted`;
    });
  }

  #count() {
    const { counts, numTokens } = this.answer;
    this.element.querySelector("output").textContent = number(this.tokensPerSecond);
    this.element.querySelectorAll(".shares i").forEach((share, i) => {
      share.style.flexGrow = counts[i];
    });
    const told = [`${numTokens} tokens in ${counts[0]} steps of the model`];
    if (this.depth) told.push(`${percent(1 - counts[0] / numTokens)} were drafts`, `${number(this.tokensPerStep, 2)} tokens a step`);
    this.element.querySelector(".counts").textContent = told.join(" · ");
  }
}

function shareOf(position) {
  const share = document.createElement("i");
  share.dataset.position = position;
  share.style.flexGrow = 0;
  return share;
}
