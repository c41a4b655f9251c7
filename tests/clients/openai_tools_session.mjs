// Structured output and tools by the helpers of the official JavaScript client; prints what came as JSON. Arguments: the URLs
// of a server of the real model, and of one whose model says what the user's message tells it to.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = "demo-tools";
const [real, scripted] = process.argv.slice(2).map(
  (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 }),
);
const item = z.object({ color: z.enum(["red", "green", "blue"]), count: z.number().int().min(0).max(99) });
const asked = { model, messages: [{ role: "user", content: "import os" }], max_tokens: 200, seed: 3 };
const told = {};

const form = zodResponseFormat(item, "item");
told.parsed = (await real.chat.completions.parse({ ...asked, response_format: form })).choices[0].message.parsed;
const stream = real.chat.completions.stream({ ...asked, response_format: form });
told.streamed = (await stream.finalChatCompletion()).choices[0].message.parsed;

const pick = zodFunction({ name: "pick", parameters: item });
const called = await real.chat.completions.parse({ ...asked, tools: [pick], tool_choice: "required", parallel_tool_calls: false });
told.required = called.choices[0].message.tool_calls.map((call) => call.function.parsed_arguments);

const call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>';
const script = `Let me see.\n${call}\n=====\nIt is 42.`;
for (const streams of [false, true]) {
  const results = [];
  const multiply = {
    type: "function",
    function: {
      name: "multiply", parse: JSON.parse,
      function: ({ a, b }) => { results.push(a * b); return String(a * b); },
      parameters: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } },
    },
  };
  const runner = scripted.chat.completions.runTools({
    model, messages: [{ role: "user", content: script }], tools: [multiply], max_tokens: 200, stream: streams,
  });
  told[`run ${streams ? "streamed" : "whole"}`] = { text: await runner.finalContent(), results };
}
console.log(JSON.stringify(told));
