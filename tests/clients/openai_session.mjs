// Uses the official JavaScript client as its users do; prints what came as JSON. Arguments: the server's URL.
import OpenAI from "openai";

const model = "demo-chat";
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const user = { role: "user", content: "import os" };
const prompt = "def read_config(path):\n";
const told = {};

const completion = await client.completions.create({ model, prompt, max_tokens: 24, seed: 3 });
told.completion = completion.choices[0].text;
told.usage = completion.usage;

told.streamed = "";
const stream = await client.completions.create({
  model, prompt, max_tokens: 24, seed: 3, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  told.streamed += chunk.choices[0]?.text ?? "";
  told.streamedUsage = chunk.usage ?? told.streamedUsage;
}

const asked = { model, messages: [user], max_completion_tokens: 24, temperature: 0, logprobs: true, top_logprobs: 2 };
const chat = await client.chat.completions.create(asked);
told.chat = chat.choices[0].message.content;
told.tokens = chat.choices[0].logprobs.content.map((entry) => entry.token);
told.chatStreamed = await client.chat.completions.stream(asked).finalContent();

const history = await client.chat.completions.create({
  model, messages: [user, { ...chat.choices[0].message }, user], max_completion_tokens: 4,
});
told.history = history.choices[0].finish_reason;

for await (const chunk of await client.completions.create({ model, prompt, max_tokens: 1500, stream: true })) {
  told.left = chunk.object;
  break; // which aborts the request
}

try {
  await client.chat.completions.create({ ...asked, temperature: 3 });
} catch (error) {
  told.error = [error.constructor.name, error.status, error.message];
}
console.log(JSON.stringify(told));
