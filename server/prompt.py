"""What a completion request asks the engine for: prompts to token ids, limits, sampling, one entry a choice."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from headway.engine import EngineInfo, SamplingParams
from headway.server.errors import ApiError
from headway.server.generation import ChoiceRequest, choice_seed
from headway.server.protocol import MAX_CHOICES, CompletionRequest, Prompt, stop_strings
from headway.server.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
THREAD_CHARACTERS = 8192  # longer prompts are tokenised off the event loop: about 2 ms of work


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """text: None when the client sent ids; then `echo` decodes them."""

    text: str | None
    token_ids: list[int]


async def encode_prompts(prompt: Prompt, tokenizer: Tokenizer, info: EngineInfo) -> list[EncodedPrompt]:
    """One entry for each prompt of the body, checked against vocabulary and context."""
    entries = _entries(prompt)
    if sum(len(entry) for entry in entries if isinstance(entry, str)) > THREAD_CHARACTERS:
        prompts = await asyncio.to_thread(_encode_all, entries, tokenizer)
    else:
        prompts = _encode_all(entries, tokenizer)
    for encoded in prompts:
        _check_ids(encoded.token_ids, info.vocab_size)
        _check_length(len(encoded.token_ids), 1, info.max_model_len)
    return prompts


def choice_requests(
    body: CompletionRequest, prompts: list[EncodedPrompt], tokenizer: Tokenizer, info: EngineInfo
) -> list[ChoiceRequest]:
    """prompts x n entries, in the order of OpenAI's index: the n choices of the first prompt first."""
    n = body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts x n = {n} are {len(prompts) * n} choices, the limit is {MAX_CHOICES}; "
            "send several requests",
            param="n",
            code="invalid_value",
        )
    return [
        _choice_request(body, prompt.token_ids, seed, tokenizer, info)
        for prompt in prompts
        for seed in _seeds(body.seed, n)
    ]


def _entries(prompt: Prompt) -> Sequence[str | list[int]]:
    """A list of numbers is one prompt; a list of strings, or of lists of numbers, is several."""
    if isinstance(prompt, str):
        return [prompt]
    strings = [entry for entry in prompt if isinstance(entry, str)]
    ids = [entry for entry in prompt if isinstance(entry, int)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if not prompt:
        raise ApiError("prompt is an empty list, it must have 1 entry or more", param="prompt")
    if len(prompt) == len(ids):
        return [ids]
    if len(prompt) == len(strings):
        return strings
    if len(prompt) == len(lists):
        return lists
    kinds = "strings, or token ids, or lists of token ids"
    raise ApiError(f"prompt mixes kinds of entries, it must hold only {kinds}", param="prompt")


def _encode_all(entries: Sequence[str | list[int]], tokenizer: Tokenizer) -> list[EncodedPrompt]:
    return [_encode(entry, tokenizer) for entry in entries]


def _encode(entry: str | list[int], tokenizer: Tokenizer) -> EncodedPrompt:
    if isinstance(entry, list):
        if not entry:
            raise ApiError("a prompt has 0 token ids, it must have 1 or more", param="prompt")
        return EncodedPrompt(None, entry)
    ids = tokenizer.encode(entry)
    if not ids:
        message = "the prompt is empty and this model has no token that starts a text; send some text"
        raise ApiError(message, param="prompt", code="invalid_value")
    return EncodedPrompt(entry, ids)


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    if min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
    message = f"prompt has the token id {wrong}, it must be 0 to {vocab_size - 1} (the model's vocabulary)"
    raise ApiError(message, param="prompt", code="invalid_value")


def _check_length(num_prompt_tokens: int, num_completion_tokens: int, max_model_len: int) -> None:
    total = num_prompt_tokens + num_completion_tokens
    if total > max_model_len:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {total} "
            f"tokens ({num_prompt_tokens} in your prompt; {num_completion_tokens} for the completion). "
            "Please reduce your prompt or max_tokens.",
            param="prompt" if num_completion_tokens == 1 else "max_tokens",
            code="context_length_exceeded",
        )


def _seeds(seed: int | None, n: int) -> list[int]:
    base = secrets.randbits(64) if seed is None else seed
    return [choice_seed(base, choice) for choice in range(n)]


def _choice_request(
    body: CompletionRequest, token_ids: list[int], seed: int, tokenizer: Tokenizer, info: EngineInfo
) -> ChoiceRequest:
    if body.max_tokens is not None:
        _check_length(len(token_ids), body.max_tokens, info.max_model_len)
    room = info.max_model_len - len(token_ids)
    return ChoiceRequest(
        prompt_token_ids=token_ids,
        sampling=_sampling(body, seed, tokenizer.default_sampling),
        max_tokens=body.max_tokens or min(DEFAULT_MAX_TOKENS, room),
        stop_token_ids=() if body.ignore_eos else tokenizer.stop_token_ids,
        stop=stop_strings(body),
        max_draft_tokens=body.speculation.max_draft_tokens if body.speculation else None,
    )


def _sampling(body: CompletionRequest, seed: int, default: SamplingParams) -> SamplingParams:
    top_k = default.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        temperature=default.temperature if body.temperature is None else body.temperature,
        top_p=default.top_p if body.top_p is None else body.top_p,
        top_k=max(0, top_k),
        min_p=default.min_p if body.min_p is None else body.min_p,
        seed=seed,
    )
