// The messages of a chat, and the tab's copy of them. Knows no page.
//   { role: "user", content }
//   { role: "assistant", content, reasoning, calls, ... }   what else its view shows
//   { role: "tool", callId, name, content }
const NAME = "headway-chat";

export class Conversation {
  constructor() {
    this.messages = restored();
  }

  add(message) {
    this.messages.push(message);
    return message;
  }

  // Drops the message and all that follow it.
  cutBefore(message) {
    this.messages.length = this.messages.indexOf(message);
  }

  clear() {
    this.messages.length = 0;
  }

  get last() {
    return this.messages.at(-1);
  }

  // The calls of the last answer, which wait for their results.
  get openCalls() {
    return this.last?.role === "assistant" ? this.last.calls : [];
  }

  // As the API takes them. An answer without text and calls, which failed or was stopped at once, is left out.
  asMessages(system) {
    const messages = this.messages.map(asMessage).filter(Boolean);
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  save() {
    try {
      sessionStorage.setItem(NAME, JSON.stringify(this.messages));
    } catch {
      sessionStorage.removeItem(NAME); // more than a tab may keep: the page has the messages until it is left
    }
  }
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

function restored() {
  try {
    return JSON.parse(sessionStorage.getItem(NAME)) ?? [];
  } catch {
    return [];
  }
}
