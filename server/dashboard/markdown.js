// An answer's Markdown as elements: tables, highlighted code with a button that copies it, formulas as MathML, each token in the
// colour of its draft. Markup that a model writes is shown as text. Its links are texts with their addresses, its pictures their
// source: nothing that it writes runs, leads elsewhere or loads anything. DOMPurify lets pass only the elements listed here.
import { ColouredText } from "./coloured_text.js";
import { copy } from "./copy.js";
import { colourTokens } from "./token_colours.js";

const SCRIPTS = ["marked.min.js", "purify.min.js", "highlight.min.js", "katex.min.js"];
const MAX_CHARACTERS = 200_000; // a longer answer stays text
const MAX_FORMULA = 2_000;
const COPIED_MILLISECONDS = 2000;

const TEXT_TAGS = [
  "p", "br", "hr", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "del", "span", "div",
  "table", "thead", "tbody", "tr", "th", "td",
];
const MATH_TAGS = [
  "math", "menclose", "merror", "mfrac", "mi", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow", "ms", "mspace",
  "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover",
];
const ALLOWED = {
  ALLOWED_TAGS: [...TEXT_TAGS, ...MATH_TAGS],
  ALLOWED_ATTR: [
    "class", "title", "align", "start", "display", "mathvariant", "stretchy", "fence", "separator", "lspace", "rspace", "minsize",
    "maxsize", "columnalign", "columnspacing", "columnlines", "rowspacing", "rowlines", "width", "height", "depth", "voffset",
    "linethickness", "accent", "accentunder", "scriptlevel", "displaystyle", "mathcolor", "mathbackground", "mathsize", "notation",
    "movablelimits", "largeop", "symmetric", "frame",
  ],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

let parser = null; // marked with our renderer, once the libraries are there
let loading = null;

// Loads the libraries, which only a page with an answer needs. Rejects if one cannot be loaded: answers then stay text.
export function loadMarkdown() {
  loading ??= Promise.all(SCRIPTS.map(loadScript)).then(() => {
    parser = new marked.Marked({ gfm: true, breaks: true, extensions: [formula("block"), formula("inline")], renderer: RENDERER });
  });
  return loading;
}

export class MarkdownText {
  constructor(element) {
    this.element = element;
    this.plain = new ColouredText(element);
    this.isMarkdown = false; // what is shown
    this.blocks = []; // { raw, element }, in their order
  }

  // runs: { position, text } each.
  show(runs) {
    const source = runs.map(({ text }) => text).join("");
    try {
      if (parser && source.length <= MAX_CHARACTERS) return this.#showBlocks(source, runs);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // nested too deeply for marked's recursion
    }
    this.#showPlain(runs);
  }

  // Blocks that have not changed since the last call stay as they are.
  #showBlocks(source, runs) {
    const tokens = parser.lexer(source);
    if (!this.isMarkdown) this.element.replaceChildren();
    this.isMarkdown = true;
    this.element.classList.add("markdown");
    let begin = 0;
    tokens.forEach((token, i) => {
      if (this.blocks[i]?.raw !== token.raw) this.#showBlock(i, token, source, begin, runs);
      begin += token.raw.length;
    });
    this.blocks.splice(tokens.length).forEach(({ element }) => element.remove());
  }

  #showPlain(runs) {
    if (this.isMarkdown) {
      this.isMarkdown = false;
      this.element.classList.remove("markdown");
      this.element.replaceChildren();
      this.blocks = [];
      this.plain = new ColouredText(this.element);
    }
    this.plain.show(runs);
  }

  #showBlock(place, token, source, begin, runs) {
    const element = document.createElement("div");
    element.append(...DOMPurify.sanitize(parser.parser([token]), ALLOWED).children); // without the white space between them
    // The name of a fence's language is not shown.
    const start = token.type === "code" && token.lang ? begin + token.raw.indexOf("\n") : begin;
    colourTokens(element, source, start, begin + token.raw.length, runs);
    element.querySelectorAll(".code").forEach(addHead);
    const shown = this.blocks[place];
    if (shown) shown.element.replaceWith(element);
    else this.element.append(element);
    this.blocks[place] = { raw: token.raw, element };
  }
}

