"""Deltas add up to the text of all ids, split no character and never show a stop string."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from headway_testing import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

from headway.server.text.detokenizer import Decoded, Detokenizer, Vocabulary

HYPOTHESIS = settings(derandomize=True, deadline=None, max_examples=200)


def sequence_of_byte_level() -> Tokenizer:
    """A decoder that is byte-level, but not by its class: takes the general way."""
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = tiny_tokenizers.byte_fallback()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


BYTE_LEVEL = Vocabulary(tiny_tokenizers.byte_level())
BYTE_FALLBACK = Vocabulary(tiny_tokenizers.byte_fallback())
METASPACE = Vocabulary(metaspace())
WRAPPED = Vocabulary(sequence_of_byte_level())
by_vocabulary = pytest.mark.parametrize(
    "vocabulary", [BYTE_LEVEL, BYTE_FALLBACK, METASPACE], ids=["byte-level", "byte-fallback", "metaspace"]
)


def run(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> tuple[list[str], bool]:
    """(all deltas, a stop string ended it)."""
    deltas = []
    for piece in pieces:
        decoded = detokenizer.push(piece)
        deltas.append(decoded.text)
        if decoded.stop is not None:
            return deltas, True
    rest = detokenizer.flush()
    return [*deltas, rest.text], rest.stop is not None


def cut(ids: list[int], lengths: list[int]) -> list[list[int]]:
    """ids in rounds of the given lengths, the rest one by one."""
    pieces = []
    for length in lengths:
        pieces.append(ids[:length])
        ids = ids[length:]
    return [*pieces, *([i] for i in ids)]


ids_of = st.lists(st.integers(0, 620), max_size=60)
round_lengths = st.lists(st.integers(1, 9), max_size=20)


@by_vocabulary
@HYPOTHESIS
@given(ids=ids_of, lengths=round_lengths)
def test_any_ids_in_any_rounds_give_the_text_of_all(
    vocabulary: Vocabulary, ids: list[int], lengths: list[int]
) -> None:
    """Random ids: mostly invalid UTF-8, special tokens and ids beyond the vocabulary among them."""
    deltas, _ = run(Detokenizer(vocabulary), cut(ids, lengths))
    assert "".join(deltas) == vocabulary.tokenizer.decode(ids)


@pytest.mark.parametrize(
    "vocabulary", [BYTE_LEVEL, BYTE_FALLBACK, METASPACE, WRAPPED],
    ids=["byte-level", "byte-fallback", "metaspace", "wrapped-byte-level"],
)  # fmt: skip
@HYPOTHESIS
@given(text=st.text(max_size=40), lengths=round_lengths)
def test_real_text_comes_back_and_no_character_is_split(
    vocabulary: Vocabulary, text: str, lengths: list[int]
) -> None:
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    deltas, _ = run(Detokenizer(vocabulary), cut(ids, lengths))
    assert "".join(deltas) == vocabulary.tokenizer.decode(ids)
    assert "�" in text or not any("�" in delta for delta in deltas)


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, WRAPPED], ids=["bytes", "window"])
def test_a_character_over_several_tokens_comes_whole_with_its_last_token(vocabulary: Vocabulary) -> None:
    ids = vocabulary.tokenizer.encode("🜁").ids
    assert len(ids) > 1
    deltas, _ = run(Detokenizer(vocabulary), [[i] for i in ids])
    assert deltas == [""] * (len(ids) - 1) + ["🜁", ""]


def test_bytes_that_never_become_a_character_are_replaced_at_the_end() -> None:
    first = BYTE_LEVEL.tokenizer.encode("🜁").ids[:1]
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.push(first) == Decoded("", 1)
    assert detokenizer.flush().text == "�"


def test_a_space_at_the_start_of_a_completion_is_kept() -> None:
    """On its own the decoder would take it for the one that Llama's tokenizer puts before a text."""
    ids = BYTE_FALLBACK.tokenizer.encode("the quick brown").ids
    prompt, completion = ids[:1], ids[1:]
    deltas, _ = run(Detokenizer(BYTE_FALLBACK, prompt_token_ids=prompt), [completion])
    assert BYTE_FALLBACK.tokenizer.decode(prompt) + "".join(deltas) == "the quick brown"


