"""Builds the engine's requests, one for each choice, from the body's fields and the model's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

import msgspec

from headway.engine import (
    MAX_BAD_WORD_TOKENS,
    MAX_STOP_TOKEN_IDS,
    EngineInfo,
    Grammar,
    RelaxedThinking,
    SamplingParams,
    ThinkingBudget,
)
from headway.server.base.continuation import Continuation
from headway.server.base.errors import ApiError
from headway.server.generation.choice import ChoiceRequest
from headway.server.generation.choice_output import OutputOptions
from headway.server.generation.generation import choice_seed
from headway.server.protocol.checks import check_count, require
from headway.server.protocol.parameters import GenerationFields
from headway.server.text.prompt import check_ids, check_length
from headway.server.text.tokenizer import Tokenizer

Number = TypeVar("Number", int, float)

MAX_CHOICES = 512  # prompts x candidates of one request


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options that completions and chats express in different fields.

    num_candidates: choices generated for each prompt. limit_name: the field that max_tokens came in.
    default_max_tokens: None for as many as the context has room for. fits_context: a larger max_tokens is
    reduced to this room, not refused. num_logprobs: the number of most probable tokens at each position in
    addition to the token itself; None for none. owner: see Keys.owner; it precedes the client's own salt,
    which therefore cannot name another's prefixes. bad_words: their token ids, from encode_bad_words.
    prediction: the token ids of the predicted output. grammar: from grammar_of; the same for all choices.
    end_token_ids, end_strings: these end the text in addition to the model's own. output: how the texts are
    split into parts; None for text alone. thinking_budget: where reasoning is closed. relaxed_thinking: where
    reasoning may be LOSSY. continuation: the generator of seeds and call ids.
    """

    num_candidates: int = 1
    max_tokens: int | None = None
    limit_name: str = "max_tokens"
    default_max_tokens: int | None = None
    fits_context: bool = False
    num_logprobs: int | None = None
    scores_prompt: bool = False
    owner: str = ""
    bad_words: Sequence[list[int]] = ()
    prediction: list[int] | None = None
    grammar: Grammar | None = None
    end_token_ids: tuple[int, ...] = ()
    end_strings: tuple[str, ...] = ()
    output: OutputOptions | None = None
    thinking_budget: ThinkingBudget | None = None
    relaxed_thinking: RelaxedThinking | None = None
    continuation: Continuation = field(default_factory=Continuation)


def choice_requests(
    fields: GenerationFields,
    wanted: RequestOptions,
    prompts: Sequence[list[int]],
    tokenizer: Tokenizer,
    info: EngineInfo,
) -> list[ChoiceRequest]:
    """Returns prompts x candidates requests, in the order of OpenAI's index: all candidates of the first
    prompt first."""
    num_candidates = wanted.num_candidates
    num_choices = len(prompts) * num_candidates
    if num_choices > MAX_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts x {num_candidates} (n or best_of) are {num_choices} choices, the limit is "
            f"{MAX_CHOICES}; send several requests",
            param="n",
            code="invalid_value",
        )
    _check_ids(fields, info.vocab_size)
    end_token_ids = (
        () if fields.ignore_eos else tuple(sorted({*tokenizer.stop_token_ids, *wanted.end_token_ids}))
    )
    stop_token_ids = _stop_token_ids(fields, end_token_ids)
    sampling = _sampling(fields, wanted, tokenizer)
    draws = wanted.continuation.draws("seeds")
    return [
        ChoiceRequest(
            prompt_token_ids=token_ids,
            sampling=msgspec.structs.replace(sampling, seed=seed),
            max_tokens=_max_tokens(fields, wanted, len(token_ids), info.max_model_len),
            stop_token_ids=stop_token_ids,
            end_token_ids=end_token_ids,
            stop=(*fields.stop_strings, *(() if fields.ignore_eos else wanted.end_strings)),
            max_draft_tokens=fields.speculation.max_draft_tokens if fields.speculation else None,
            prediction_token_ids=wanted.prediction,
            cache_salt=wanted.owner + (fields.cache_salt or ""),
            priority=fields.priority or 0,
            shows_stop=bool(fields.include_stop_str_in_output),
            wants_tokens=wanted.num_logprobs is not None
            or bool(fields.return_token_ids)
            or fields.wants_draft_positions,
            shows_output=wanted.max_tokens != 0,
            prompt_index=index,
            num_candidates=num_candidates,
            grammar=wanted.grammar,
            output=_output(wanted, index * num_candidates + candidate),
        )
        for index, token_ids in enumerate(prompts)
        for candidate, seed in enumerate(_seeds(fields.seed, num_candidates, draws))
    ]


