// Requests whose answers are streams of server-sent events.
import { authorized } from "./key.js";

// Yields the parsed events of an answer. Throws an Error whose message is for people, and AbortError if the signal is aborted.
export async function* streamOf(path, body, signal) {
  const answer = await reached(fetch(path, authorized({ method: "POST", signal, body: JSON.stringify(body) })));
  if (!answer.ok) throw new Error(await refusal(answer));
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

async function reached(fetched) {
  try {
    return await fetched;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`The server cannot be reached (${error.message}). Check that it runs, then try again.`);
  }
}

async function refusal(answer) {
  if (answer.status === 401) return "The server wants an API key, or another one: enter it above.";
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The answer has status ${answer.status}: ${text.slice(0, 500)}`; // of a proxy
  }
}

// Yields the parsed `data:` lines of a stream up to [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await nextOf(reader);
    if (done) throw new Error("The connection ended before the answer did. Check the server's log, then try again.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice("data: ".length));
    }
  }
}

async function nextOf(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { done: true }; // the connection was reset
  }
}
