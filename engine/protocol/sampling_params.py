"""Values that cross the process border: how the next token of a request is sampled, and why a request
ended."""

from __future__ import annotations

import enum

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True):
    """Token number num_tokens of the output, counted from 0, is forced to end_id, unless the output has
    end_id before it.

    start_id: the output must also have this token before, since reasoning that the model did not open is not
    closed; None: the prompt opened it.
    """

    num_tokens: int
    end_id: int
    start_id: int | None = None


class RelaxedThinking(msgspec.Struct, frozen=True):
    """The output is reasoning until it has end_id. start_id: only if this is its first token; None: the
    prompt opened the reasoning."""

    end_id: int
    start_id: int | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which the next token is sampled from the logits. They apply from top to bottom, and are
    off by default.

    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied.
    frequency_penalty, presence_penalty: subtracted for each occurrence of the token in the output, or once.
    bad_words_token_ids: the last id of each sequence is masked after its other tokens. min_tokens: the
    request's stop_token_ids are masked until the output has min_tokens tokens. thinking_budget: the position
    at which the model's reasoning is closed, whatever else is masked there; None: it is not closed.
    relaxed_thinking: the reasoning in which drafts may be accepted by the LOSSY rule of the configuration, if
    it has one and nothing adjusts or masks the logits; None: there is none. temperature: 0 is greedy. seed:
    64 bits; with the absolute position and the vocabulary id it keys the noise. num_logprobs: the number of
    most probable tokens that are returned with each token's own log-probability, all of the raw logits; None
    for no log-probabilities at all. num_prompt_logprobs: the same for the prompt.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] = []
    min_tokens: int = 0
    thinking_budget: ThinkingBudget | None = None
    relaxed_thinking: RelaxedThinking | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def adjusts_logits(self) -> bool:
        """Returns whether anything is done to the logits before the temperature."""
        return (
            (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)
            or bool(self.logit_bias or self.bad_words_token_ids or self.min_tokens)
            or self.allowed_token_ids is not None
            or self.thinking_budget is not None
        )


class FinishReason(enum.StrEnum):
    STOP = "stop"  # one of stop_token_ids was sampled; it is the last token of the output
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
