"""MiMo's MTP head on the paged cache against an oracle built of transformers' layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from headway_testing.checkpoints import (
    constructed_mimo,
    mimo_config,
    random_cycle,
    random_mimo,
    random_tensors,
    write_folder,
)
from headway_testing.drafting import draft_chain, prefill
from headway_testing.paged import PagedSequences, load_pair

from headway.engine.layers.causal_lm import TargetStates
from headway.kernels import rms_norm

Pair = Callable[..., SimpleNamespace]


@pytest.mark.parametrize("variant", ["grouped", "ungrouped", "one-kv-head", "tied", "head-dim-of-hidden"])
def test_trunk_and_head_are_those_of_the_oracle(variant: str, pair: Pair, tokens: torch.Tensor) -> None:
    case = pair(variant, with_head=True)
    sequences = PagedSequences(case.models, 1, len(tokens))
    hidden = sequences.forward([(0, 0, len(tokens))], tokens)
    assert (case.model.logits(hidden) - case.oracle.logits(tokens)).abs().max() < case.tolerance
    states = case.head.draft_hidden(TargetStates(hidden))[:-1]
    carries = sequences.draft([(0, 1, len(tokens) - 1)], tokens[1:], states)
    wanted = case.oracle.carries(case.oracle.hidden(tokens)[:-1], tokens[1:])
    assert (carries - wanted).abs().max() < case.tolerance
    logits = case.head.logits(carries)
    assert (logits - case.oracle.draft_logits(wanted)).abs().max() < case.tolerance


@pytest.mark.parametrize("widths", [[74], [16, 16, 32, 10], [1, 30, 43]], ids=["whole", "blocks", "uneven"])
def test_drafts_of_every_depth_are_those_of_the_oracle(
    widths: list[int], pair: Pair, tokens: torch.Tensor
) -> None:
    """The prompt fills slots 1 .. 73, then the pair (h_73, t_74) drafts, as after a prefill."""
    case = pair("grouped", with_head=True)
    sequences = prefill(case.models, tokens[:-1], widths)
    state = case.oracle.hidden(tokens[:-1])[-1:]
    chain = draft_chain(sequences, tokens[-1:], state, len(tokens) - 1, 4)
    wanted = case.oracle.draft_chain(tokens, 4)
    assert chain.argmax(-1).tolist() == wanted.argmax(-1).tolist()
    assert (chain - wanted).abs().max() < case.tolerance


def test_the_next_true_pairs_overwrite_what_drafts_left(pair: Pair, tokens: torch.Tensor) -> None:
    """A round of three drafts at slots 70 .. 72, of which none is right; the next round starts from the
    truth."""
    case = pair("grouped", with_head=True)
    sequences = prefill(case.models, tokens[:70], [70])
    states = case.head.draft_hidden(TargetStates(sequences.forward([(0, 70, 5)], tokens[70:])))
    before = case.oracle.hidden(tokens)[69:70]
    draft_chain(sequences, tokens[70:71], before, 70, 3)
    carry = sequences.draft([(0, 70, 5)], tokens[70:], torch.cat([before, states[:-1]]))[-1:]
    wanted = case.oracle.draft_chain(tokens, 1)
    assert (case.head.logits(carry) - wanted).abs().max() < case.tolerance


def test_filling_the_draft_cache_writes_what_a_draft_writes(pair: Pair, tokens: torch.Tensor) -> None:
    models = pair("grouped", with_head=True).models
    filled, drafted = (PagedSequences(models, 1, len(tokens)) for _ in range(2))
    states = torch.randn(75, 48, dtype=models.target.dtype, generator=torch.Generator().manual_seed(0))
    span = [(0, 1, 74)]
    filled.fill(span, tokens[1:], states[:-1])
    drafted.draft(span, tokens[1:], states[:-1])
    for one, other in zip(filled.pool.by_block(), drafted.pool.by_block(), strict=True):
        assert torch.equal(one, other)


def test_inputs_of_a_draft_are_left_as_they_are(pair: Pair, tokens: torch.Tensor) -> None:
    models = pair("grouped", with_head=True).models
    sequences = PagedSequences(models, 1, 16)
    states = torch.randn(16, 48, dtype=models.target.dtype, generator=torch.Generator().manual_seed(0))
    kept = states.clone()
    models.draft.draft(sequences.inputs([(0, 0, 16)], tokens[:16]), states, sequences.pool)
    assert torch.equal(states, kept)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_every_draft_of_the_constructed_model_is_right(depth: int, tmp_path: Path) -> None:
    models = load_pair(constructed_mimo(tmp_path / "model"))
    model, head = models.target, models.draft
    successor = random_cycle(128)
    prompt = torch.tensor([5, 77, 0, 126, 31, 31])
    sequences = prefill(models, prompt, [6], room=16)
    state = sequences.forward([(0, 5, 1)], prompt[-1:])
    token = model.logits(state).argmax(-1)
    assert token.tolist() == [successor[31]]
    drafts = draft_chain(sequences, token, head.draft_hidden(TargetStates(state)), 6, depth).argmax(-1)
    wanted = []
    for _ in range(depth):
        token = model.logits(sequences.forward([(0, 6 + len(wanted), 1)], token)).argmax(-1)
        wanted.append(int(token))
    assert drafts.tolist() == wanted
    assert wanted[0] == successor[successor[31]]


@pytest.mark.parametrize(
    ("noise", "wanted"), [(0.05, 0.97), (0.08, 0.8), (0.1, 0.6), (0.15, 0.3)], ids=["97", "80", "60", "30"]
)
def test_noise_sets_the_acceptance_of_the_constructed_model(
    noise: float, wanted: float, tmp_path: Path
) -> None:
    models = load_pair(constructed_mimo(tmp_path / "model", noise=noise))
    model, head = models.target, models.draft
    prompt = torch.randint(0, 128, (250,), generator=torch.Generator().manual_seed(0))
    sequences = PagedSequences(models, 1, 250)
    hidden = sequences.forward([(0, 0, 250)], prompt)
    carries = sequences.draft([(0, 1, 249)], prompt[1:], head.draft_hidden(TargetStates(hidden))[:-1])
    is_right = head.logits(carries).argmax(-1) == model.logits(hidden).argmax(-1)[1:]
    assert abs(is_right.double().mean().item() - wanted) < 0.06


@pytest.mark.parametrize("ships_head", [False, True], ids=["none-shipped", "not-wanted"])
def test_a_mimo_without_its_head_is_a_plain_decoder(
    ships_head: bool, tmp_path: Path, tokens: torch.Tensor
) -> None:
    config = mimo_config()
    whole = load_pair(write_folder(tmp_path / "whole", config, random_tensors(config, with_draft_head=True)))
    tensors = random_tensors(config, with_draft_head=ships_head)
    bare = load_pair(write_folder(tmp_path / "bare", config, tensors), with_draft_head=not ships_head)
    assert (bare.draft, len(bare.target.state())) == (None, 3)
    assert (whole.draft is not None, len(whole.target.state())) == (True, 3)
    logits = [
        models.target.logits(PagedSequences(models, 1, 75).forward([(0, 0, 75)], tokens))
        for models in (whole, bare)
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("size", [0.02, 1.0, 40.0])
def test_float8_holds_all_that_the_heads_norm_may_give(size: float, tmp_path: Path) -> None:
    """A vector of one number, which is as large as the norm lets it be, and others."""
    head = load_pair(
        random_mimo(tmp_path / "model"), dtype="float64"
    ).draft  # of float32 lm_head would be packed
    hidden = head.hidden_size
    weight = head.layers[0].final_norm.weight.copy_(torch.linspace(0.1, 1, hidden) * size)
    rows = torch.randn(9, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[0], rows[0, -1] = 0, 1
    carry = rms_norm(rows, weight, 1e-6)
    full = head.logits(carry)
    head.choose_formats("fp8", "full")
    errors = (head.logits(carry) - full).norm(dim=1) / full.norm(dim=1)
    assert bool((errors < 0.06).all()), errors
    assert errors[1:].mean() > 0.005


@pytest.mark.parametrize("size", [0.02, 1.0, 40.0])
def test_a_head_of_float8_drafts_about_the_same(size: float, tmp_path: Path) -> None:
    """Whatever is paired; of prompts' tokens, too, whose keys and values the drafts read."""
    folder = random_mimo(tmp_path / "model")
    pairs = [load_pair(folder, dtype="float64") for _ in range(2)]
    carries, drafts = [], []
    tokens = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(0))
    for models in pairs:
        head = models.draft
        head.layers[0].hidden_norm.weight.mul_(size)
        head.layers[0].token_norm.weight.mul_(size)
        num_linears = len(list(models.linears()))
        if models is pairs[1]:
            rounded = head.norms_by_linear()
            head.choose_formats("full", "fp8")
            assert [linear.input_step is not None for linear in rounded] == [True] * 3
            assert len(list(models.linears())) == num_linears
        sequences = PagedSequences(models, 1, 64)
        hidden = head.draft_hidden(TargetStates(sequences.forward([(0, 0, 40)], tokens)))
        carry = sequences.draft([(0, 1, 39)], tokens[1:], hidden[:-1])
        carries.append(carry)
        drafts.append(draft_chain(sequences, tokens[:1], hidden[-1:], 40, 1))
    full, rounded_carry = carries
    errors = (rounded_carry - full).norm(dim=1) / full.norm(dim=1)
    assert errors.max() < 0.3
    assert 0.005 < errors.mean() < 0.1, "they are rounded, no more"
    torch.testing.assert_close(drafts[1], drafts[0], rtol=0.3, atol=0.3 * float(drafts[0].std()))


