// The settings of the chat: the fields of a request apart from its messages. Stored for this tab only.
const NAME = "headway-chat-settings";
const WIDE = "(min-width: 64rem)"; // where the settings stand next to the messages

const $ = (id) => document.getElementById(id);

// How a field is read, and its name and value in a request. A reader throws an Error that says what is wrong and what to do.
const FIELDS = [
  { id: "chat-drafts", read: chosenIn, put: (body, value) => (body.speculation.max_draft_tokens = Number(value)) },
  { id: "chat-temperature", read: numberIn, put: (body, value) => (body.temperature = value) },
  { id: "chat-top-p", read: numberIn, put: (body, value) => (body.top_p = value) },
  { id: "chat-top-k", read: numberIn, put: (body, value) => (body.top_k = value) },
  { id: "chat-min-p", read: numberIn, put: (body, value) => (body.min_p = value) },
  { id: "chat-max-tokens", read: numberIn, put: (body, value) => (body.max_tokens = value) },
  { id: "chat-presence-penalty", read: numberIn, put: (body, value) => (body.presence_penalty = value) },
  { id: "chat-frequency-penalty", read: numberIn, put: (body, value) => (body.frequency_penalty = value) },
  { id: "chat-repetition-penalty", read: numberIn, put: (body, value) => (body.repetition_penalty = value) },
  { id: "chat-stop-at", read: textIn, put: (body, value) => (body.stop = value) },
  { id: "chat-seed", read: numberIn, put: (body, value) => (body.seed = value) },
  { id: "chat-thinking", read: chosenIn, put: (body, value) => (body.reasoning_effort = value) },
  { id: "chat-thinking-budget", read: numberIn, put: (body, value) => (body.thinking_budget_tokens = value) },
  { id: "chat-schema", read: schemaIn, put: (body, schema) => (body.response_format = asFormat(schema)) },
  {
    id: "chat-tools",
    read: toolsIn,
    put: (body, tools) => Object.assign(body, { tools }, TOOL_CHOICES[$("chat-tool-choice").value]),
  },
];

const TOOL_CHOICES = { auto: {}, one: { tool_choice: "required", parallel_tool_calls: false } };

const EXAMPLES = {
  "chat-schema": {
    type: "object",
    properties: { city: { type: "string" }, country: { type: "string" } },
    required: ["city", "country"],
    additionalProperties: false,
  },
  "chat-tools": [{
    type: "function",
    function: {
      name: "get_time",
      description: "Tells the time in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  }],
};

export class ChatSettings {
  constructor() {
    this.form = $("chat-settings");
    this.depth = null;
    restore(this.form);
    this.open(matchMedia(WIDE).matches);
    $("chat-more").open = matchMedia(WIDE).matches;
    $("chat-settings-toggle").addEventListener("click", () => {
      this.open(this.form.hidden);
      if (!this.form.hidden) $("chat-settings-title").focus();
    });
    $("chat-settings-done").addEventListener("click", () => {
      this.open(false);
      $("chat-settings-toggle").focus();
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("change", ({ target }) => {
      save(this.form);
      this.#check(FIELDS.find(({ id }) => id === target.id));
    });
    for (const button of this.form.querySelectorAll("[data-example]")) {
      button.addEventListener("click", () => fill($(button.dataset.example)));
    }
  }

  open(isOpen) {
    this.form.hidden = !isOpen;
    $("chat-settings-toggle").setAttribute("aria-expanded", isOpen);
  }

  // depth: drafts a round that the server allows.
  setDepth(depth) {
    if (depth === this.depth) return;
    const menu = $("chat-drafts");
    const chosen = this.depth === null ? menu.dataset.restored : menu.value;
    this.depth = depth;
    const options = Array.from({ length: depth }, (_, i) => new Option(`at most ${i + 1}`, i + 1));
    menu.replaceChildren(new Option("as many as the server makes", ""), new Option("none", 0), ...options);
    menu.value = chosen && chosen <= depth ? chosen : "";
  }

  // sampling: the default values of a request's fields.
  setDefaults(sampling) {
    for (const [name, value] of Object.entries(sampling)) $(`chat-${name.replace("_", "-")}`).placeholder = value;
  }

  // parameters: the fields of a chat that the model supports, as GET /v1/models names them.
  setParameters(parameters) {
    for (const part of this.form.querySelectorAll("[data-needs]")) part.hidden = !parameters.includes(part.dataset.needs);
    const hasEfforts = parameters.includes("reasoning_effort");
    for (const option of $("chat-thinking").querySelectorAll("[data-effort]")) option.hidden = !hasEfforts;
  }

  get system() {
    return $("chat-system").value.trim();
  }

  // Returns the fields of a request; null if one is invalid: the page says so next to it, and it gets the focus.
  read() {
    const body = { speculation: { draft_positions: true, report: true } };
    for (const field of FIELDS.filter(isOffered)) {
      const value = this.#check(field);
      if (value === undefined) {
        this.open(true);
        if ($("chat-more").contains($(field.id))) $("chat-more").open = true;
        $(field.id).focus();
        return null;
      }
      if (value !== null) field.put(body, value);
    }
    return body;
  }

  // Reads a field and shows what is wrong with it. Returns undefined for an invalid field, null for an empty one.
  #check(field) {
    if (!field) return null;
    const element = $(field.id);
    let value, message = "";
    try {
      value = field.read(element);
    } catch (error) {
      message = error.message;
    }
    element.setAttribute("aria-invalid", message !== "");
    const told = $(element.getAttribute("aria-describedby"));
    if (told) told.textContent = message;
    return value;
  }
}

function isOffered({ id }) {
  return !$(id).closest("[data-needs][hidden]");
}

function textIn(input) {
  return input.value || null;
}

function chosenIn(menu) {
  return menu.value || null;
}

function numberIn(input) {
  if (!input.checkValidity()) throw new Error(`${input.dataset.name}: ${input.validationMessage}`);
  return input.value === "" ? null : Number(input.value);
}

function schemaIn(box) {
  const schema = jsonIn(box);
  if (typeof schema === "object" && !Array.isArray(schema)) return schema;
  throw new Error('The schema must be a JSON object, such as {"type": "object"}. Correct it, or empty the box.');
}

function toolsIn(box) {
  const tools = jsonIn(box);
  if (tools === null || (Array.isArray(tools) && tools.length)) return tools;
  throw new Error("The tools must be a JSON list of at least one tool. Correct it, or empty the box.");
}

function jsonIn(box) {
  if (!box.value.trim()) return null;
  try {
    return JSON.parse(box.value);
  } catch (error) {
    throw new Error(`This is no valid JSON: ${error.message}. Correct it, or empty the box.`);
  }
}

function asFormat(schema) {
  return { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
}

function fill(box) {
  box.value = JSON.stringify(EXAMPLES[box.id], null, 2);
  box.dispatchEvent(new Event("change", { bubbles: true }));
  box.focus();
  box.setSelectionRange(0, 0);
  box.scrollTop = 0;
}

function save(form) {
  const values = Object.fromEntries(Array.from(form.elements)
    .filter(({ id }) => id)
    .map(({ id, type, value, checked }) => [id, type === "checkbox" ? checked : value]));
  sessionStorage.setItem(NAME, JSON.stringify(values));
}

function restore(form) {
  const values = JSON.parse(sessionStorage.getItem(NAME) ?? "{}");
  for (const [id, value] of Object.entries(values)) {
    const element = $(id);
    if (!element || !form.contains(element)) continue;
    if (element.type === "checkbox") element.checked = value;
    else element.value = value;
    element.dataset.restored = value; // a menu whose options come later
  }
}
