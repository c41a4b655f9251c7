"""A row's logits do not depend on its neighbours, and the rotary table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.families import tiny_model
from headway_testing.paged import PagedSequences, load, load_pair

from headway.engine.layers import attention, stream
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.placement import Placement
from headway.engine.layers.rotary import rotary_table
from headway.engine.models.registry import read_model_spec
from headway.kernels import QueryBatch
from headway.kernels.linear import api

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
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.long)])
def test_logits_of_a_row_are_bitwise_the_same_alone_and_among_others(
    dtype: str, sizes: dict[str, object], tmp_path: Path
) -> None:
    """Rows of 37 tokens each: one decode step alone, then among 1 .. 63 rows of other lengths."""
    models = load_pair(random_mimo(tmp_path / "model", **sizes), dtype=dtype)
    model = models.target
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 151, (64, 40), generator=generator)
    lengths = [37, *torch.randint(1, 40, (63,), generator=generator).tolist()]
    sequences = PagedSequences(models, 64, 48)
    prefilled = [(row, 0, length) for row, length in enumerate(lengths)]
    sequences.forward(prefilled, torch.cat([tokens[row, :length] for row, _, length in prefilled]))

    def logits_of_first(num_rows: int) -> torch.Tensor:
        steps = [(row, lengths[row], 1) for row in range(num_rows)]
        hidden = sequences.forward(steps, torch.stack([tokens[row, lengths[row]] for row in range(num_rows)]))
        carry = sequences.draft(steps, tokens[:num_rows, 0], hidden)
        return torch.cat([model.logits(hidden)[0], models.draft.logits(carry)[0]])

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


def fuse(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    """Lets layers fuse what a GPU fuses in streams of a few tokens, with the kernels' twins, or not."""
    monkeypatch.setattr(stream, "defers_norm", lambda *_: answer)
    monkeypatch.setattr(attention, "fuses_qkv", lambda *_: answer)


@pytest.mark.parametrize("sizes", [{"head_dim": 16}, EMBEDDED], ids=["odd-tiles", "whole-tiles"])
def test_fused_products_compute_what_single_launches_do(
    sizes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states, drafts, and keys and values."""
    models = load_pair(random_mimo(tmp_path / "model", **sizes), dtype="float64")
    tokens = torch.randint(0, 151, (2, 40), generator=torch.Generator().manual_seed(0))
    spans = [(0, 0, 30), (1, 0, 3)]
    steps = [(0, 30, 4), (1, 3, 4)]
    fused = mock.Mock(wraps=attention.qkv_rope_append)
    monkeypatch.setattr(attention, "qkv_rope_append", fused)
    results = []
    for answer in (False, True):
        fuse(monkeypatch, answer)
        sequences = PagedSequences(models, 2, 40)
        sequences.forward(spans, torch.cat([tokens[0, :30], tokens[1, :3]]))
        hidden = sequences.forward(steps, torch.cat([tokens[0, 30:34], tokens[1, 3:7]]))
        carry = sequences.draft(steps, torch.cat([tokens[0, 31:35], tokens[1, 4:8]]), hidden)
        results.append((hidden, carry, *sequences.pool.by_block()))
    for plain, few in zip(*results, strict=True):
        torch.testing.assert_close(few, plain, rtol=0, atol=1e-5)
    calls = 2 * len(models.target.layers) + 1 if sizes is EMBEDDED else 0
    assert fused.call_count == calls


@pytest.mark.parametrize(
    ("architecture", "changes", "appends", "defers"),
    [
        ("Qwen2ForCausalLM", {}, 3, 5),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}, 3, 5),
        ("LlamaForCausalLM", {}, 3, 5),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, 3, 5),
        ("Qwen3ForCausalLM", {}, 0, 5),
        ("Qwen3ForCausalLM", {"attention_bias": True}, 0, 5),
    ],
    ids=str,
)
def test_every_family_keeps_the_fusions_that_its_form_allows(
    architecture: str,
    changes: dict[str, object],
    appends: int,
    defers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """appends: layers whose q, k and v are multiplied, rotated and cached at once. defers: norms that wait
    for a product."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "num_attention_heads": 2}
    tiny_model(architecture, **sizes, **changes).save_pretrained(tmp_path)
    model = load(tmp_path, dtype="float64")
    tokens = torch.randint(0, 151, (30,), generator=torch.Generator().manual_seed(0))
    appending, deferring = mock.Mock(wraps=attention.qkv_rope_append), mock.Mock(wraps=api.add_linear)
    monkeypatch.setattr(attention, "qkv_rope_append", appending)
    monkeypatch.setattr(api, "add_linear", deferring)
    results = []
    for answer in (False, True):
        fuse(monkeypatch, answer)
        sequences = PagedSequences(model, 2, 40)
        results.append((sequences.forward([(0, 0, 20), (1, 0, 10)], tokens), *sequences.pool.by_block()))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-5)
    assert (appending.call_count, deferring.call_count) == (appends, defers)


def as_chunks(inputs: ForwardInputs) -> ForwardInputs:
    """The same, as a graph of a prefill gets it: one more chunk, which does not exist."""
    tables = torch.cat([batch.block_table for batch in inputs.batches])
    numbers = [[batch.first_token, batch.num_tokens] for batch in inputs.batches]
    firsts, lengths = torch.tensor([*numbers, [0, 0]]).unbind(1)
    starts = torch.cat([*(batch.start_positions for batch in inputs.batches), torch.zeros(1).long()])
    chunks = QueryBatch.of_chunks(
        torch.cat([tables, tables[:1]]), starts, lengths, firsts, len(inputs.token_ids)
    )
    return replace(inputs, batches=(chunks,))


def test_fused_products_attend_prompts_as_single_launches_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks from the first position on, then what follows, and a prompt that begins in the same step."""
    model = load(random_mimo(tmp_path / "model", **EMBEDDED), dtype="float64")
    tokens = torch.randint(0, 151, (32,), generator=torch.Generator().manual_seed(0))
    results = []
    for answer in (False, True):
        fuse(monkeypatch, answer)
        sequences = PagedSequences(model, 3, 40)
        hidden = [
            model.forward(as_chunks(sequences.inputs(spans, tokens[:count])), sequences.pool).last
            for spans, count in (([(0, 0, 11), (1, 0, 11)], 22), ([(0, 11, 7), (1, 11, 20), (2, 0, 5)], 32))
        ]
        results.append((*hidden, *sequences.pool.by_block()))
    for plain, few in zip(*results, strict=True):
        torch.testing.assert_close(few, plain, rtol=0, atol=1e-5)


def test_rotary_angles_are_rounded_to_float32_in_every_dtype(tmp_path: Path) -> None:
    spec = read_model_spec(random_mimo(tmp_path / "model"))
    cpu = torch.device("cpu")
    tables = [
        rotary_table(spec.attentions[0].rope, 256, Placement(cpu, dtype))
        for dtype in (torch.float64, torch.bfloat16)
    ]
    assert [t.dtype for t in tables] == [torch.float64, torch.float32]
    assert torch.equal(tables[0].float(), tables[1])
    exact = torch.tensor(200 / 10_000.0 ** (2 / 16), dtype=torch.float64)
    assert abs(tables[0][200, 1] - exact.cos()) < 2e-5
    assert abs(tables[0][200, 9] - exact.sin()) < 2e-5
