// How many times as fast the rounds of the last minute were as rounds without drafts, as one number with its history.
import { Charts } from "./charts.js";
import { times } from "./numbers.js";

const HEIGHT = 110;
const CHART = {
  title: "Its history", unit: "means over a minute", format: (v) => times(v), top: 1.5,
  series: () => [
    { label: "speed-up", colour: 2, isFilled: true, read: (point) => point.speedup },
    { label: "without drafts", colour: 0, read: () => 1 },
  ],
};

export class SpeedUp {
  constructor({ value, note, chart }) {
    this.value = value;
    this.note = note;
    this.charts = new Charts(chart, [CHART], HEIGHT);
  }

  show(points, server) {
    const [value, note, isNumber] = told(points.at(-1), server);
    this.value.textContent = value;
    this.value.dataset.kind = isNumber ? "number" : "words";
    this.note.textContent = note;
    this.charts.show(points, 0);
  }

  recolour() {
    this.charts.recolour();
  }
}

// Returns the number, or a text if there is none, and a note on it.
function told(point, server) {
  if (server.drafter == null) return ["not known yet", "The model is loading."];
  if (server.drafter === "none") return ["no drafter", "The server runs without speculation: there is nothing to compare."];
  if (point?.speedup != null) return [times(point.speedup), "the tokens a second that rounds without drafts would give; last minute", true];
  if (server.depth === 0) return ["drafts are off", "An operator, or the check of the head, has set the limit of drafts to 0."];
  return ["no rounds", "Nothing was generated in the last minute that could be compared."];
}
