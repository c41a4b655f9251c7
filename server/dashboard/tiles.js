// The present state, with one number on each tile.
import { duration, number, percent } from "./numbers.js";

const P50 = 0;
const P95 = 1;
// The title, the text (a value and, after a bar, a note), and whether the value is bad.
const TILES = [
  ["tokens/s", (point) => number(point.tokens_per_second)],
  ["streams", (point, server) => of(point.num_running, server.max_running)],
  ["waiting", (point) => number(point.num_waiting)],
  ["tokens a round", (point) => number(point.acceptance_length, 2)],
  ["drafts a round", (point, server) => of(point.depth, server.depth, 1)],
  ["KV cache in use", (point) => percent(point.kv_cache_usage_ratio)],
  ["first token, p50", (point) => pair(point.time_to_first_token)],
  ["per token, p50", (point) => pair(point.time_per_output_token)],
  ["audit", (point, server, audits) => audit(audits), (audits) => audits.different > 0],
];

function of(value, limit, digits = 0) {
  const shown = Number.isInteger(value) ? number(value) : number(value, digits);
  return limit == null ? shown : `${shown}|of ${limit}`;
}

function pair(quantiles) {
  return `${duration(quantiles[P50])}|p95 ${duration(quantiles[P95])}`;
}

// Requests that were computed again without drafts. Dropped ones waited too long for an idle server.
function audit({ same = 0, different = 0, dropped = 0 }) {
  const all = same + different;
  const rest = dropped ? [`${number(dropped)} dropped`] : [];
  if (!all) return dropped ? `none|${rest}` : "off";
  const [count, verdict] = different ? [different, "differ"] : [same, "the same"];
  return `${number(count)} of ${number(all)}|${[verdict, ...rest].join(", ")}`;
}

function element(name, text) {
  return Object.assign(document.createElement(name), { textContent: text });
}

export class Tiles {
  constructor(list) {
    this.values = TILES.map(([title]) => {
      const tile = list.appendChild(document.createElement("div"));
      tile.appendChild(document.createElement("dt")).textContent = title;
      return tile.appendChild(document.createElement("dd"));
    });
  }

  show(point, server, audits) {
    TILES.forEach(([, read, isBad], i) => {
      const [main, rest] = (point ? read(point, server, audits) : number(null)).split("|");
      this.values[i].dataset.kind = isBad?.(audits) ? "bad" : "";
      this.values[i].replaceChildren(element("span", main), ...(rest ? [element("small", rest)] : []));
    });
  }
}