def slow_stop(chars: Sequence[str], stop: Sequence[str]) -> tuple[str, bool]:
    """The rule itself: after each character, does the text end with a stop string? The longest wins."""
    text = ""
    for character in chars:
        text += character
        ends = [s for s in stop if text.endswith(s)]
        if ends:
            return text[: -max(map(len, ends))], True
    return text, False


def tokens_of(text: str) -> list[int]:
    return BYTE_LEVEL.tokenizer.encode(text).ids


@HYPOTHESIS
@given(
    text=st.text("abc", max_size=40),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    lengths=round_lengths,
)
def test_a_stop_string_cuts_where_the_rule_says_whatever_the_rounds(
    text: str, stop: list[str], lengths: list[int]
) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, stop=stop)
    deltas, is_stopped = run(detokenizer, cut(tokens_of(text), lengths))
    assert ("".join(deltas), is_stopped) == slow_stop(text, stop)


def test_what_could_begin_a_stop_string_is_held_back_and_released() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, stop=["quick red"])
    texts = [detokenizer.push([i]).text for i in tokens_of("the quick brown")]
    shown = ""
    for text in texts:
        shown += text
        assert not shown.endswith("quick r")
    assert shown + detokenizer.flush().text == "the quick brown"
    assert Detokenizer(BYTE_LEVEL, stop=["quick red"]).push(tokens_of("a quick")).text == "a "


def test_tokens_are_counted_up_to_the_one_that_completes_the_stop_string() -> None:
    ids = tokens_of("the quick brown fox jumps")
    end = len(tokens_of("the quick brown"))
    decoded = Detokenizer(BYTE_LEVEL, stop=["brown"]).push(ids)
    assert decoded == Decoded("the quick ", end, "brown")


def test_a_stop_string_that_only_the_flush_completes_still_cuts() -> None:
    """A byte-fallback run is certain at its end only."""
    ids = BYTE_FALLBACK.tokenizer.encode("x\x01").ids
    detokenizer = Detokenizer(BYTE_FALLBACK, stop=["\x01"])
    assert detokenizer.push(ids) == Decoded("x", len(ids))
    assert detokenizer.flush() == Decoded("", 0, "\x01")


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("stop", [(), ("never", "\n\n\n")], ids=["no-stop", "stop"])
def test_time_is_linear_in_the_output(vocabulary: Vocabulary, stop: tuple[str, ...]) -> None:
    ids = vocabulary.tokenizer.encode("the quick brown fox 日本語 " * 2_000).ids

    def seconds(ids: list[int]) -> float:
        detokenizer = Detokenizer(vocabulary, stop=stop)
        start = time.thread_time()  # what others do meanwhile does not count
        run(detokenizer, [[i] for i in ids])
        return time.thread_time() - start

    best: Callable[[list[int]], float] = lambda ids: min(seconds(ids) for _ in range(3))
    assert best(ids) < 4 * 8 * best(ids[: len(ids) // 8])


@pytest.mark.parametrize("is_special", [False, True], ids=["plain", "special"])
def test_an_added_token_is_its_content_in_a_byte_level_tokenizer(is_special: bool) -> None:
    """ "\u0111" is also the stand-in of a byte."""
    tokenizer = tiny_tokenizers.byte_level()
    content = "\u0111em"
    tokenizer.add_tokens([AddedToken(content, special=is_special)])
    token_id = tokenizer.token_to_id(content)
    vocabulary = Vocabulary(tokenizer, shows_special=True)
    assert vocabulary.token_bytes(token_id) == content.encode()
    assert Detokenizer(vocabulary).push([token_id]).text == content
    ids = tokenizer.encode(f"na\u00efve {content} fox").ids
    assert token_id in ids
    assert vocabulary.decode(ids) == f"na\u00efve {content} fox"
