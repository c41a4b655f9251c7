"""Prompts to token ids, within the model's vocabulary and context."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headway.engine import EngineInfo
from headway.server.control_text import ChatPrompt
from headway.server.errors import ApiError
from headway.server.protocol.completions import Prompt
from headway.server.tokenizer import Tokenizer

THREAD_CHARACTERS = 8192  # longer prompts are tokenised off the event loop: about 2 ms of work


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """text: None when the client sent ids, or the text was cut; then `echo` decodes the ids."""

    text: str | None
    token_ids: list[int]


async def encode_prompts(
    prompt: Prompt,
    tokenizer: Tokenizer,
    info: EngineInfo,
    *,
    keep_last: int | None = None,
    num_wanted: int | None = None,
) -> list[EncodedPrompt]:
    """One entry for each prompt of the body, checked against vocabulary and context.

    keep_last: longer prompts lose their beginning. num_wanted: tokens to generate, which errors tell.
    """
    entries = _entries(prompt)
    if keep_last is None:
        for entry in entries:
            if isinstance(entry, str):
                check_least_length("prompt", tokenizer.least_tokens(entry), info.max_model_len)
    if sum(len(entry) for entry in entries if isinstance(entry, str)) > THREAD_CHARACTERS:
        prompts = await asyncio.to_thread(_encode_all, entries, tokenizer)
    else:
        prompts = _encode_all(entries, tokenizer)
    for encoded in prompts:
        check_ids("prompt", encoded.token_ids, info.vocab_size)
    prompts = [_cut(encoded, keep_last) for encoded in prompts]
    for encoded in prompts:
        check_room("prompt", len(encoded.token_ids), num_wanted, info.max_model_len)
    return prompts


async def encode_chat(
    chat: ChatPrompt,
    tokenizer: Tokenizer,
    info: EngineInfo,
    *,
    keep_last: int | None = None,
    num_wanted: int | None = None,
) -> list[int]:
    """The ids of a rendered chat: the template wrote all control tokens itself."""
    if keep_last is None and not chat.spelled:  # marks are longer than what they stand for
        check_least_length("messages", tokenizer.least_tokens(chat.text), info.max_model_len)
    if len(chat.text) > THREAD_CHARACTERS or chat.spelled:
        ids = await asyncio.to_thread(tokenizer.encode_chat, chat)
    else:
        ids = tokenizer.encode_chat(chat)
    if not ids:
        message = "the model's chat template makes an empty prompt of these messages; send others"
        raise ApiError(message, param="messages", code="invalid_value")
    prompt = _cut(EncodedPrompt(None, ids), keep_last)
    check_room("messages", len(prompt.token_ids), num_wanted, info.max_model_len)
    return prompt.token_ids


def _cut(prompt: EncodedPrompt, keep_last: int | None) -> EncodedPrompt:
    if keep_last is None or len(prompt.token_ids) <= keep_last:
        return prompt
    return EncodedPrompt(None, prompt.token_ids[-keep_last:])


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


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
    message = f"{field} has the token id {wrong}, it must be 0 to {vocab_size - 1} (the model's vocabulary)"
    raise ApiError(message, param=field, code="invalid_value")


def check_least_length(field: str, num_tokens: int, max_model_len: int) -> None:
    """Refuses a text that cannot fit, before it is encoded: that takes a second per 5 MB."""
    if num_tokens >= max_model_len:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {num_tokens} "
            "or more. Please reduce your prompt.",
            param=field,
            code="context_length_exceeded",
        )


def check_room(field: str, num_prompt_tokens: int, num_wanted: int | None, max_model_len: int) -> None:
    """Refuses a prompt that leaves no room for a token. num_wanted: tokens to generate, None if not said."""
    if num_prompt_tokens >= max_model_len:
        raise _too_long(field, num_prompt_tokens, max(1, num_wanted or 1), max_model_len, "your prompt")


def check_length(field: str, num_prompt_tokens: int, num_completion_tokens: int, max_model_len: int) -> None:
    """field: the one that asks for too many."""
    if num_prompt_tokens + num_completion_tokens > max_model_len:
        remedy = f"your prompt or {field}"
        raise _too_long(field, num_prompt_tokens, num_completion_tokens, max_model_len, remedy)


def _too_long(
    field: str, num_prompt_tokens: int, num_completion_tokens: int, max_model_len: int, remedy: str
) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{num_prompt_tokens + num_completion_tokens} tokens ({num_prompt_tokens} in your prompt; "
        f"{num_completion_tokens} for the completion). Please reduce {remedy}.",
        param=field,
        code="context_length_exceeded",
    )
