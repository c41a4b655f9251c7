"""Compares a run of a text with its reference, token ids and log-probabilities, bit for bit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from headway.engine.bench.exact.session import Answer

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which two runs differ. position: the index in the output. scores: the score of the
    token, then those of the most probable ones; empty if the run returned none."""

    trial: int
    text: int
    position: int
    wanted_token: int | None
    token: int | None
    wanted_scores: tuple[float, ...]
    scores: tuple[float, ...]
    circumstances: str

    def describe(self) -> str:
        wanted = _shown(self.wanted_token, self.wanted_scores)
        got = _shown(self.token, self.scores)
        return (
            f"request {self.trial} (text {self.text}), token {self.position} of the output\n"
            f"  reference: {wanted}\n  this run:  {got}\n  {self.circumstances}"
        )


def first_place(wanted: Answer, answer: Answer, *, start: int = 0) -> int | None:
    """Returns the position of the first token whose id or scores differ; None: there is none. Scores are
    compared where both runs have them. start: position of the answer's first token in the wanted one, which
    may be longer."""
    for place, token_id in enumerate(answer.token_ids):
        if start + place >= len(wanted.token_ids) or wanted.token_ids[start + place] != token_id:
            return start + place
        if answer.scores and _bits(answer.scores_of(place)) != _bits(wanted.scores_of(start + place)):
            return start + place
    return None


def difference(
    trial: int, text: int, wanted: Answer, answer: Answer, circumstances: str, *, start: int = 0
) -> Difference | None:
    """Returns the first difference, or None."""
    place = first_place(wanted, answer, start=start)
    if place is None:
        return None
    own = place - start
    return Difference(
        trial, text, place,
        wanted.token_ids[place] if place < len(wanted.token_ids) else None, answer.token_ids[own],
        wanted.scores_of(place), answer.scores_of(own), circumstances,
    )  # fmt: skip


def digest(answer: Answer) -> bytes:
    """Returns a hash of the tokens and the bits of the scores."""
    return blake2b(answer.token_ids.tobytes() + answer.scores.tobytes(), digest_size=DIGEST_BYTES).digest()


def _bits(scores: Sequence[float]) -> bytes:
    return array("d", scores).tobytes()


def _shown(token: int | None, scores: Sequence[float]) -> str:
    if token is None:
        return "no token"
    if not scores:
        return f"token {token}"
    shown = ", ".join(f"{score:.9g} ({score.hex()})" for score in scores)
    return f"token {token}, log-probabilities of it and of the most probable: {shown}"
