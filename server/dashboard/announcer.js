// Tells a screen reader what happens, politely: whole sentences of an answer, and not more often than every few seconds.
const PAUSE_MILLISECONDS = 4000;
const SENTENCES = /^[^]*(?:[.!?:]["')\]*]*\s|[。！？\n])/;

export class Announcer {
  constructor(region) {
    this.region = region;
    this.waiting = "";
    this.toldAt = 0;
  }

  say(text) {
    this.region.replaceChildren();
    this.#tell(text);
  }

  begin() {
    this.region.replaceChildren();
    this.waiting = "";
    this.toldAt = performance.now();
  }

  // A piece of the answer.
  hear(piece) {
    this.waiting += piece;
    if (performance.now() - this.toldAt < PAUSE_MILLISECONDS) return;
    const sentences = SENTENCES.exec(this.waiting)?.[0];
    if (!sentences) return;
    this.waiting = this.waiting.slice(sentences.length);
    this.#tell(sentences);
  }

  // The rest of the answer, and how it ended.
  end(text) {
    for (const one of [this.waiting, text]) if (one.trim()) this.#tell(one);
    this.waiting = "";
  }

  #tell(text) {
    this.toldAt = performance.now();
    const told = document.createElement("p");
    told.textContent = text.trim();
    this.region.append(told);
  }
}
