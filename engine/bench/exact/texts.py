"""Makes the requests of the check: prompts of all lengths, companions of every kind, and a vocabulary for
their grammars."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from headway.engine.bench.shape import made_up_words
from headway.engine.grammar.compile import regex_source
from headway.engine.protocol.grammar import Grammar, TokenTable
from headway.engine.protocol.sampling_params import SamplingParams

TEMPERATURE = 0.8
# The filters of sampled texts, which take turns.
FILTERS: tuple[dict[str, object], ...] = (
    {},
    {"top_p": 0.9},
    {},
    {"min_p": 0.05},
    {"top_p": 0.95, "top_k": 40},
)
NUM_TOP = 1  # tokens whose log-probabilities are compared besides that of the sampled one
SHARE_AT_BORDERS = 0.5  # of prompts that end where a cached prefix may end, or one token before or after
NUM_BYTES = 256
CHARACTERS_PER_TOKEN = 8
# One of this many tokens of a prediction is wrong, so that drafts are rejected after any number of accepted
# ones.
WRONG_EVERY = 7

Prompts = Callable[[random.Random, int], list[int]]


@dataclass(frozen=True, slots=True)
class Text:
    """A request of its own: all its runs must give the same tokens. Its index is its seed."""

    index: int
    prompt: list[int]
    is_greedy: bool

    def sampling(self, *, is_scored: bool) -> SamplingParams:
        fields: dict[str, object] = {"temperature": 0.0}
        if not self.is_greedy:
            fields = {"temperature": TEMPERATURE} | FILTERS[self.index // 2 % len(FILTERS)]
        num_logprobs = NUM_TOP if is_scored else None
        return SamplingParams(**fields, seed=self.index, num_logprobs=num_logprobs)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a request. salt: keeps its cached prefix apart. preempt_at: output tokens after which it is
    preempted once; None: never. forgets_blocks: it finds none of its blocks in the cache afterwards.
    prediction: its predicted output, from which n-gram lookup drafts."""

    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    salt: str
    grammar: Grammar | None = None
    preempt_at: int | None = None
    forgets_blocks: bool = False
    prediction: list[int] = field(default_factory=list)


def random_prompts(vocab_size: int) -> Prompts:
    """Returns a source of prompts of random tokens."""

    def prompt(chance: random.Random, length: int) -> list[int]:
        return chance.choices(range(vocab_size), k=length)

    return prompt


def joined_prompts(texts: Sequence[list[int]]) -> Prompts:
    """Returns a source of prompts that are cut from given texts in random order."""

    def prompt(chance: random.Random, length: int) -> list[int]:
        tokens = chance.choice(texts)[chance.randrange(8) :]
        while len(tokens) < length:
            tokens = [*tokens, *chance.choice(texts)]
        return tokens[:length]

    return prompt


def random_length(chance: random.Random, most: int, border: int) -> int:
    """Returns the length of a prompt: often a multiple of `border`, or else from a log-uniform
    distribution."""
    if chance.random() < SHARE_AT_BORDERS and most > border:
        end = border * chance.randint(1, most // border)
        return min(end + chance.choice((-1, 0, 1)), most)
    return int(math.exp(chance.uniform(0.0, math.log(most))))


def make_texts(count: int, prompts: Prompts, chance: random.Random, *, most: int, border: int) -> list[Text]:
    """Returns greedy and sampled texts in turn."""
    return [
        Text(index, prompts(chance, random_length(chance, most, border)), index % 2 == 0)
        for index in range(count)
    ]


def nearly(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Returns a prediction of these tokens: it makes drafts that are kept where the weights are random, for
    then a draft head's never are."""
    return [
        (token + 1) % vocab_size if place % WRONG_EVERY == WRONG_EVERY // 2 else token
        for place, token in enumerate(tokens)
    ]


class Companions:
    """Requests that run with those that are compared. Mutable: each call draws further ones.

    Their seeds are those of no text.
    """

    def __init__(
        self,
        prompts: Prompts,
        chance: random.Random,
        *,
        most: int,
        num_tokens: int,
        border: int,
        vocab_size: int,
        first_seed: int,
    ) -> None:
        self._prompts, self._chance = prompts, chance
        self._most, self._num_tokens, self._border = most, num_tokens, border
        self._vocab_size = vocab_size
        self._seed = first_seed
        self._grammar = Grammar(regex_source(f"[a-z ]{{{CHARACTERS_PER_TOKEN * num_tokens},}}"))

    def draw(self, count: int, *, is_scored: bool) -> list[Job]:
        """Returns jobs of every kind, or with is_scored False of those whose round prompts may share."""
        kinds = ("plain", "adjusted", "scored", "masked") if is_scored else ("plain",)
        return [self._job(kinds[number % len(kinds)]) for number in range(count)]

    def _job(self, kind: str) -> Job:
        chance, self._seed = self._chance, self._seed + 1
        fields: dict[str, object] = {"temperature": chance.choice((0.0, TEMPERATURE)), "seed": self._seed}
        if chance.random() < 0.5:
            fields |= {"top_p": 0.9, "top_k": 20}
        if kind == "adjusted":
            fields |= {"presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {1: 2.0, 7: -5.0}}
            fields |= {"bad_words_token_ids": [[5], [3, 4]]}
        if kind == "scored":
            fields |= {"num_logprobs": 5, "num_prompt_logprobs": 1}
        length = random_length(chance, self._most, self._border)
        return Job(
            self._prompts(chance, length),
            SamplingParams(**fields),  # type: ignore[arg-type]
            chance.randint(1, self._num_tokens),
            f"company-{self._seed}",
            grammar=self._grammar if kind == "masked" else None,
        )


def made_up_table(vocab_size: int) -> TokenTable:
    """Returns a vocabulary of bytes and words for grammars that mask tokens, whatever the model's tokenizer
    is. The last token ends a text."""
    single, words = (bytes((byte,)) for byte in range(NUM_BYTES)), map(str.encode, made_up_words())
    tokens = islice(chain(single, words), vocab_size - 1)
    return TokenTable([*tokens, b""], [vocab_size - 1], [vocab_size - 1])
