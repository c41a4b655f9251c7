"""Tokens and text at the end of an answer: every counted token is told, and stop strings see special
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from headway_testing import tiny_tokenizers
from headway_testing.fake_engine import fake_logprobs
from headway_testing.tiny_tokenizers import END_OF_TEXT
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine import FinishReason, SamplingParams, TokenEvent
from headway.server.generation.choice import Choice, ChoiceRequest, Delta
from headway.server.generation.logprobs import prompt_tokens
from headway.server.text.detokenizer import Vocabulary
from headway.server.text.prompt import EncodedPrompt
from headway.server.text.tokenizer import load_tokenizer

TOKENIZER = tiny_tokenizers.byte_level()
VOCABULARY = Vocabulary(TOKENIZER)
END = 0
FOX = TOKENIZER.encode("the quick brown fox").ids


def run(ids: Sequence[int], widths: Sequence[int], **fields: object) -> list[Delta]:
    """The deltas of a choice whose tokens come in rounds of the given widths; id 0 stops if stop_token_ids
    says so."""
    min_tokens = fields.pop("min_tokens", 0)
    request = ChoiceRequest(
        [],
        SamplingParams(min_tokens=min_tokens),
        len(ids),
        wants_tokens=True,
        **fields,  # type: ignore[arg-type]
    )
    choice = Choice(0, request, VOCABULARY)
    ids = list(ids)
    ends = [i for i, token_id in enumerate(ids) if token_id in request.stop_token_ids]
    last = ends[0] + 1 if ends else len(ids)
    deltas, done, rounds = [], 0, iter(widths)
    while choice.is_open:
        tokens = ids[done : min(last, done + next(rounds, 1))]
        done += len(tokens)
        reason = (FinishReason.STOP if ends else FinishReason.LENGTH) if done == last else None
        deltas.append(choice.take(TokenEvent(0, tokens, reason, logprobs=fake_logprobs(tokens, 0))))
    return deltas


def joined(deltas: Sequence[Delta]) -> tuple[object, ...]:
    tokens = [token for delta in deltas for token in delta.tokens]
    text = "".join(delta.text for delta in deltas)
    last = deltas[-1]
    return text, tokens, sum(d.num_tokens for d in deltas), last.finish_reason, last.stop_reason


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    ids=st.lists(st.sampled_from([END, *FOX, *range(100, 130)]), min_size=1, max_size=30),
    widths=st.lists(st.integers(1, 6), max_size=20),
    stop=st.lists(
        st.sampled_from([END_OF_TEXT, "quick", "e" + END_OF_TEXT, "o", END_OF_TEXT + " f"]), max_size=2
    ),
    min_tokens=st.integers(0, 4),
    shows_stop=st.booleans(),
    stops=st.booleans(),
)
def test_windows_of_any_width_tell_the_same_as_single_tokens(
    ids: list[int], widths: list[int], stop: list[str], min_tokens: int, shows_stop: bool, stops: bool
) -> None:
    fields = {
        "stop": tuple(stop), "shows_stop": shows_stop, "min_tokens": min_tokens,
        "stop_token_ids": (END,) if stops else (),
    }  # fmt: skip
    told = joined(run(ids, widths, **fields))
    assert told == joined(run(ids, [], **fields))
    text, tokens, num_tokens = told[:3]
    assert [token.token_id for token in tokens] == ids[:num_tokens]  # type: ignore[attr-defined]
    assert all(token.start <= len(text) for token in tokens)  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("width", [1, 4, 9])
def test_the_ending_token_is_told_at_the_end_of_the_text(width: int) -> None:
    text, tokens, num_tokens, *reasons = joined(
        run([*FOX, END], [width] * 9, stop_token_ids=(END,), end_token_ids=(END,))
    )
    assert (len(tokens), num_tokens) == (len(FOX) + 1, len(FOX) + 1)  # type: ignore[arg-type]
    assert tokens[-1].start == len("the quick brown fox")  # type: ignore[index]
    assert (text, reasons) == ("the quick brown fox", ["stop", None])


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("shows_stop", [False, True])
@pytest.mark.parametrize("stop", [END_OF_TEXT, "ox" + END_OF_TEXT, "ox" + END_OF_TEXT + "the"])
def test_a_stop_string_with_a_silent_token_ends_the_text(stop: str, shows_stop: bool, width: int) -> None:
    text, *_, reason, stop_reason = joined(
        run([*FOX, END, *FOX], [width] * 9, stop=(stop,), shows_stop=shows_stop)
    )
    whole = "the quick brown fox" + END_OF_TEXT + "the"
    start = whole.index(stop)
    assert text == whole[: start + len(stop) if shows_stop else start]
    assert (reason, stop_reason) == ("stop", stop)


@pytest.mark.parametrize("width", [1, 4, 9])
def test_stop_strings_do_not_match_before_min_tokens(width: int) -> None:
    ids = [*FOX, *FOX]
    first = next(i for i in range(len(FOX)) if "quick" in TOKENIZER.decode(FOX[: i + 1])) + 1
    for min_tokens, text in ((first - 1, "the "), (first, "the quick brown foxthe ")):
        assert joined(run(ids, [width] * 9, stop=("quick",), min_tokens=min_tokens))[0] == text


def test_a_stop_token_that_the_client_named_is_the_reason() -> None:
    assert joined(run([*FOX, END], [3] * 9, stop_token_ids=(END,)))[3:] == ("stop", END)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(ids=st.lists(st.sampled_from([*FOX, *range(1, 257)]), min_size=1, max_size=20))
def test_a_token_begins_where_its_text_stands_also_behind_broken_characters(ids: list[int]) -> None:
    """A tokenizer's bytes in any order: characters that do not complete are replaced."""
    text, tokens, *_ = joined(run(ids, []))
    for token in tokens:  # type: ignore[attr-defined]
        content = VOCABULARY.token_bytes(token.token_id)
        if content.isascii():
            assert text[token.start :].startswith(content.decode())  # type: ignore[index]


def test_a_prompts_token_begins_behind_a_broken_character(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizers.save(tmp_path, tiny_tokenizers.byte_level()))
    broken, x = (TOKENIZER.token_to_id(token) for token in ("\u00e6", "x"))
    told = prompt_tokens(EncodedPrompt(None, [broken, x, x]), None, tokenizer)
    assert tokenizer.decode([broken, x, x]) == "\ufffdxx"
    assert [token.start for token in told] == [0, 1, 2]
