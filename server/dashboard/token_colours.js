// Colours the texts of rendered Markdown by the tokens of its source. Knows no Markdown: texts come in the order of the source,
// where they stand as they are, but for markup between them and characters that were escaped.
import { spanOf } from "./coloured_text.js";

const MAX_SKIPPED = 40; // characters of markup within one text

// source: of the whole answer; root shows what is between begin and end. runs: { position, text } each, which make up the source.
export function colourTokens(root, source, begin, end, runs) {
  const ends = endsOf(runs);
  let cursor = begin;
  for (const node of textsOf(root)) {
    if (node.nodeType === Node.ELEMENT_NODE) { // a formula, whose own text is other than its source
      const place = source.indexOf(node.title, cursor);
      if (place < 0 || place >= end) continue;
      node.dataset.position = runs[runAt(ends, place)].position;
      cursor = place + node.title.length;
      continue;
    }
    const places = placesOf(node.data, source, cursor, end);
    cursor = places.at(-1) + 1;
    node.replaceWith(...spansOf(node.data, places, ends, runs));
  }
}

// The text nodes and the formulas; not the white space between elements.
function textsOf(root) {
  const accept = (node) => {
    if (node.nodeType === Node.ELEMENT_NODE) return node.matches(".formula") ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_SKIP;
    if (node.parentElement.closest(".formula")) return NodeFilter.FILTER_REJECT;
    const isBetween = !node.data.trim() && node.data.includes("\n") && !node.parentElement.closest("pre");
    return isBetween ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT;
  };
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, accept);
  const found = [];
  while (walker.nextNode()) found.push(walker.currentNode);
  return found;
}

// Where each code unit of a text stands in the source, from the cursor on; one that is not there stands where the one before does.
function placesOf(text, source, cursor, end) {
  const whole = source.indexOf(text, cursor);
  if (whole >= 0 && whole + text.length <= end) return Array.from({ length: text.length }, (_, i) => whole + i);
  let next = cursor;
  return Array.from({ length: text.length }, (_, i) => {
    const place = source.indexOf(text[i], next);
    if (place < 0 || place >= Math.min(end, next + MAX_SKIPPED)) return Math.max(cursor, next - 1);
    next = place + 1;
    return place;
  });
}

// Returns a span for each run that overlaps the text.
function spansOf(text, places, ends, runs) {
  const spans = [];
  for (let i = 0; i < text.length;) {
    const begin = i, run = runAt(ends, places[i]);
    while (i < text.length && runAt(ends, places[i]) === run) i += 1;
    const span = spanOf(runs[run].position);
    span.textContent = text.slice(begin, i);
    spans.push(span);
  }
  return spans;
}

function endsOf(runs) {
  let end = 0;
  return runs.map(({ text }) => (end += text.length));
}

// Returns the first run that ends after the place.
function runAt(ends, place) {
  let low = 0, high = ends.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > place) high = middle;
    else low = middle + 1;
  }
  return low;
}
