"""Encodes prompts to token ids, within the model's vocabulary and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from headway.engine import EngineInfo
from headway.server.base.errors import ApiError
from headway.server.protocol.checks import require
from headway.server.protocol.completions import Prompt
from headway.server.text.control_text import ChatPrompt
from headway.server.text.tokenizer import Tokenizer

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """text: None if the client sent ids, or the text was cut; `echo` then decodes the ids.

    starts: the index in `text` of each token's first character; empty if it was not requested.
    """

    text: str | None
    token_ids: list[int]
    starts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options of the encoding. keep_last: the most ids; special tokens at the beginning are not cut off.

    num_wanted: the number of tokens to generate; None if the client does not say. adds_special: the model's
    special tokens are put around a text. suffix: the text after a gap that the completion fills; None without
    a gap.
    """

    keep_last: int | None = None
    num_wanted: int | None = None
    adds_special: bool = True
    wants_starts: bool = False
    suffix: str | None = None

    @property
    def num_new_tokens(self) -> int:
        """Returns the room that the prompt must leave in the context."""
        return 0 if self.num_wanted == 0 else 1


async def encode_prompts(
    prompt: Prompt, tokenizer: Tokenizer, info: EngineInfo, options: PromptOptions | None = None
) -> list[EncodedPrompt]:
    """Returns one entry for each prompt of the body, checked against vocabulary and context."""
    options = options or PromptOptions()
    max_prompt_tokens = info.max_model_len - options.num_new_tokens
    entries = _entries(prompt, max_prompt_tokens, options)
    texts = [entry for entry in entries if isinstance(entry, str)]
    if options.keep_last is None:
        for text in texts:
            check_least_length("prompt", tokenizer.least_tokens(text), max_prompt_tokens, info.max_model_len)
    if options.suffix is not None:
        least = tokenizer.least_tokens(options.suffix)
        check_least_length("suffix", least, max_prompt_tokens, info.max_model_len)
        texts = [*texts, options.suffix]
    encode = _encode_all if options.suffix is None else _encode_infilling
    work = partial(encode, entries, tokenizer, info, options)
    prompts = await tokenizer.pool.run(texts, work)
    for encoded in prompts:
        check_ids("prompt", encoded.token_ids, info.vocab_size)
        check_room("prompt", len(encoded.token_ids), options.num_wanted, info.max_model_len)
    return prompts


async def encode_chat(
    chat: ChatPrompt,
    tokenizer: Tokenizer,
    info: EngineInfo,
    *,
    keep_last: int | None = None,
    num_wanted: int | None = None,
) -> list[int]:
    """Returns the ids of a rendered chat, in which the template wrote all control tokens itself."""
    if keep_last is None and not chat.spelled:  # marks are longer than what they stand for
        least = tokenizer.least_tokens(chat.text)
        check_least_length("messages", least, info.max_model_len - 1, info.max_model_len)
    ids = await tokenizer.pool.run([chat.text], partial(tokenizer.encode_chat, chat, keep_last))
    if not ids:
        message = "the model's chat template makes an empty prompt of these messages; send others"
        raise ApiError(message, param="messages", code="invalid_value")
    check_room("messages", len(ids), num_wanted, info.max_model_len)
    return ids


