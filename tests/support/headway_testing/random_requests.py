"""Random bodies of completions and chats with every field that changes a text: sampling, forms, tools,
budgets, log-probabilities."""

from __future__ import annotations

import random
from typing import Any

from headway_testing.tiny_tokenizers import TEXT

Body = dict[str, Any]

MOST_PROMPT_WORDS, MOST_TOKENS = 60, 32
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b", None]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
LARK = 'start: item ("," item)*\nitem: /[a-z]{1,6}/ | NUMBER\nNUMBER: /[0-9]{1,3}/\n'
FORMS: list[Body] = [
    {"structured_outputs": {"regex": "[0-9]{3}(-[a-z]{2,9})?"}},
    {"structured_outputs": {"regex": "[a-zA-Z ,.]{5,60}"}},
    {"structured_outputs": {"choice": ["yes", "no", "yes, but not now", "I do not know"]}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"grammar": LARK}},
    {"structured_outputs": {"json_object": True}},
    {"guided_regex": "(ab|cd){2,20}"},
    {"guided_choice": ["one", "two", "three"]},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}},
]
FORM_FIELDS = {"tools", *(name for form in FORMS for name in form)}
REFUSED_BESIDE_FORMS = {"min_tokens", "ignore_eos", "bad_words", "logit_bias", "allowed_token_ids"}
TOOLS: list[Body] = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"q": {"type": "string", "maxLength": 12}}, "required": ["q"]}}},
]  # fmt: skip
WORDS = sorted({word for line in TEXT for word in line.split()})


def random_body(chance: random.Random, vocab_size: int, *, has_thinking: bool) -> tuple[str, Body]:
    """Returns a path and its body. has_thinking: the model's tokens for reasoning and calls are in its
    vocabulary."""
    path, body = "/v1/completions", _completion(chance, vocab_size)
    if chance.random() < 0.4:
        path, body = "/v1/chat/completions", _chat(chance, vocab_size, has_thinking=has_thinking)
    if body.keys() & FORM_FIELDS:
        body = {name: value for name, value in body.items() if name not in REFUSED_BESIDE_FORMS}
    return path, body


def _completion(chance: random.Random, vocab_size: int) -> Body:
    body = _sampling(chance, vocab_size) | {"prompt": _prompt(chance, vocab_size)}
    if chance.random() < 0.7:
        body["logprobs"] = chance.randint(0, 5)
        if chance.random() < 0.3:
            body["echo"] = True
            body |= chance.choice([{}, {}, {"max_tokens": 0, "min_tokens": 0}])
    if chance.random() < 0.3 and body["max_tokens"]:
        body |= chance.choice(FORMS)
    if chance.random() < 0.05 and body.get("n", 1) == 1:
        body["best_of"] = 3
    return body


def _chat(chance: random.Random, vocab_size: int, *, has_thinking: bool) -> Body:
    body = _sampling(chance, vocab_size)
    messages = [{"role": "user", "content": _text(chance)}]
    if chance.random() < 0.3:
        messages = [{"role": "system", "content": _text(chance, 8)}, *messages]
    if chance.random() < 0.3:
        messages += [{"role": "assistant", "content": _text(chance, 12)}, {"role": "user", "content": "and?"}]
    body["messages"] = messages
    if chance.random() < 0.7:
        body |= {"logprobs": True, "top_logprobs": chance.randint(0, 5)}
    kind = chance.random()
    if kind < 0.3 and has_thinking:
        body["tools"] = TOOLS
        named = {"type": "function", "function": {"name": "add"}}
        body["tool_choice"] = chance.choice(["auto", "required", "none", named])
        body["parallel_tool_calls"] = chance.random() < 0.7
        body["max_tokens"] = max(body["max_tokens"], chance.randint(10, 2 * MOST_TOKENS))
    elif kind < 0.55:
        body |= chance.choice(FORMS)
    if chance.random() < 0.3 and has_thinking:
        body["thinking_budget_tokens"] = chance.randint(0, 12)
    if chance.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": chance.random() < 0.5}
    return body


def _sampling(chance: random.Random, vocab_size: int) -> Body:
    def some(share: float, **fields: Any) -> Body:
        return fields if chance.random() < share else {}

    def token_ids(most: int) -> list[int]:
        return [chance.randrange(vocab_size) for _ in range(chance.randint(1, most))]

    max_tokens = chance.randint(1, MOST_TOKENS)
    return {
        "max_tokens": max_tokens,
        "seed": chance.randrange(2**40),
        "temperature": chance.choice([0.0, 0.0, 0.7, 1.0, 1.6]),
        "return_token_ids": True,
        **some(0.25, top_p=chance.choice([0.5, 0.9, 0.99])),
        **some(0.2, top_k=chance.choice([1, 5, 50])),
        **some(0.15, min_p=chance.choice([0.02, 0.2])),
        **some(0.2, presence_penalty=chance.choice([-1.0, 0.4, 2.0])),
        **some(0.2, frequency_penalty=chance.choice([-0.5, 0.3, 1.5])),
        **some(0.2, repetition_penalty=chance.choice([0.8, 1.1, 1.7])),
        **some(0.2, logit_bias={str(i): chance.choice([-100, -3, 4, 20]) for i in token_ids(5)}),
        **some(0.05, allowed_token_ids=sorted({*token_ids(40), *range(40, 90)})),
        **some(0.15, min_tokens=chance.randint(1, max_tokens)),
        **some(0.25, stop=chance.sample(["e", " the", "\n", ")", "or", "q", "1"], 2)),
        **some(0.1, include_stop_str_in_output=True),
        **some(0.15, stop_token_ids=token_ids(20)),
        **some(0.15, bad_words=chance.sample(["the", "a", "return", " import", "self"], 2)),
        **some(0.3, ignore_eos=True),
        **some(0.15, skip_special_tokens=False),
        **some(0.2, n=chance.randint(2, 3)),
        **some(0.1, cache_salt=chance.choice(["a", "b"])),
        **some(0.1, priority=chance.randint(0, 3)),
        **some(0.1, truncate_prompt_tokens=chance.randint(1, 30)),
    }


def _prompt(chance: random.Random, vocab_size: int) -> str | list[int]:
    if chance.random() < 0.25:
        return [chance.randrange(vocab_size) for _ in range(chance.randint(1, MOST_PROMPT_WORDS))]
    return _text(chance)


def _text(chance: random.Random, most: int = MOST_PROMPT_WORDS) -> str:
    """Returns a text. Some begin alike, so that cached prefixes are found, and some repeat themselves, so
    that n-grams are."""
    common = " ".join(WORDS[:30]) + " " if most > 40 and chance.random() < 0.3 else ""
    words = [chance.choice(WORDS) for _ in range(chance.randint(1, most // 2))]
    return common + " ".join(words * chance.choice([1, 1, 3]))[: 4 * most]
