"""A row's logits do not depend on its neighbours, and the rotary table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.paged import PagedSequences, load

from headway.engine.model_config import read_model_config
from headway.engine.models.layers import Placement, rotary_table

EMBEDDED = {  # the sizes of the embedded model, but for the number of layers
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("sizes", [{}, EMBEDDED], ids=["tiny", "embedded"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_of_a_row_are_bitwise_the_same_alone_and_among_others(
    dtype: str, sizes: dict[str, object], tmp_path: Path
) -> None:
    """Rows of 37 tokens each: one decode step alone, then among 1 .. 63 rows of other lengths."""
    model = load(random_mimo(tmp_path / "model", **sizes), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 151, (64, 40), generator=generator)
    lengths = [37, *torch.randint(1, 40, (63,), generator=generator).tolist()]
    sequences = PagedSequences(model, 64, 48)
    prefilled = [(row, 0, length) for row, length in enumerate(lengths)]
    sequences.forward(prefilled, torch.cat([tokens[row, :length] for row, _, length in prefilled]))

    def logits_of_first(num_rows: int) -> torch.Tensor:
        steps = [(row, lengths[row], 1) for row in range(num_rows)]
        hidden = sequences.forward(steps, torch.stack([tokens[row, lengths[row]] for row in range(num_rows)]))
        carry = sequences.draft(steps, tokens[:num_rows, 0], hidden)
        return torch.cat([model.logits(hidden)[0], model.draft_logits(carry)[0]])

    alone = logits_of_first(1)
    assert [
        n for n in (2, 3, 4, 7, 15, 16, 17, 33, 63, 64) if not torch.equal(logits_of_first(n), alone)
    ] == []


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("sizes", [{}, EMBEDDED], ids=["tiny", "embedded"])
def test_logits_of_a_window_are_bitwise_those_of_single_steps(
    sizes: dict[str, object], tmp_path: Path
) -> None:
    model = load(random_mimo(tmp_path / "model", **sizes))
    tokens = torch.randint(0, 151, (72,), generator=torch.Generator().manual_seed(0))
    sequences = PagedSequences(model, 1, 72)
    window = sequences.forward([(0, 0, 64)], tokens[:64])[-1:]
    for width in (1, 2, 3, 4, 5, 9):
        sequences.forward([(0, 0, 63)], tokens[:63])
        found = sequences.forward([(0, 63, width)], tokens[63 : 63 + width])[:1]
        assert torch.equal(model.logits(found), model.logits(window)), width


def test_rotary_angles_are_rounded_to_float32_in_every_dtype(tmp_path: Path) -> None:
    config = read_model_config(random_mimo(tmp_path / "model"))
    cpu = torch.device("cpu")
    tables = [rotary_table(config, Placement(cpu, dtype)) for dtype in (torch.float64, torch.bfloat16)]
    assert [t.dtype for t in tables] == [torch.float64, torch.float32]
    assert torch.equal(tables[0].float(), tables[1])
    exact = torch.tensor(200 / 10_000.0 ** (2 / 16), dtype=torch.float64)
    assert abs(tables[0][200, 1] - exact.cos()) < 2e-5
    assert abs(tables[0][200, 9] - exact.sin()) < 2e-5
