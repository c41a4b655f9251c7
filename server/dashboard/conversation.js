// A chat's messages, and the browser's copy of them: an entry of its storage for each chat, so that tabs do not overwrite each
// other's. Knows no page.
//   { role: "user", content }
//   { role: "assistant", content, reasoning, calls, ... }   what else its view shows
//   { role: "tool", callId, name, content }
const PREFIX = "headway-chat:";
const CURRENT = "headway-chat-id"; // of the chat that this tab shows
const TITLE_CHARACTERS = 60;

export class Conversation {
  constructor() {
    this.open(sessionStorage.getItem(CURRENT));
  }

  // Goes on with a kept chat, or begins a new one where there is none with this id.
  open(id) {
    const kept = id && read(id);
    this.id = kept ? id : `${Date.now()}-${Math.random().toString(36).slice(2)}`;
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

  // As the API takes them.
  asMessages(system) {
    const messages = asMessages(this.messages);
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  // Returns whether there was room for it.
  save() {
    if (!this.messages.length) return true;
    return write(this.id, { name: this.name, savedAt: Date.now(), messages: this.messages });
  }
}

// { id, title, savedAt } of all, the last one first.
export function keptChats() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  const chats = ids.map((id) => ({ id, ...read(id) })).filter(({ messages }) => messages);
  return chats.map(({ id, savedAt, ...chat }) => ({ id, savedAt, title: titleOf(chat) })).sort((a, b) => b.savedAt - a.savedAt);
}

export function renameChat(id, name) {
  return write(id, { ...read(id), name });
}

export function deleteChat(id) {
  localStorage.removeItem(PREFIX + id);
}

// What others can read: the title, and the messages as the API takes them.
export function exportedChat(id) {
  const chat = read(id);
  return { title: titleOf(chat), messages: asMessages(chat.messages) };
}

function titleOf({ name, messages }) {
  return name || messages[0].content.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARACTERS);
}

// An answer without text and calls, which failed or was stopped at once, is left out.
function asMessages(messages) {
  return messages.map(asMessage).filter(Boolean);
}

function asMessage(message) {
  if (message.role === "user") return { role: "user", content: message.content };
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