def _entries(prompt: Prompt, max_prompt_tokens: int, options: PromptOptions) -> Sequence[str | list[int]]:
    """Returns the prompts. A list of numbers is one prompt; a list of strings, or of lists of numbers, is
    several.

    A list of ids that is too long is cut or refused before its entries are checked.
    """
    if isinstance(prompt, str):
        return [prompt]
    require(len(prompt) > 0, "prompt", "an empty list", "a list of 1 entry or more")
    if isinstance(prompt[0], int):
        prompt = _fitting(prompt, max_prompt_tokens, options)
    strings = [entry for entry in prompt if isinstance(entry, str)]
    ids = [entry for entry in prompt if isinstance(entry, int)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if len(prompt) == len(ids):
        return [ids]
    if len(prompt) == len(strings):
        return strings
    if len(prompt) == len(lists):
        return [_fitting(entry, max_prompt_tokens, options) for entry in lists]
    kinds = "strings, or token ids, or lists of token ids"
    message = f"prompt mixes kinds of entries, it must hold only {kinds}"
    raise ApiError(message, param="prompt", code="invalid_value")


def _fitting(ids: list[Entry], max_prompt_tokens: int, options: PromptOptions) -> list[Entry]:
    if options.keep_last is not None and len(ids) > options.keep_last:
        ids = ids[len(ids) - options.keep_last :]
    check_room("prompt", len(ids), options.num_wanted, max_prompt_tokens + options.num_new_tokens)
    return ids


def _encode_all(
    entries: Sequence[str | list[int]], tokenizer: Tokenizer, info: EngineInfo, options: PromptOptions
) -> list[EncodedPrompt]:
    return [_encode(entry, tokenizer, info, options) for entry in entries]


def _encode_infilling(
    entries: Sequence[str | list[int]], tokenizer: Tokenizer, info: EngineInfo, options: PromptOptions
) -> list[EncodedPrompt]:
    """Returns prompts that end at the gap before the suffix. Only the text before the gap is cut."""
    assert tokenizer.fim is not None, "the suffix is refused for other models"
    assert options.suffix is not None
    after = tokenizer.fim.encode_after(options.suffix)
    begin = [*(tokenizer.prefix if options.adds_special else ()), tokenizer.fim.prefix_id]
    num_around = len(begin) + len(after)
    check_room("suffix", num_around, options.num_wanted, info.max_model_len)
    room = None if options.keep_last is None else options.keep_last - num_around
    require(
        room is None or room >= 0,
        "truncate_prompt_tokens",
        options.keep_last,
        f"{num_around} or more: suffix and the tokens around it are not cut",
    )
    prompts = []
    for entry in entries:
        before = tokenizer.fim.encode_before(entry) if isinstance(entry, str) else entry
        kept = before if room is None else before[max(0, len(before) - room) :]
        text = entry if isinstance(entry, str) and len(kept) == len(before) else tokenizer.decode(kept)
        prompts.append(EncodedPrompt(text, [*begin, *kept, *after]))
        check_room("prompt", len(prompts[-1].token_ids), options.num_wanted, info.max_model_len)
    return prompts


def _encode(
    entry: str | list[int], tokenizer: Tokenizer, info: EngineInfo, options: PromptOptions
) -> EncodedPrompt:
    if isinstance(entry, list):
        if not entry:
            message = "a prompt has 0 token ids, it must have 1 or more"
            raise ApiError(message, param="prompt", code="invalid_value")
        return EncodedPrompt(None, entry)
    encoded = _encode_end(entry, tokenizer, options) if options.keep_last is not None else None
    encoded = encoded or _encode_text(entry, tokenizer, info, options)
    if not encoded.token_ids:
        message = "the prompt is empty and no token that starts a text is put before it; send some text"
        raise ApiError(message, param="prompt", code="invalid_value")
    return encoded


def _encode_end(text: str, tokenizer: Tokenizer, options: PromptOptions) -> EncodedPrompt | None:
    """Returns the end of a text that is too long; None for a text that need not be cut."""
    assert options.keep_last is not None
    last = tokenizer.last_ids(text, options.keep_last + 1)
    if not options.adds_special:
        is_cut = len(last) > options.keep_last
        return EncodedPrompt(None, last[len(last) - options.keep_last :]) if is_cut else None
    is_cut = len(tokenizer.surrounded(last)) > options.keep_last
    return EncodedPrompt(None, tokenizer.surrounded(last, options.keep_last)) if is_cut else None


def _encode_text(text: str, tokenizer: Tokenizer, info: EngineInfo, options: PromptOptions) -> EncodedPrompt:
    """Encodes a text, up to the piece with which it becomes too long."""
    max_prompt_tokens = info.max_model_len - options.num_new_tokens
    plain: list[int] = []
    starts: list[int] = []
    for piece in tokenizer.pieces(text, with_starts=options.wants_starts):
        plain += piece.token_ids
        starts += piece.starts
        check_least_length("prompt", len(plain), max_prompt_tokens, info.max_model_len)
    if not options.adds_special:
        return EncodedPrompt(text, plain, starts)
    ids = tokenizer.surrounded(plain)
    if not options.wants_starts:
        return EncodedPrompt(text, ids)
    num_before = tokenizer.num_added_before(plain)
    starts = [*[0] * num_before, *starts]
    return EncodedPrompt(text, ids, [*starts, *[len(text)] * (len(ids) - len(starts))])


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
    message = f"{field} has the token id {wrong}, it must be 0 to {vocab_size - 1} (the model's vocabulary)"
    raise ApiError(message, param=field, code="invalid_value")


def check_least_length(field: str, num_tokens: int, max_prompt_tokens: int, max_model_len: int) -> None:
    """Refuses a text with num_tokens or more before all of it is encoded, which takes a second per
    megabyte."""
    if num_tokens > max_prompt_tokens:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {num_tokens} "
            "or more. Please reduce your prompt.",
            param=field,
            code="context_length_exceeded",
        )


def check_room(field: str, num_prompt_tokens: int, num_wanted: int | None, max_model_len: int) -> None:
    """Refuses a prompt that leaves no room for a token. num_wanted: the number of tokens to generate, None
    if unknown; if it is 0 the prompt may fill the context."""
    if num_prompt_tokens + (0 if num_wanted == 0 else 1) > max_model_len:
        raise _too_long(field, num_prompt_tokens, max(1, num_wanted or 1), max_model_len, "your prompt")


def check_length(field: str, num_prompt_tokens: int, num_completion_tokens: int, max_model_len: int) -> None:
    """field: the field that asks for too many tokens."""
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
