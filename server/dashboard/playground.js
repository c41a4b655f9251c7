// The prompt box: streams a completion and colours each token by where it came from.
import { authorized } from "./key.js";
import { number, percent } from "./numbers.js";

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
    $("legend").replaceChildren(...Array.from({ length: depth + 1 }, (_, i) => sample(i)));
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

function sample(position) {
  const item = document.createElement("li");
  item.dataset.position = position;
  item.textContent = position === 0 ? "by the model" : `draft ${position}`;
  return item;
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
    this.counts = Array(depth + 1).fill(0); // tokens by position; 0 is the model itself
    this.numCharacters = 0;
    this.text = "";
    this.firstSeconds = null;
    this.tokensPerSecond = 0;
    this.element = $("run-template").content.firstElementChild.cloneNode(true);
    this.element.querySelector("h3").textContent = depth ? `${drafts(depth)} a round` : "without drafts";
    this.element.querySelector(".shares").append(...this.counts.map((_, i) => shareOf(i)));
    this.pre = this.element.querySelector("pre");
    const shown = this.pre.appendChild(document.createElement("span"));
    shown.className = "prompt";
    shown.dataset.position = 0;
    shown.textContent = prompt;
    this.last = null; // the span that text without a token of its own belongs to
  }

  async stream(body, prompt, asChat, signal) {
    const asked = asChat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    const answer = await fetch(asChat ? "v1/chat/completions" : "v1/completions", authorized({
      method: "POST",
      signal,
      body: JSON.stringify({
        ...asked, ...body, stream: true,
        speculation: { max_draft_tokens: this.depth, draft_positions: true, report: true },
      }),
    }));
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    this.element.dataset.running = "";
    try {
      for await (const event of events(answer.body)) this.#take(event);
    } finally {
      delete this.element.dataset.running;
    }
  }

  #take({ choices, error, speculation: report }) {
    if (error) throw new Error(error.message);
    if (report) this.#tellDrafts(report);
    const { text, delta, speculation } = choices[0] ?? {};
    const piece = text ?? delta?.content ?? "";
    if (!speculation) return;
    const now = performance.now() / 1000;
    const numBefore = this.numTokens;
    this.#append(piece, speculation);
    if (this.firstSeconds === null) {
      this.firstSeconds = now;
      this.numFirst = this.numTokens;
    } else if (this.numTokens > numBefore) {
      this.tokensPerSecond = (this.numTokens - this.numFirst) / (now - this.firstSeconds);
    }
    this.#count();
  }

  get numTokens() {
    return this.counts.reduce((sum, count) => sum + count, 0);
  }

  // A step of the model gives one token of its own and the drafts that it accepts.
  get tokensPerStep() {
    return this.numTokens / this.counts[0];
  }

  // Offsets count characters as Python does, so the piece is taken apart by code points.
  #append(piece, { draft_positions: positions, text_offset: offsets }) {
    const characters = [...piece];
    const isAtEnd = this.pre.scrollHeight - this.pre.scrollTop - this.pre.clientHeight < 40;
    const ends = [...offsets.slice(1), this.numCharacters + characters.length];
    const head = characters.slice(0, (offsets[0] ?? ends.at(-1)) - this.numCharacters).join("");
    if (head && this.last) this.last.textContent += head;
    positions.forEach((position, i) => {
      this.counts[position] += 1;
      const own = characters.slice(offsets[i] - this.numCharacters, ends[i] - this.numCharacters).join("");
      this.last = this.pre.appendChild(document.createElement("span"));
      this.last.dataset.position = position;
      this.last.title = position ? `draft ${position}, accepted` : "by the model";
      this.last.textContent = own;
    });
    this.numCharacters += characters.length;
    this.text += piece;
    if (isAtEnd) this.pre.scrollTop = this.pre.scrollHeight;
  }

  // At the end: how many drafts of each position were right.
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
    const accepted = this.numTokens - this.counts[0];
    this.element.querySelector("output").textContent = number(this.tokensPerSecond);
    this.element.querySelectorAll(".shares i").forEach((share, i) => {
      share.style.flexGrow = this.counts[i];
    });
    const told = [`${this.numTokens} tokens in ${this.counts[0]} steps of the model`];
    if (this.depth) told.push(`${percent(accepted / this.numTokens)} were drafts`, `${number(this.tokensPerStep, 2)} tokens a step`);
    this.element.querySelector(".counts").textContent = told.join(" · ");
  }
}

function shareOf(position) {
  const share = document.createElement("i");
  share.dataset.position = position;
  share.style.flexGrow = 0;
  return share;
}

// The `data:` lines of a stream, parsed, up to [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice("data: ".length));
    }
  }
}
