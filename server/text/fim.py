"""Fill-in-the-middle: the tokens by which code models receive the text before a gap and the text after it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from headway.server.text.control_text import control_pattern
from headway.server.text.speller import Speller


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Names of tokens. A prompt is `prefix`, the text before the gap, `suffix`, the text after it,
    `middle`. ends: tokens that end the completion, in addition to the model's own end and these three."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()


FAMILIES = {
    "Qwen2.5-Coder, CodeGemma": FimTokens(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    "StarCoder": FimTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),
    "SantaCoder": FimTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),
    "DeepSeek-Coder": FimTokens("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    "Code Llama": FimTokens("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
}
NAMES = frozenset(
    name for family in FAMILIES.values() for name in (family.prefix, family.suffix, family.middle)
)


def find_fim(added_tokens: Collection[str]) -> FimTokens | None:
    """Returns the family whose tokens a tokenizer has; None if there is none."""
    complete = (f for f in FAMILIES.values() if {f.prefix, f.suffix, f.middle} <= set(added_tokens))
    return next(complete, None)


@dataclass(frozen=True, slots=True)
class Fim:
    """Fills gaps with one tokenizer. before: encodes a text like any prompt; after: encodes a text that
    goes on, without the space that some tokenizers put before a text. end_ids: tokens that end the
    completion."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    end_ids: tuple[int, ...]
    pattern: re.Pattern[str]
    before: Speller
    after: Speller

    def encode_before(self, text: str) -> list[int]:
        """Returns the ids of the text before a gap, without the preceding token. Blocks."""
        return self.before.encode(self._literal(text))

    def encode_after(self, text: str) -> list[int]:
        """Returns the ids after those of `encode_before`: the text after the gap and the tokens around it.
        Blocks."""
        return [self.suffix_id, *self.after.encode(self._literal(text)), self.middle_id]

    def _literal(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields pieces for a speller: FIM tokens that a client spells are text; other tokens are tokens,
        as in every prompt."""
        at = 0
        for match in self.pattern.finditer(text):
            yield text[at : match.start()], False
            yield match[0], True
            at = match.end()
        yield text[at:], False


def make_fim(ids: dict[str, int], before: Speller, after: Speller) -> Fim | None:
    """ids: those of the tokenizer's added tokens. Returns None for a tokenizer without FIM tokens."""
    tokens = find_fim(ids)
    if tokens is None:
        return None
    own = (tokens.prefix, tokens.suffix, tokens.middle)
    pattern = control_pattern(own)
    assert pattern is not None, tokens
    ends = tuple(ids[name] for name in (*own, *tokens.ends) if name in ids)
    prefix_id, suffix_id, middle_id = (ids[name] for name in own)
    return Fim(prefix_id, suffix_id, middle_id, ends, pattern, before, after)
