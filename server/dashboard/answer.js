// An answer of a chat or a completion while its chunks arrive: texts in runs of one token each, calls of tools, counts.
const MAX_DEPTH = 8;

export class Answer {
  constructor() {
    this.content = newText();
    this.reasoning = newText();
    this.calls = []; // { id, name, arguments }
    this.counts = Array(MAX_DEPTH + 1).fill(0); // tokens by draft position; 0 is the model itself
    this.finishReason = null;
    this.report = null; // drafted and accepted by position, which comes last
    this.tokensPerSecond = 0;
    this.reasoningSeconds = null; // from its first to its last piece
    this.firstSeconds = null; // when the first token came
    this.numFirst = 0; // tokens that came with it
    this.tokens = []; // [draft position, where its text begins in the model's own text]
    this.numPassed = 0; // tokens that have their run
    this.numCharacters = 0; // of a text that is not split into parts
  }

  get numTokens() {
    return this.counts.reduce((sum, count) => sum + count, 0);
  }

  // A step of the model gives one token of its own and the drafts that it accepts.
  get tokensPerStep() {
    return this.counts[0] ? this.numTokens / this.counts[0] : null;
  }

  take({ choices, speculation: report }) {
    if (report) this.report = report;
    const choice = choices[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    const now = performance.now() / 1000;
    if (choice.speculation) this.#countTokens(choice.speculation, now);
    const offset = choice.speculation?.delta_offset;
    if (delta.reasoning_content) {
      this.#write(this.reasoning, delta.reasoning_content, offset);
      this.reasoningBegin ??= now;
      this.reasoningSeconds = now - this.reasoningBegin;
    }
    if (delta.content) this.#write(this.content, delta.content, offset);
    for (const { id, function: called } of delta.tool_calls ?? []) this.calls.push({ id, ...called });
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
  }

  #countTokens({ draft_positions: positions, text_offset: offsets }, now) {
    if (!positions.length) return;
    positions.forEach((position, i) => {
      this.counts[position] += 1;
      this.tokens.push([position, offsets[i]]);
    });
    if (this.firstSeconds === null) {
      this.firstSeconds = now;
      this.numFirst = positions.length;
    } else {
      this.tokensPerSecond = (this.numTokens - this.numFirst) / (now - this.firstSeconds);
    }
  }

  // Offsets count characters as Python does, so the piece is split by code points. Text before the first token
  // that begins in the piece belongs to the token before.
  #write(text, piece, offset) {
    const characters = [...piece];
    const start = offset ?? this.numCharacters;
    const end = start + characters.length;
    const cut = (from, to) => characters.slice(from - start, to - start).join("");
    const beginOf = (token) => Math.min(this.tokens[token]?.[1] ?? end, end);
    while (this.#begins(this.numPassed, start)) this.numPassed += 1;
    const head = cut(start, beginOf(this.numPassed));
    if (head) addTo(text, this.numPassed - 1, this.tokens[this.numPassed - 1]?.[0] ?? 0, head);
    for (; this.#begins(this.numPassed, end); this.numPassed += 1) {
      const [position, begin] = this.tokens[this.numPassed];
      addTo(text, this.numPassed, position, cut(begin, beginOf(this.numPassed + 1)));
    }
    text.value += piece;
    this.numCharacters += characters.length;
  }

  // Returns whether the token begins before this place.
  #begins(token, place) {
    return token < this.tokens.length && this.tokens[token][1] < place;
  }
}

function newText() {
  return { value: "", runs: [], lastToken: null };
}

function addTo(text, token, position, piece) {
  if (text.lastToken === token && text.runs.length) text.runs.at(-1).text += piece;
  else text.runs.push({ position, text: piece });
  text.lastToken = token;
}