@pytest.mark.parametrize("sizes", [(0.02, 1, 40, 5), (40, 0.02, 0.5, 300)], ids=str)
def test_each_product_takes_all_that_its_norm_may_give(sizes: tuple[float, ...], tmp_path: Path) -> None:
    whole = load_pair(
        random_mimo(tmp_path / "model"), dtype="float64"
    ).draft  # of float32 weights would be packed
    head, block = whole.layers[0], whole.layers[0].block
    norms = (head.hidden_norm, head.token_norm, block.input_norm, block.feed_forward_norm)
    for norm, size in zip(norms, sizes, strict=True):
        norm.weight.copy_(torch.linspace(-1, 0.5, len(norm.weight)) * size)
    whole.choose_formats("full", "fp8")
    bounds = {head.input: max(sizes[:2]), block.mixer.input: sizes[2], block.feed_forward.input: sizes[3]}
    for linear, bound in bounds.items():
        assert linear.input_step is not None
        largest = bound * whole.hidden_size**0.5
        assert 224 < largest / linear.input_step.item() <= 448, "the least power of two that holds it"


def bytes_of(values: object) -> int:
    """Of the tensors of a weight, with those of weights in it, each once."""
    if isinstance(values, torch.Tensor):
        return values.nbytes
    return sum(map(bytes_of, values)) if isinstance(values, tuple) else 0


@pytest.mark.parametrize("layers", ["full", "fp8"])
@pytest.mark.parametrize("lm_head", ["full", "fp8", "int4"])
def test_the_bytes_of_other_formats_are_known_before(lm_head: str, layers: str, tmp_path: Path) -> None:
    models = load_pair(random_mimo(tmp_path, hidden_size=256, num_nextn_predict_layers=2), dtype="bfloat16")
    model, head = models.target, models.draft
    linears = [*head.linears(), model.lm_head]
    before = sum(linear.weight.nbytes for linear in linears)
    promised = models.outline().draft.added_bytes(lm_head, layers)
    head.choose_formats(lm_head, layers)
    after = sum(bytes_of(linear.stored) for linear in head.linears())
    after += model.lm_head.weight.nbytes
    if lm_head == "fp8":
        after += bytes_of(head._draft_lm_head.stored)
    elif lm_head == "int4":
        after += (
            bytes_of(head._draft_lm_head.stored) - model.lm_head.weight.nbytes
        )  # the exact one is the model's
    assert promised == after - before