def _seeds(seed: int | None, count: int, draws: Random) -> list[int]:
    base = draws.getrandbits(64) if seed is None else seed
    return [choice_seed(base, choice) for choice in range(count)]


def _output(wanted: RequestOptions, choice: int) -> OutputOptions | None:
    """Returns the options of one choice, which has draws of its own: which choice is ahead is chance."""
    if wanted.output is None:
        return None
    return replace(wanted.output, draws=wanted.continuation.draws(f"calls {choice}"))


def _max_tokens(
    fields: GenerationFields, wanted: RequestOptions, num_prompt_tokens: int, max_model_len: int
) -> int:
    """Returns at least 1: the engine always generates, a hidden token if 0 were requested."""
    if wanted.max_tokens is not None and not wanted.fits_context:
        check_length(wanted.limit_name, num_prompt_tokens, wanted.max_tokens, max_model_len)
    room = max_model_len - num_prompt_tokens
    default = room if wanted.default_max_tokens is None else min(wanted.default_max_tokens, room)
    max_tokens = default if wanted.max_tokens is None else max(1, min(wanted.max_tokens, room))
    require(
        (fields.min_tokens or 0) <= max_tokens,
        "min_tokens",
        fields.min_tokens,
        f"at most {wanted.limit_name} = {max_tokens}",
    )
    return max_tokens


def _check_ids(fields: GenerationFields, vocab_size: int) -> None:
    check_ids("logit_bias", [int(token_id) for token_id in fields.logit_bias or {}], vocab_size)
    check_ids("allowed_token_ids", fields.allowed_token_ids or [], vocab_size)
    check_ids("stop_token_ids", fields.stop_token_ids or [], vocab_size)


def _stop_token_ids(fields: GenerationFields, own: tuple[int, ...]) -> tuple[int, ...]:
    stop = tuple(sorted({*own, *(fields.stop_token_ids or ())}))
    limit = MAX_STOP_TOKEN_IDS - len(own)
    check_count("stop_token_ids", stop[len(own) :], limit, f"ids beside the model's own {len(own)}")
    return stop


def _sampling(fields: GenerationFields, wanted: RequestOptions, tokenizer: Tokenizer) -> SamplingParams:
    default = tokenizer.default_sampling
    return SamplingParams(
        repetition_penalty=_or(fields.repetition_penalty, default.repetition_penalty),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        logit_bias={int(token_id): bias for token_id, bias in (fields.logit_bias or {}).items()},
        allowed_token_ids=fields.allowed_token_ids,
        bad_words_token_ids=list(wanted.bad_words),
        min_tokens=fields.min_tokens or 0,
        thinking_budget=wanted.thinking_budget,
        relaxed_thinking=wanted.relaxed_thinking,
        temperature=_or(fields.temperature, default.temperature),
        top_k=max(0, _or(fields.top_k, default.top_k)),
        top_p=_or(fields.top_p, default.top_p),
        min_p=_or(fields.min_p, default.min_p),
        num_logprobs=wanted.num_logprobs,
        num_prompt_logprobs=wanted.num_logprobs if wanted.scores_prompt else None,
    )


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


async def encode_prediction(text: str | None, tokenizer: Tokenizer) -> list[int] | None:
    """Returns the token ids of the predicted answer; None without a prediction."""
    return None if text is None else await tokenizer.pool.run([text], lambda: tokenizer.encode_plain(text))


async def encode_bad_words(fields: GenerationFields, tokenizer: Tokenizer) -> list[list[int]]:
    """Encodes each word as it is and after a space: tokenizers spell words within a text differently."""
    texts = [text for word in fields.bad_words or () for text in (word, f" {word.lstrip()}")]
    spellings = await tokenizer.pool.run(texts, lambda: [tokenizer.encode_plain(text) for text in texts])
    distinct = [ids for i, ids in enumerate(spellings) if ids and ids not in spellings[:i]]
    longest = max(map(len, distinct), default=0)
    require(
        longest <= MAX_BAD_WORD_TOKENS,
        "bad_words",
        f"a word of {longest} tokens",
        f"at most {MAX_BAD_WORD_TOKENS}",
    )
    return distinct
