// A chat's messages, and the browser's copy of them: an entry of its storage for each chat, so that tabs do not overwrite each
// other's. Knows no page.
//   { role: "user", content, files }   files: { name, text } each
//   { role: "assistant", content, reasoning, calls, ... }   what else its view shows
//   { role: "tool", callId, name, content }
const PREFIX = "headway-chat:";
const CURRENT = "headway-chat-id"; // of the chat that this tab shows
const TITLE_CHARACTERS = 60;

export class Conversation {
  constructor() {
    this.open(sessionStorage.getItem(CURRENT));
  }

  // Continues a stored chat, or begins a new one if there is none with this id.
  open(id) {
    const kept = id && read(id);
    this.id = kept ? id : newId();
    this.name = kept?.name ?? "";
    this.messages = kept?.messages ?? [];
    sessionStorage.setItem(CURRENT, this.id);
  }

  add(message) {
    this.messages.push(message);
    return message;
  }

  // Drops the message and all that follow it.
  cutBefore(message) {
    this.messages.length = this.messages.indexOf(message);
  }

  get last() {
    return this.messages.at(-1);
  }

  // The calls of the last answer, which wait for their results.
  get openCalls() {
    return this.last?.role === "assistant" ? this.last.calls : [];
  }

  // Returns the messages in the form of the API.
  asMessages(system) {
    const messages = asMessages(this.messages);
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  // Stores the chat; returns whether there was room for it.
  save() {
    if (!this.messages.length) return true;
    return write(this.id, { name: this.name, savedAt: Date.now(), messages: this.messages });
  }
}

// An answer before its first token; its view adds further fields.
export function newAnswer(model) {
  return {
    role: "assistant", model, content: "", contentRuns: [], reasoning: "", reasoningRuns: [], reasoningSeconds: null, calls: [],
    numTokens: 0, acceptedPerStep: null, tokensPerSecond: 0, ending: null, error: "",
  };
}

// Returns { id, title, savedAt } of the chats whose title or messages have the text, the last one first.
export function keptChats(text = "") {
  const wanted = text.trim().toLowerCase();
  const has = (part) => part?.toLowerCase().includes(wanted);
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  const chats = ids.map((id) => ({ id, ...read(id) })).filter(({ messages }) => messages);
  const found = chats.filter((chat) => has(titleOf(chat)) || chat.messages.some(({ content }) => has(content)));
  return found.map(({ id, savedAt, ...chat }) => ({ id, savedAt, title: titleOf(chat) })).sort((a, b) => b.savedAt - a.savedAt);
}

export function renameChat(id, name) {
  return write(id, { ...read(id), name });
}

export function deleteChat(id) {
  localStorage.removeItem(PREFIX + id);
}

// Returns the chat in a form that other programs can read: the title, and the messages in the form of the API.
export function exportedChat(id) {
  const chat = read(id);
  return { title: titleOf(chat), messages: asMessages(chat.messages) };
}

// Stores what exportedChat returned. Throws an Error that says what is wrong.
export function importChat(text) {
  let chat;
  try {
    chat = JSON.parse(text);
  } catch {
    throw new Error("it is no JSON");
  }
  const given = Array.isArray(chat?.messages) ? chat.messages : [];
  if (given[0]?.role !== "user") throw new Error("it has no list of messages that begins with the user's");
  const names = {};
  const messages = given.map((message) => imported(message, names));
  if (!write(newId(), { name: String(chat.title ?? ""), savedAt: Date.now(), messages })) throw new Error("this browser's storage is full");
}

function newId() {
  return `${Date.now()}-${Math.random().toString(36).slice(2)}`;
}

// names: the tools' names by the ids of their calls so far.
function imported({ role, content, reasoning_content: reasoning, tool_call_id: callId, tool_calls: calls }, names) {
  if (typeof (content ?? "") !== "string") throw new Error("a message is no text");
  if (role === "user") return { role, content };
  if (role === "tool") return { role, callId, name: names[callId] ?? "", content };
  if (role !== "assistant") throw new Error(`a message has the role ${JSON.stringify(role)}`);
  const answer = newAnswer("imported");
  const runs = (text) => (text ? [{ position: 0, text }] : []);
  Object.assign(answer, { content: content ?? "", contentRuns: runs(content), reasoning: reasoning ?? "", reasoningRuns: runs(reasoning), ending: "stop" });
  answer.calls = (calls ?? []).map(({ id, function: called }) => ({ id, ...called }));
  for (const { id, name } of answer.calls) names[id] = name;
  return answer;
}

function titleOf({ name, messages }) {
  return name || messages[0].content.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARACTERS);
}

// An answer without text and calls, which failed or was stopped at once, is left out.
function asMessages(messages) {
  return messages.map(asMessage).filter(Boolean);
}

function asMessage(message) {
  if (message.role === "user") return { role: "user", content: [...(message.files ?? []).map(fenced), message.content].join("\n\n") };
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  const { content, reasoning, calls } = message;
  if (!content && !calls.length) return null;
  const answer = { role: "assistant", content: content || null };
  if (reasoning) answer.reasoning_content = reasoning;
  if (calls.length) {
    answer.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return answer;
}

// A file as a block of Markdown, whose fence is longer than any in it.
function fenced({ name, text }) {
  const fence = "`".repeat(Math.max(2, ...Array.from(text.matchAll(/`+/g), ([ticks]) => ticks.length)) + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

function read(id) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + id));
  } catch {
    return null; // not ours
  }
}

function write(id, chat) {
  try {
    localStorage.setItem(PREFIX + id, JSON.stringify(chat));
    return true;
  } catch {
    return false; // more than the browser keeps for one site
  }
}
