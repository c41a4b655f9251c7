"""Parts of a choice's text, and the count of its tokens of reasoning, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from headway_testing import tiny_tokenizers
from tokenizers import AddedToken

from headway.engine import Thinking
from headway.server.formats import Content, Reasoning, find_format
from headway.server.generation.choice_output import (
    ChoiceOutput,
    NumberedCall,
    OutputOptions,
    ReasoningCounter,
    joined,
    without_gaps,
)
from headway.server.text.detokenizer import Detokenizer
from headway.server.text.tokenizer import load_tokenizer

END, START = 7, 3


@pytest.mark.parametrize(
    ("thinking", "token_ids", "count"),
    [
        (None, [1, 2, END, 4], 0),
        (Thinking([END], is_open=True), [1, 2, END, 4, END, 5], 2),
        (Thinking([END], is_open=True), [END, 4], 0),
        (Thinking([END], is_open=True), [1, 2], 2),
        (Thinking([END], is_open=False, start_id=START), [START, 1, 2, END, START, 4, END], 2),
        (Thinking([END], is_open=False, start_id=START), [1, START, 2, END], 0),
        (Thinking([6, END], is_open=True), [1, 6, 6, END, 2], 2),
        (Thinking([6, END], is_open=True), [1, END, 6], 3),
    ],
)
def test_reasoning_is_counted_up_to_its_end_whatever_the_cuts(
    thinking: Thinking | None, token_ids: list[int], count: int
) -> None:
    for size in range(1, len(token_ids) + 1):
        counter = ReasoningCounter(thinking)
        cuts = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
        assert sum(counter.count(cut) for cut in cuts) == count


def test_neighbours_of_one_kind_are_put_together() -> None:
    call = NumberedCall(0, "call_0", "f", "{}")
    parts = [Reasoning("a", 7), Reasoning("b", 8), Content("c", 9), call, call, Content("d", 30), Content("e", 32)]  # fmt: skip
    first = (Reasoning("ab", 7), Content("c", 9), call, call)
    assert joined(parts) == (*first, Content("d", 30), Content("e", 32))
    assert without_gaps(parts) == (*first, Content("de", 30))


def test_nothing_follows_a_call_that_is_the_only_one() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for is_single, num_calls in ((True, 1), (False, 2)):
        output = ChoiceOutput(
            OutputOptions(find_format(None, name="hermes"), "", tools, is_single_call=is_single)
        )
        parts = (*output.feed(f"a {call}b{call}"), *output.feed("c"), *output.finish())
        calls = [part for part in parts if isinstance(part, NumberedCall)]
        assert [call.index for call in calls] == list(range(num_calls)) == list(range(output.num_calls))
        assert "".join(p.text for p in parts if isinstance(p, Content)) == ("a" if is_single else "a bc")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_only_the_special_tokens_that_are_asked_for_are_text(tmp_path: Path, kind: str) -> None:
    library = getattr(tiny_tokenizers, kind)()
    library.add_tokens([AddedToken(text, special=True) for text in ("<think>", "<other>")])
    tokenizer = load_tokenizer(tiny_tokenizers.save(tmp_path, library))
    ids = tokenizer.encode_plain("the <think>quick<other> fox<think>")
    vocabulary = tokenizer.vocabulary_showing(["<think>"])
    assert vocabulary is tokenizer.vocabulary_showing(["<think>"])
    expected = tokenizer.full_vocabulary.decode(ids).replace("<other>", "")
    assert vocabulary.decode(ids) == expected
    detokenizer = Detokenizer(vocabulary, stop=["<other>"])
    assert expected.startswith(detokenizer.push(ids).text.rstrip())
    detokenizer = Detokenizer(vocabulary)
    assert "".join(detokenizer.push([i]).text for i in ids) + detokenizer.flush().text == expected
