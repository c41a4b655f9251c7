"""Masks of windows against a matcher that consumes token by token."""

from __future__ import annotations

import ctypes
import random
import resource
from pathlib import Path

import pytest
from headway_testing.waiting import wait_until
from llguidance import LLParserLimits

from headway.engine.grammar import compile as compile_module
from headway.engine.grammar import compiler as compiler_module
from headway.engine.grammar.compile import (
    compile_matcher,
    json_schema_source,
    lark_source,
    make_grammar_check,
    make_tokenizer,
    regex_source,
)
from headway.engine.grammar.compiler import GrammarCompiler
from headway.engine.grammar.guide import Guide
from headway.engine.grammar.masks import GuidedWindow, MaskBuffer, MaskFiller
from headway.engine.protocol.errors import RequestError
from headway.engine.protocol.grammar import Grammar, Thinking, TokenTable

END, THINK, CLOSE = 256, 257, 258
VOCAB, WINDOW = 300, 4
TABLE = TokenTable(
    [*(bytes([i]) for i in range(256)), b"<end>", b"<think>", b"</think>"], [END, THINK, CLOSE], [END]
)
TOKENIZER = make_tokenizer(TABLE, VOCAB)
GROWN_BYTES = 8 * 2**20
EVERYTHING = set(range(VOCAB))
REASONING = Thinking(end_ids=[CLOSE], is_open=True)


