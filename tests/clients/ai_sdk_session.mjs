// Vercel's AI SDK as its users have it; prints what came as JSON. Arguments: the URLs of a server of the real model, and of
// one whose model says what the user's message tells it to.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [real, scripted] = process.argv.slice(2).map((url) => createOpenAICompatible({
  name: "headway", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
})("demo-tools"));
const item = z.object({ color: z.enum(["red", "green", "blue"]), count: z.number().int().min(0).max(99) });
const call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>';
const TURN = "\n=====\n";
const told = {};
const common = { maxRetries: 0, maxOutputTokens: 200, seed: 3 };

const called = [];
const multiply = tool({
  description: "Multiplies two numbers.", inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => { called.push([a, b]); return a * b; },
});
const pick = tool({ description: "Picks a color.", inputSchema: z.object({ color: z.enum(["red", "green"]) }) });

const script = `<think>\nSix times seven.\n</think>\n\nLet me see.\n${call}${TURN}It is 42.`;
const agent = { ...common, model: scripted, prompt: script, tools: { multiply, pick }, stopWhen: stepCountIs(3) };
const generated = await generateText(agent);
told.generated = {
  text: generated.text, steps: generated.steps.length, reason: generated.steps[0].finishReason,
  reasoning: generated.steps[0].reasoningText, results: generated.steps[0].toolResults.map((one) => one.output),
  usage: generated.totalUsage,
};

const streamed = streamText(agent);
const parts = [];
for await (const part of streamed.fullStream) parts.push(part);
const errors = parts.filter((part) => part.type === "error").map((part) => String(part.error));
told.streamed = {
  text: await streamed.text, steps: (await streamed.steps).length, errors,
  reasoning: parts.filter((part) => part.type === "reasoning-delta").map((part) => part.text).join(""),
  calls: parts.filter((part) => part.type === "tool-call").map((part) => part.input),
};
told.called = [...called];

const prompt = "import os";
for (const toolChoice of ["required", { type: "tool", toolName: "pick" }]) {
  const tools = toolChoice === "required" ? { pick } : { multiply, pick };
  const enforced = await generateText({ ...common, model: real, prompt, tools, toolChoice });
  told[`choice ${toolChoice.toolName ?? toolChoice}`] = enforced.toolCalls.map((one) => [one.toolName, one.input]);
}

const object = await generateObject({ ...common, model: real, prompt, schema: item });
told.object = object.object;
const stream = streamObject({ ...common, model: real, prompt, schema: item });
let partials = 0;
for await (const _ of stream.partialObjectStream) partials += 1;
told.streamObject = { object: await stream.object, partials };
told.choice = (await generateObject({ ...common, model: real, prompt, output: "enum", enum: ["sun", "rain"] })).object;
const output = await generateText({ ...common, model: real, prompt, output: Output.object({ schema: item }) });
told.output = output.output;
const free = { ...common, model: scripted, prompt: '{"any": [1]}', output: "no-schema" };
told.noSchema = (await generateObject(free)).object;

// The Responses API, which OpenAI's own provider speaks unless it is told otherwise.
const sent = [];
const provider = createOpenAI({
  baseURL: `${process.argv[3]}/v1`, apiKey: "none",
  fetch: (url, options) => { sent.push(JSON.parse(options.body)); return fetch(url, options); },
});
const items = { ...agent, seed: undefined, model: provider("demo-tools"), providerOptions: { openai: { store: false } } };
const whole = await generateText(items);
const spoken = streamText(items);
const text = [];
for await (const part of spoken.textStream) text.push(part);
told.responses = {
  text: whole.text, steps: whole.steps.length, streamed: await spoken.text, deltas: text.length,
  usage: whole.totalUsage, reason: whole.finishReason,
  carried: sent.map((body) => body.input.filter((one) => one.type === "reasoning")),
  warnings: [...whole.steps, ...await spoken.steps].flatMap((step) => step.warnings),
};
globalThis.AI_SDK_LOG_WARNINGS = false;
const referring = await generateText({ ...items, providerOptions: {} }).catch((error) => error.message);
told.reference = String(referring);

console.log(JSON.stringify(told));
