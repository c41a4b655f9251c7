"""Checks whether the engine accepts a request. A request that passes can be served without harm to others.

Each refusal names the field, the value, the limit and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headway.engine.protocol.errors import RequestError
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.scheduling.request import Request

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 16
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
_MAX_INTEGER = (1 << 63) - 1
# An upper limit of positions and counts in the device tables, far above any real number of tokens.
_MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the model that is served."""

    max_model_len: int
    vocab_size: int

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that cannot be served."""
        _check_prompt(request, self.max_model_len)
        self._check_ids("prompt", request.prompt_token_ids)
        stop = request.stop_token_ids
        if len(stop) > MAX_STOP_TOKEN_IDS:
            raise _refusal("stop_token_ids", f"has {len(stop)} ids", f"may have {MAX_STOP_TOKEN_IDS}")
        self._check_ids("stop_token_ids", stop)
        sampling = request.sampling
        _check_numbers(sampling)
        _check_logprobs(sampling)
        self._check_bias(sampling.logit_bias)
        _check_bad_words(sampling.bad_words_token_ids)
        self._check_ids("bad_words", (i for words in sampling.bad_words_token_ids for i in words))
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_something_is_left(sampling, stop)
        if (budget := sampling.thinking_budget) is not None:
            field, value = "thinking_budget_tokens", budget.num_tokens
            _require(0 <= value <= _MAX_TOKENS, field, value, f"0 to {_MAX_TOKENS}")
            self._check_ids(field, [budget.end_id, *(() if budget.start_id is None else (budget.start_id,))])

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        ids = list(token_ids)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise _refusal(
                field, f"has token id {wrong}", f"may have 0 to {self.vocab_size - 1} (the vocabulary)"
            )

    def _check_bias(self, logit_bias: dict[int, float]) -> None:
        self._check_ids("logit_bias", logit_bias)
        for token_id, bias in logit_bias.items():
            if not abs(bias) <= MAX_LOGIT_BIAS:
                limit = f"must be {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
                raise _refusal("logit_bias", f"is {bias} for token id {token_id}", limit)

    def _check_something_is_left(self, sampling: SamplingParams, stop: frozenset[int]) -> None:
        """Raises RequestError if no token might be left. Tokens that may be masked at some position count as
        always masked, so that one is left at each."""
        masked = {words[-1] for words in sampling.bad_words_token_ids}
        masked |= stop if sampling.min_tokens > 0 else set()
        allowed = sampling.allowed_token_ids
        if allowed is not None and not allowed:
            raise _refusal(
                "allowed_token_ids", "is empty", "must have one id or more; leave it out to allow all"
            )
        num_left = self.vocab_size - len(masked) if allowed is None else len(set(allowed) - masked)
        if num_left == 0:
            raise RequestError(
                "no token is left to pick: allowed_token_ids, bad_words, min_tokens and stop_token_ids "
                "mask the whole vocabulary together; allow at least one token that the others do not mask",
                code="invalid_value",
                param="bad_words" if allowed is None else "allowed_token_ids",
            )


def _check_prompt(request: Request, max_model_len: int) -> None:
    """Raises RequestError for a prompt of a wrong length. It may fill the context if one token is generated,
    which never enters the KV cache."""
    length = len(request.prompt_token_ids)
    if length == 0:
        raise RequestError(
            "prompt has 0 tokens, it must have 1 or more", code="invalid_value", param="prompt"
        )
    limit = max_model_len if request.max_tokens == 1 else max_model_len - 1
    if length > limit:
        raise RequestError(
            f"prompt has {length:,} tokens, the limit is {limit:,} (max_model_len {max_model_len:,}, less one where "
            "more than one token is generated); shorten the prompt",
            code="context_length_exceeded",
            param="prompt",
        )


def _check_numbers(sampling: SamplingParams) -> None:
    """Raises RequestError for numbers out of range. The comparisons are written so that NaN fails them."""
    _require(0 <= sampling.temperature < math.inf, "temperature", sampling.temperature, "0 or more")
    _require(0 <= sampling.top_k <= _MAX_INTEGER, "top_k", sampling.top_k, f"0 to {_MAX_INTEGER}")
    _require(0 < sampling.top_p <= 1, "top_p", sampling.top_p, "above 0 and at most 1")
    _require(0 <= sampling.min_p <= 1, "min_p", sampling.min_p, "0 to 1")
    _require(-_MAX_INTEGER - 1 <= sampling.seed <= 2 * _MAX_INTEGER + 1, "seed", sampling.seed, "64 bits")
    _require(
        0 <= sampling.min_tokens <= _MAX_TOKENS, "min_tokens", sampling.min_tokens, f"0 to {_MAX_TOKENS}"
    )
    low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    value = sampling.repetition_penalty
    _require(low <= value <= high, "repetition_penalty", value, f"{low} to {high:g}")
    for field in ("frequency_penalty", "presence_penalty"):
        value = getattr(sampling, field)
        _require(abs(value) <= MAX_PENALTY, field, value, f"{-MAX_PENALTY:g} to {MAX_PENALTY:g}")


def _check_logprobs(sampling: SamplingParams) -> None:
    wanted = {"logprobs": sampling.num_logprobs, "prompt_logprobs": sampling.num_prompt_logprobs}
    for field, number in wanted.items():
        _require(number is None or 0 <= number <= MAX_LOGPROBS, field, number, f"0 to {MAX_LOGPROBS}")


def _check_bad_words(words: list[list[int]]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise _refusal("bad_words", f"has {len(words)} token sequences", f"may have {MAX_BAD_WORDS}")
    for length in map(len, words):
        if not 1 <= length <= MAX_BAD_WORD_TOKENS:
            raise _refusal(
                "bad_words", f"has one of {length} tokens", f"may have 1 to {MAX_BAD_WORD_TOKENS} each"
            )


def _require(is_met: bool, field: str, value: object, limit: str) -> None:
    if not is_met:
        raise _refusal(field, f"is {value}", f"must be {limit}")


def _refusal(field: str, what: str, limit: str) -> RequestError:
    return RequestError(f"{field} {what}, it {limit}", code="invalid_value", param=field)
