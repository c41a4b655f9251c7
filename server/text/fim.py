"""Fill-in-the-middle: the tokens by which code models take what comes before a gap and what comes after
it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from headway.server.text.control_text import control_pattern
from headway.server.text.speller import Speller


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Names of tokens: a prompt is `prefix`, the text before the gap, `suffix`, the text after it, `middle`.
    ends: that end what fills the gap, in addition to the model's own end and these three."""

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
    """Returns the family whose tokens a tokenizer has; None if it has none of them."""
    complete = (f for f in FAMILIES.values() if {f.prefix, f.suffix, f.middle} <= set(added_tokens))
    return next(complete, None)


@dataclass(frozen=True, slots=True)
class Fim:
    """Fills gaps with one tokenizer. before: encodes a text as any prompt; after: one that goes on, so
    without the space that some tokenizers put before a text. end_ids: tokens that end what fills the gap."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    end_ids: tuple[int, ...]
    pattern: re.Pattern[str]
    before: Speller
    after: Speller

    def encode_before(self, text: str) -> list[int]:
        """The ids of the text before a gap, without the token in front of it. Blocks."""
        return self.before.encode(self._literal(text))

    def encode_after(self, text: str) -> list[int]:
        """The ids that follow those of `encode_before`: the text after the gap and the tokens around it.
        Blocks."""
        return [self.suffix_id, *self.after.encode(self._literal(text)), self.middle_id]

    def _literal(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields pieces: these tokens are text where a client spells them; others are tokens, as in every
        prompt."""
        at = 0
        for match in self.pattern.finditer(text):
            yield text[at : match.start()], False
            yield match[0], True
            at = match.end()
        yield text[at:], False


def make_fim(ids: dict[str, int], before: Speller, after: Speller) -> Fim | None:
    """ids: of the tokenizer's added tokens. None for a tokenizer without such tokens."""
    tokens = find_fim(ids)
    if tokens is None:
        return None
    own = (tokens.prefix, tokens.suffix, tokens.middle)
    pattern = control_pattern(own)
    assert pattern is not None, tokens
    ends = tuple(ids[name] for name in (*own, *tokens.ends) if name in ids)
    prefix_id, suffix_id, middle_id = (ids[name] for name in own)
    return Fim(prefix_id, suffix_id, middle_id, ends, pattern, before, after)
