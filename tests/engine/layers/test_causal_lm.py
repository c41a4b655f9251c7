"""The decoder on the paged cache against transformers' Qwen2ForCausalLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from headway_testing.families import tiny_model
from headway_testing.paged import PagedSequences, load

Pair = Callable[..., SimpleNamespace]


@pytest.mark.parametrize(
    "variant", ["grouped", "ungrouped", "one-kv-head", "tied", "head-dim-of-hidden", "one-layer"]
)
def test_logits_are_those_of_transformers(variant: str, pair: Pair, tokens: torch.Tensor) -> None:
    case = pair(variant, with_head=False)
    sequences = PagedSequences(case.model, 1, len(tokens))
    logits = case.model.logits(sequences.forward([(0, 0, len(tokens))], tokens))
    assert (logits - case.oracle.logits(tokens)).abs().max() < case.tolerance


@pytest.mark.parametrize(
    "widths",
    [[75], [32, 32, 11], [1, 15, 16, 43], [7] * 10 + [5], [70, 1, 1, 1, 1, 1], [60, 4, 4, 4, 3]],
    ids=["whole", "blocks", "uneven", "sevens", "tokens", "windows"],
)
def test_chunks_and_windows_give_the_logits_of_the_whole(
    widths: list[int], pair: Pair, tokens: torch.Tensor
) -> None:
    case = pair("grouped", with_head=False)
    sequences = PagedSequences(case.model, 1, len(tokens))
    parts, first = [], 0
    for width in widths:
        parts.append(sequences.forward([(0, first, width)], tokens[first : first + width]))
        first += width
    logits = case.model.logits(torch.cat(parts))
    assert (logits - case.oracle.logits(tokens)).abs().max() < case.tolerance


def test_sequences_side_by_side_do_not_mix(pair: Pair, tokens: torch.Tensor) -> None:
    case = pair("grouped", with_head=False)
    lengths = [20, 1, 33]
    rows = list(tokens[: sum(lengths)].split(lengths))
    sequences = PagedSequences(case.model, 3, 48, block_size=16)
    spans = [(row, 0, length) for row, length in enumerate(lengths)]
    logits = case.model.logits(sequences.forward(spans, torch.cat(rows)))
    wanted = torch.cat([case.oracle.logits(row) for row in rows])
    assert (logits - wanted).abs().max() < case.tolerance


def test_a_folder_without_a_head_reports_none(pair: Pair) -> None:
    models = pair("grouped", with_head=False).models
    assert (models.draft, len(models.target.state())) == (None, 3)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3_5ForCausalLM"])
def test_taps_are_transformers_states_and_change_no_bit(
    architecture: str, tokens: torch.Tensor, tmp_path: Path
) -> None:
    """Tap i is the residual stream that enters layer i."""
    theirs = tiny_model(architecture, num_hidden_layers=4)
    theirs.save_pretrained(tmp_path)
    model, spans, taps = load(tmp_path), [(0, 0, len(tokens))], (1, 3)
    found = []
    for some in ((), taps):
        sequences = PagedSequences(model, 1, len(tokens))
        found.append(model.forward(sequences.inputs(spans, tokens), sequences.pool, some))
    assert torch.equal(found[0].last, found[1].last)
    with torch.no_grad():
        states = theirs(tokens[None], use_cache=False, output_hidden_states=True).hidden_states
    for tap, state in zip(taps, found[1].taps, strict=True):
        assert (state - states[tap][0]).abs().max() < 1e-4
