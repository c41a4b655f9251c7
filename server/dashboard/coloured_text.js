// Text whose tokens are coloured by where they came from: the model itself, or which accepted draft of a round.
export class ColouredText {
  constructor(element) {
    this.element = element;
    this.spans = [];
  }

  // runs: { position, text } each; those shown before may have grown at their end only.
  show(runs) {
    for (let i = Math.max(0, this.spans.length - 1); i < runs.length; i += 1) {
      this.spans[i] ??= this.element.appendChild(spanOf(runs[i].position));
      if (this.spans[i].textContent !== runs[i].text) this.spans[i].textContent = runs[i].text;
    }
  }
}

export function showLegend(list, depth) {
  list.replaceChildren(...Array.from({ length: depth + 1 }, (_, position) => {
    const item = document.createElement("li");
    item.dataset.position = position;
    item.textContent = position === 0 ? "by the model" : `draft ${position}`;
    return item;
  }));
}

export function spanOf(position) {
  const span = document.createElement("span");
  span.dataset.position = position;
  span.title = position ? `draft ${position}, accepted` : "by the model";
  return span;
}