class Buffer:
    def __init__(self, num_entries: int) -> None:
        words = -(-VOCAB // 32)
        self._memory = (ctypes.c_int32 * (num_entries * WINDOW * words))()
        self.buffer = MaskBuffer(ctypes.addressof(self._memory), num_entries, WINDOW, words)

    def allowed(self, entry: int, place: int) -> set[int]:
        data = ctypes.string_at(self.buffer.address_of(entry, place), self.buffer.line_bytes)
        return {i for i in range(VOCAB) if data[i // 8] >> (i % 8) & 1}


def guide(pattern: str, thinking: Thinking | None = None) -> Guide:
    return Guide(compile_matcher(TOKENIZER, regex_source(pattern)), thinking, end_ids=[END])


def places(one: Guide, drafts: list[int]) -> list[set[int]]:
    memory = Buffer(2)
    assert MaskFiller().fill([GuidedWindow(one, drafts, 1)], memory.buffer) == []
    return [memory.allowed(1, place) for place in range(len(drafts) + 1)]


@pytest.mark.parametrize("seed", range(20))
def test_each_place_allows_what_the_grammar_allows_after_the_drafts(seed: int) -> None:
    chance = random.Random(seed)
    schema = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yz",null]}},"required":["b"],"additionalProperties":false}'
    one = Guide(compile_matcher(TOKENIZER, json_schema_source(schema)))
    walker = compile_matcher(TOKENIZER, json_schema_source(schema))
    for _ in range(40):
        if walker.is_stopped():
            break
        drafts, expected = [], []
        trial = walker.deep_copy()
        for _ in range(WINDOW):
            bits = trial.compute_bitmask()
            ids = {i for i in range(VOCAB) if bits[i // 8] >> (i % 8) & 1}
            expected.append(ids)
            drafts.append(chance.choice(sorted(ids)) if chance.random() < 0.8 else chance.randrange(256))
            if drafts[-1] == END or not trial.consume_token(drafts[-1]):
                break
        found = places(one, drafts[: WINDOW - 1])
        for place, ids in enumerate(expected[: len(found)]):
            assert found[place] == ids, place
        token = chance.choice(sorted(expected[0]))
        one.advance([token])
        walker.consume_token(token)


def test_places_after_a_draft_that_is_not_allowed_allow_everything() -> None:
    assert places(guide("ab"), [ord("x"), ord("b")]) == [{ord("a")}, EVERYTHING, EVERYTHING]


def test_a_complete_text_may_only_end() -> None:
    assert places(guide("a"), [ord("a")]) == [{ord("a")}, {END}]


def test_the_grammar_begins_behind_the_reasoning_even_inside_a_window() -> None:
    one = guide("ab", REASONING)
    assert places(one, [1, 2]) == [EVERYTHING - {END}] * 3
    assert places(one, [1, CLOSE, ord("a")]) == [EVERYTHING - {END}] * 2 + [{ord("a")}, {ord("b")}]
    one.advance([1, CLOSE])
    assert places(one, [ord("a")]) == [{ord("a")}, {ord("b")}]


def test_a_sequence_of_tokens_closes_the_reasoning_across_windows() -> None:
    one = guide("ab", Thinking(end_ids=[7, 7, 8], is_open=True))
    one.advance([7, 7])
    assert one.num_free([7, 8]) == 2
    one.advance([7])
    assert one.num_free([8, ord("a")]) == 1
    one.advance([8])
    assert not one.is_free


def test_the_model_may_open_its_reasoning_itself_as_its_first_token() -> None:
    thinking = Thinking(end_ids=[CLOSE], is_open=False, start_id=THINK)
    one = guide("ab", thinking)
    assert places(one, []) == [{ord("a"), THINK}]
    one.advance([THINK, 5, CLOSE])
    assert places(one, []) == [{ord("a")}]
    other = guide("ab", thinking)
    other.advance([ord("a")])
    assert places(other, []) == [{ord("b")}]


def test_a_text_that_no_token_continues_ends_its_request_alone() -> None:
    tokens = [bytes([i]) if i != ord("b") else b"" for i in range(256)]
    tokenizer = make_tokenizer(TokenTable([*tokens, b"<end>"], [END], [END]), VOCAB)
    dead = Guide(compile_matcher(tokenizer, regex_source("ab")))
    dead.advance([ord("a")])
    memory = Buffer(2)
    alive = guide("xy")
    windows = [GuidedWindow(dead, [], 0), GuidedWindow(alive, [], 1)]
    ((found, error),) = MaskFiller().fill(windows, memory.buffer)
    assert found is dead
    assert "no token of this model is allowed" in str(error)
    assert memory.allowed(0, 0) == EVERYTHING
    assert memory.allowed(1, 0) == {ord("x")}


# After b no text is left, which the library finds out there alone, by a fault that lasts.
FAULTY = lark_source('start: "x" ("ac" | "ab" NOTHING)\nNOTHING: /p/ & /q/')


@pytest.mark.parametrize("thinking", [None, REASONING], ids=["alone", "after reasoning"])
def test_a_fault_that_a_draft_leads_to_is_none_of_the_text(thinking: Thinking | None) -> None:
    one = Guide(compile_matcher(TOKENIZER, FAULTY), thinking, end_ids=[END])
    before = [] if thinking is None else [CLOSE]
    start = [EVERYTHING - {END}] * len(before)
    found = places(one, [*before, ord("x"), ord("a"), ord("b")][: WINDOW - 1])
    assert found == [*start, {ord("x")}, {ord("a")}, {ord("b"), ord("c")}, EVERYTHING][:WINDOW]
    one.advance([*before, ord("x"), ord("a")])
    assert places(one, [ord("b")]) == [{ord("b"), ord("c")}, EVERYTHING]
    one.advance([ord("c")])
    assert places(one, []) == [{END}]


@pytest.mark.parametrize("after", [END, ord("p"), ord("z")])
def test_a_text_that_comes_to_the_place_of_a_fault_ends_there(after: int) -> None:
    one = Guide(compile_matcher(TOKENIZER, FAULTY), end_ids=[END])
    one.advance([ord("x")])
    places(one, [ord("a"), ord("b")])
    one.advance([ord("a")])
    places(one, [ord("b"), ord("b")])
    with pytest.raises(RequestError, match="cannot be continued within its grammar: no token of this model"):
        one.advance([ord("b"), after])


def test_a_limit_of_the_library_is_told_from_a_text_without_continuation() -> None:
    """Each of its thousands of ways through is an item of the library's."""
    source = lark_source('start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"')
    one, memory = Guide(compile_matcher(TOKENIZER, source)), Buffer(1)

    def write() -> None:
        for _ in range(9):
            for _, error in MaskFiller().fill([GuidedWindow(one, [], 0)], memory.buffer):
                raise error
            one.advance([ord("x")])

    with pytest.raises(RequestError, match=r"within its grammar: parser error: Too many items .*; simplify"):
        write()


def test_what_is_kept_is_bounded_in_number_and_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TABLE, VOCAB)

    def kept_after(*patterns: str) -> list[str]:
        for pattern in patterns:
            assert places(compiler.compile(Grammar(regex_source(pattern))).result(), [])
        return list(compiler._kept)

    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    assert kept_after("a", "b", "a", "c") == [regex_source("a"), regex_source("c")]
    monkeypatch.setattr(compiler_module, "MAX_KEPT_CHARACTERS", 200)
    assert kept_after("d" * 100) == [regex_source("d" * 100)]
    assert kept_after("e" * 300) == [], "a source that is too long serves its request alone"
    compiler.close()


def test_what_nobody_asks_for_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TABLE, VOCAB)
    compiler.compile(Grammar(regex_source("a"))).result()
    compiler.tend()
    assert list(compiler._kept) == [regex_source("a")]
    monkeypatch.setattr(compiler_module, "KEPT_SECONDS", 0.0)
    monkeypatch.setattr(compiler_module, "TEND_SECONDS", 0.0)
    wait_until(lambda: compiler.tend() is None and not compiler._kept, 5.0, "kept")
    compiler.close()


def test_memory_that_lexers_took_goes_back_with_their_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these fills its lexer, which no other has any use for."""
    monkeypatch.setattr(compiler_module, "KEPT_SECONDS", 0.0)
    monkeypatch.setattr(compiler_module, "TEND_SECONDS", 0.0)
    compiler, chance, memory = GrammarCompiler(TABLE, VOCAB), random.Random(0), Buffer(1)
    compiler.compile(Grammar(regex_source("a"))).result()
    before = resident_bytes()
    guides = []
    for letter in "abcdefgh":
        one = compiler.compile(Grammar(regex_source(f"[a-h]*{letter}[a-h]{{60}}"))).result()
        guides.append(one)
        for _ in range(400):
            text = [ord(chance.choice("abcdefgh")) for _ in range(3)]
            assert MaskFiller().fill([GuidedWindow(one, text, 0)], memory.buffer) == []
            one.advance(text)
    assert resident_bytes() - before > GROWN_BYTES
    guides.clear()
    del one
    wait_until(
        lambda: compiler.tend() is None and resident_bytes() - before < GROWN_BYTES // 2,
        5.0,
        "memory is kept",
    )
    compiler.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_request_whose_lexer_is_slow_to_renew_ends_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = LLParserLimits(max_lexer_states=400, step_lexer_fuel=200_000, precompute_large_lexemes=True)
    monkeypatch.setattr(compile_module, "LIMITS", limits)
    monkeypatch.setattr(compiler_module, "MAX_RENEWAL_SECONDS", 0.0)
    compiler, chance, memory = GrammarCompiler(TABLE, VOCAB), random.Random(0), Buffer(1)
    one = compiler.compile(Grammar(regex_source("[abc]*a[abc]{60}"))).result()

    def write() -> None:
        for _ in range(400):
            for _, error in MaskFiller().fill([GuidedWindow(one, [], 0)], memory.buffer):
                raise error
            one.advance([ord(chance.choice("abc"))])

    with pytest.raises(RequestError, match=r"within its grammar: .*too many states.*; simplify"):
        write()
    compiler.close()


def test_what_is_renewed_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source whose lexer is full may have been given up meanwhile."""
    compiler = GrammarCompiler(TABLE, VOCAB)
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    first, *_ = [compiler.compile(Grammar(regex_source(pattern))).result() for pattern in "abc"]
    assert first._renew(first._beginning) is not first._beginning
    assert list(compiler._kept) == [regex_source("c"), regex_source("a")]
    compiler.close()


def test_a_lexer_that_others_have_filled_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with the same source share its lexer, whose states are limited in number."""
    limits = LLParserLimits(max_lexer_states=400, step_lexer_fuel=200_000, precompute_large_lexemes=True)
    monkeypatch.setattr(compile_module, "LIMITS", limits)
    compiler = GrammarCompiler(TABLE, VOCAB)
    chance, memory = random.Random(0), Buffer(1)
    for _ in range(12):
        one = compiler.compile(Grammar(regex_source("[abc]*a[abc]{60}"))).result()
        for _ in range(40):
            text = [ord(chance.choice("abc")) for _ in range(3)]
            assert MaskFiller().fill([GuidedWindow(one, text, 0)], memory.buffer) == []
            assert {ord(letter) for letter in "abc"} <= memory.allowed(0, 3)
            one.advance(text[: chance.randint(1, 3)])
    compiler.close()


def test_a_token_outside_of_the_grammar_is_an_error_of_the_request() -> None:
    with pytest.raises(RequestError, match="cannot be continued within its grammar: no token of this model"):
        guide("ab").advance([ord("a"), ord("x")])


def test_a_lexer_too_large_for_its_first_step_is_refused_by_the_check() -> None:
    """It compiles, takes 330 MB, and its first token would end its request in the engine."""
    check = make_grammar_check(TABLE, VOCAB)
    with pytest.raises(RequestError, match="too many expressions"):
        check(regex_source("(a{1000}){1000}b"))
    for pattern in ("", "a?", "[0-9]{3}", "(a{300}){300}b"):
        check(regex_source(pattern))


def test_of_sources_that_take_long_to_compile_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TABLE, VOCAB)

    def compile_sources() -> int:
        for pattern in ("a", "b", "c"):
            compiler.compile(Grammar(regex_source(pattern))).result()
        return len(compiler._kept)

    assert compile_sources() == 3
    compiler._kept.clear()
    monkeypatch.setattr(compiler_module, "MAX_KEPT_COMPILE_SECONDS", 0.0)
    assert compile_sources() == 1
    compiler.close()
