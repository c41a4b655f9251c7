"""ECMAScript's patterns in Rust's syntax: the same texts match, by the judgement of another
implementation."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import pytest
from headway_testing.grammars import fits, matcher

from headway.engine import RequestError, json_schema_source
from headway.server.grammar.frames import TextForm
from headway.server.grammar.sources import checked_source
from headway.server.json_schema import enforceable
from headway.server.json_schema.patterns import PatternError, rust_pattern

ATOMS = (
    "a", "b", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[ab]", "[^a]", "[a-c]", r"[^\s]", r"[\S-]", "[a&&b]", "[[a]", r"[a\]]",
    r"\n", r"\u00e9", r"\.", r"\x41", "é", r"[\w.-]", r"\p{L}", r"\P{L}", r"[^\W]", "{", "}", "]", r"[\d\s]", "[-a]", "[a-]",
    r"\/", "-", "&", "~", "#", " ", "[a~~b]", "[--a]", r"\ud83d\ude00", r"\0", r"\cA", r"[\b]",
)  # fmt: skip
CHARACTERS = "abcA_0é \n\r\u2028\ufeff\u0085-.&[]{}~#\\/😀\x08٣"


def random_pattern(chance: random.Random, depth: int = 0) -> str:
    kind = chance.random()
    if depth > 3 or kind < 0.5:
        return chance.choice(ATOMS)
    inner = random_pattern(chance, depth + 1)
    if kind < 0.65:
        return inner + random_pattern(chance, depth + 1)
    if kind < 0.75:
        return f"({inner}|{random_pattern(chance, depth + 1)})"
    if kind < 0.9:
        return f"(?:{inner})" + chance.choice(["*", "+", "?", "{2}", "{1,2}", "*?", "{0,}"])
    return chance.choice(["^", ""]) + inner + chance.choice(["$", ""])


def source(pattern: str) -> str:
    return json_schema_source(json.dumps(enforceable({"type": "string", "pattern": pattern}, "schema")))


@pytest.mark.parametrize("seed", range(8))
def test_a_pattern_matches_what_it_matches_elsewhere(seed: int) -> None:
    """`.` is left out: the other implementation does not know ECMAScript's, see below."""
    chance = random.Random(seed)
    num_tried = 0
    for _ in range(60):
        pattern = random_pattern(chance)
        pattern = f"^{pattern}$" if chance.random() < 0.4 else pattern
        try:
            found = matcher(source(pattern))
            judge = jsonschema_rs.validator_for({"type": "string", "pattern": pattern})
        except (PatternError, RequestError, jsonschema_rs.ValidationError):
            continue
        for _ in range(20):
            text = "".join(chance.choice(CHARACTERS) for _ in range(chance.randrange(4)))
            assert fits(found, json.dumps(text, ensure_ascii=False)) == judge.is_valid(text), (pattern, text)
            num_tried += 1
    assert num_tried > 500


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("^.$", ["a", "é", "\u0085"], ["\n", "\r", "\u2028", "\u2029"]),
        ("^[^]$", ["a", "\n"], [""]),
        (r"^[\x00-\x1f]$", ["\n", "\t"], ["\x01", "a"]),
        (r"^[^\x00-\x1f]$", ["a"], ["\n"]),
        ("^[a&&b]$", ["a", "&", "b"], ["c"]),
        ("^[[]$", ["["], ["a"]),
        ("^[a--]$", [], []),
        (r"^\s$", ["\ufeff", "\u2028", " "], ["\u0085", "a"]),
        ("^(?<year>[0-9]{2})$", ["26"], ["2"]),
        ("^a{$", ["a{"], ["a"]),
    ],
)
def test_what_the_two_syntaxes_write_differently_keeps_its_sense(
    pattern: str, fitting: list[str], others: list[str]
) -> None:
    if not fitting:
        with pytest.raises(PatternError):
            rust_pattern(pattern)
        return
    found = matcher(source(pattern))
    assert [text for text in fitting + others if fits(found, json.dumps(text, ensure_ascii=False))] == fitting


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("(?=a)b", "look-around"), ("(?<!a)b", "look-around"), ("(?i)a", "flags"), (r"\bword\b", "word boundary"), (r"(a)\1", "back-reference"),
        (r"\k<a>", "back-reference"), (r"\A", "no escape"), (r"a\z", "no escape"), ("a\\", "no escape"), ("*a", "nothing to repeat"), ("a**", "nothing to repeat"),
        ("a{,3}", "no repetition"), ("[ab", "without its ]"), ("[]", "no character that is written"), (r"\cA", "never written"), (r"[\x01-\x07]", "no character that is written"), ("[b-a]", "out of order"),
        (r"[\d-a]", "a set as its end"), (r"\ud800", "no character"), ("x" * 5000, "the limit is 4096"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_its_place(pattern: str, complaint: str) -> None:
    with pytest.raises(PatternError, match=complaint):
        rust_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        (r"(\d{4}-\d{2}-\d{2})", ["2026-01-31"], ["٢٣٢٣-٣٢-٣٢"]),
        (r"\w+", ["a_1"], ["é", "٣"]),
        (r"[\d\-x]+", ["1-x"], ["٣"]),
        (r"[^\W\d]", ["a", "_"], ["é", "1"]),
        (r"a\sb", ["a b", "a\u2003b"], ["a\u0085b"]),
        (r"\\d", [r"\d"], ["1"]),
        (r"(?u)\d\w", ["1a", "٣é"], ["a1"]),
        (r"\D", ["٣", "a"], ["3"]),
    ],
)
def test_classes_of_a_regex_field_are_those_of_a_schema(
    pattern: str, fitting: list[str], others: list[str]
) -> None:
    found = matcher(checked_source(TextForm("regex", pattern, "regex"), lambda _: None))
    assert [text for text in fitting + others if fits(found, text)] == fitting