const RENDERER = {
  html: ({ text, block }) => (block ? `<p class="source">${escaped(text.trimEnd())}</p>` : escaped(text)),
  image: ({ raw }) => escaped(raw),
  link({ href, text, tokens }) {
    const shown = this.parser.parseInline(tokens);
    return href.endsWith(text) ? shown : `${shown} (${escaped(href)})`;
  },
  heading({ depth, tokens }) {
    const name = `h${Math.min(6, depth + 3)}`; // below the page's own
    return `<${name}>${this.parser.parseInline(tokens)}</${name}>\n`;
  },
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  code({ text, lang }) {
    const language = lang?.match(/^\S*/)[0] ?? "";
    const known = hljs.getLanguage(language);
    const shown = known ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escaped(text);
    return `<div class="code" title="${escaped(known?.name ?? "Code")}"><pre><code>${shown}</code></pre></div>\n`;
  },
};

const BORDERS = [["\\$\\$", "\\$\\$"], ["\\\\\\[", "\\\\\\]"]]; // of a formula on lines of its own
const INLINE_BORDERS = [...BORDERS, ["\\\\\\(", "\\\\\\)"]];

function formula(level) {
  const isBlock = level === "block";
  const inner = `([^]{1,${MAX_FORMULA}}?)`;
  const forms = (isBlock ? BORDERS : INLINE_BORDERS).map(([open, close]) => new RegExp(`^${open}${inner}${close}${isBlock ? "[ \\t]*(?:\\n|$)" : ""}`));
  // Between single dollars there is a formula if it neither begins nor ends with a space, and no figure follows: not "$5 or $6".
  if (!isBlock) forms.push(new RegExp(`^\\$(?![\\s$])((?:\\\\.|[^\\\\$\\n]){1,${MAX_FORMULA}}?)(?<!\\s)\\$(?!\\d)`));
  return {
    name: `${level}-formula`,
    level,
    start: (source) => source.match(isBlock ? /\$\$|\\\[/ : /\$|\\[([]/)?.index,
    tokenizer(source) {
      const match = forms.map((form) => form.exec(source)).find(Boolean);
      if (match) return { type: `${level}-formula`, raw: match[0], tex: match[1], isDisplay: !/^(?:\$[^$]|\\\()/.test(match[0]) };
    },
    renderer({ raw, tex, isDisplay }) {
      return `<span class="${isDisplay ? "formula display" : "formula"}" title="${escaped(raw.trim())}">${mathOf(tex, raw, isDisplay)}</span>`;
    },
  };
}

// A formula that KaTeX cannot parse is shown as it was written.
function mathOf(tex, raw, isDisplay) {
  const options = { displayMode: isDisplay, output: "mathml", throwOnError: true, trust: false, strict: "ignore", maxExpand: 200, maxSize: 20 };
  try {
    const html = katex.renderToString(tex, options);
    return html.replace(/<annotation[^]*<\/annotation>/, "").replace(/ style="[^"]*"/g, "");
  } catch {
    return escaped(raw);
  }
}

// The line above code: its language, and a button that copies it.
function addHead(block) {
  const code = block.querySelector("code").textContent;
  const head = document.createElement("div");
  const button = document.createElement("button");
  head.className = "row spread quiet";
  head.append(block.title, button);
  block.removeAttribute("title");
  Object.assign(button, { type: "button", className: "plain", textContent: "Copy" });
  button.setAttribute("aria-label", "Copy this code");
  button.addEventListener("click", async () => {
    try {
      await copy(code);
      button.textContent = "Copied";
    } catch (error) {
      button.textContent = `Not copied: ${error.message}`;
    }
    setTimeout(() => (button.textContent = "Copy"), COPIED_MILLISECONDS);
  });
  block.prepend(head);
}

function escaped(text) {
  return text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);
}

function loadScript(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    Object.assign(script, { src: `dashboard/${name}`, onload: resolve, onerror: reject });
    document.head.append(script);
  });
}
