"""What a spec says is computed or refused, field by field; one layer may differ from the others."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from headway_testing.paged import PagedSequences

from headway.engine.layers.causal_lm import TargetStates
from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.placement import Placement
from headway.engine.models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelSpec,
    MtpSpec,
    NormSpec,
    RopeSpec,
    YarnRopeScaling,
)
from headway.engine.protocol.errors import ModelError
from headway.engine.speculation.select import announced_head

NORM = NormSpec(1e-3)
ROPE = RopeSpec(1e4, 16, Llama3RopeScaling(4.0, 1.0, 4.0, 16))
ATTENTION = AttentionSpec(4, 2, 16, ROPE, 0.25, qk_norm=NormSpec(1e-2))
DELTA = DeltaNetSpec(2, 4, 8, 8, 3, NormSpec(1e-2))
LAYER = LayerSpec(ATTENTION, DenseSpec(48), post_mixer_norm=NORM)
BASE = ModelSpec(
    "MadeUpForCausalLM", 64, 32, (LAYER, LayerSpec(DELTA, DenseSpec(48)), LAYER), NORM, 128, tied=False,
    draft_head=MtpSpec(1, LayerSpec(ATTENTION, DenseSpec(48)), reads="pre_norm"),
)  # fmt: skip
TOKENS = torch.randint(0, 60, (40,), generator=torch.Generator().manual_seed(0))

Change = Callable[[Any], ModelSpec]


def of_last_layer(value: LayerSpec) -> ModelSpec:
    """Only the last layer differs, so that a change shows what that layer itself computes."""
    return replace(BASE, layers=(*BASE.layers[:-1], value))


def of_rope(value: RopeSpec) -> ModelSpec:
    return of_last_layer(replace(LAYER, mixer=replace(ATTENTION, rope=value)))


def of_scaling(value: Any) -> ModelSpec:
    return of_rope(replace(ROPE, scaling=value))


def of_delta(value: DeltaNetSpec) -> ModelSpec:
    return replace(BASE, layers=(LAYER, LayerSpec(value, DenseSpec(48)), LAYER))


# By the type of a spec: one of its kind, what puts it into a model, and another value of each of its fields.
CASES: list[tuple[Any, Change, dict[str, Any]]] = [
    (BASE, lambda spec: spec, {
        "architecture": None, "vocab_size": 70, "hidden_size": 48, "layers": (LAYER,), "norm": NormSpec(1e-1),
        "max_position_embeddings": 64, "tied": True, "residual_scale": 0.5, "embedding_scale": 4.0, "logit_soft_cap": 2.0,
        "draft_head": None, "quantization": None, "named_dtype": "float16",
    }),
    (BASE.draft_head, lambda spec: replace(BASE, draft_head=spec), {
        "num_layers": 2, "layer": LAYER, "first": "hidden", "reads": "post_norm", "carries": "pre_norm",
        "draft_vocab_size": 20,
    }),
    (LAYER, of_last_layer, {
        "mixer": DELTA, "feed_forward": DenseSpec(64), "post_mixer_norm": None, "post_feed_forward_norm": NORM,
    }),
    (LAYER.feed_forward, lambda spec: of_last_layer(replace(LAYER, feed_forward=spec)), {
        "intermediate_size": 64, "has_bias": True, "activation": "gelu_tanh",
    }),
    (ExpertsSpec(6, 2, 16), lambda spec: of_last_layer(replace(LAYER, feed_forward=spec)), {
        "num_experts": 5, "top_k": 3, "intermediate_size": 24, "normalises": False, "has_shared_expert": True,
        "activation": "gelu_tanh",
    }),
    (ATTENTION, lambda spec: of_last_layer(replace(LAYER, mixer=spec)), {
        "num_heads": 8, "num_kv_heads": 1, "head_dim": 32, "rope": replace(ROPE, theta=5e3), "scale": 0.5,
        "has_qkv_bias": True, "has_output_bias": True, "qk_norm": None, "sliding_window": 4, "has_output_gate": True,
        "soft_cap": 0.5,
    }),
    (ROPE, of_rope, {"theta": 5e3, "rotary_dim": 8, "scaling": None}),
    (ROPE.scaling, of_scaling, {
        "factor": 8.0, "low_frequency_factor": 0.5, "high_frequency_factor": 8.0, "original_max_positions": 64,
    }),
    (LinearRopeScaling(2.0), of_scaling, {"factor": 4.0}),
    (YarnRopeScaling(4.0, 1.0, 4096, 32.0, 1.0, True), of_scaling, {
        "factor": 8.0, "attention_factor": 1.5, "original_max_positions": 64, "beta_fast": 8.0, "beta_slow": 0.25,
        "truncate": False,
    }),
    (DELTA, of_delta, {
        "num_key_heads": 4, "num_value_heads": 2, "key_dim": 16, "value_dim": 16, "kernel_size": 4, "norm": NORM,
    }),
    (DELTA.norm, lambda spec: of_delta(replace(DELTA, norm=spec)), {"epsilon": 1e-1, "unit_offset": True}),
    (NORM, lambda spec: replace(BASE, norm=spec), {"epsilon": 1e-1, "unit_offset": True}),
]  # fmt: skip


def computed(spec: ModelSpec) -> list[torch.Tensor | int]:
    """Returns what shows of a model with weights that depend on their paths alone: logits, drafts, sizes."""
    place = Placement(torch.device("cpu"), torch.float64)
    models = ModelPair(spec, place, announced_head(spec))
    model, head = models.target, models.draft
    shown: list[torch.Tensor | int] = [model.rotary_bytes, len(models.tensors())]
    for path, tensor in models.tensors().items():
        flat = torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(zlib.crc32(path.encode())))
        tensor.copy_(flat.view(tensor.shape) / 4)
    if head is None:
        return shown
    sequences = PagedSequences(models, 1, len(TOKENS))
    spans = [(0, 0, len(TOKENS))]
    hidden = sequences.forward(spans, TOKENS)
    carry = sequences.draft(spans, TOKENS, head.draft_hidden(TargetStates(hidden)))
    return [*shown, model.logits(hidden), head.logits(carry), carry]


def is_equal(first: list[torch.Tensor | int], second: list[torch.Tensor | int]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else one == other
        for one, other in zip(first, second, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "place_in", "changes"), CASES, ids=[type(case[0]).__name__ for case in CASES]
)
def test_each_field_is_computed_or_refused(value: Any, place_in: Change, changes: dict[str, Any]) -> None:
    assert {field.name for field in fields(value)} == changes.keys(), "each field has another value here"
    base, unseen = computed(place_in(value)), []
    for name, other in changes.items():
        if name in ("architecture", "quantization", "named_dtype"):
            continue  # the name of the model's family, and how its weights are stored
        try:
            if is_equal(computed(place_in(replace(value, **{name: other}))), base):
                unseen.append(name)
        except ModelError:
            continue
    assert unseen == []


def test_every_kind_of_spec_has_its_case() -> None:
    def kinds(value: Any) -> set[type]:
        own = {type(value)} if is_dataclass(value) else set()
        inner = (
            value
            if isinstance(value, tuple)
            else [getattr(value, f.name) for f in fields(value)]
            if own
            else []
        )
        return own.union(*map(kinds, inner))

    assert kinds(BASE) | {ExpertsSpec, LinearRopeScaling, YarnRopeScaling} == {
        type(case[0]) for case in CASES
    }


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (of_last_layer(replace(LAYER, mixer=replace(ATTENTION, sliding_window=0))), "sliding window of 0"),
        (of_last_layer(replace(LAYER, mixer=replace(ATTENTION, sliding_window=-1))), "sliding window of -1"),
        (of_last_layer(replace(LAYER, mixer=replace(ATTENTION, soft_cap=-30.0))), "soft cap of -30"),
        (replace(BASE, logit_soft_cap=-1.0), "soft cap of -1"),
        (replace(BASE, logit_soft_cap=float("nan")), "soft cap of nan"),
    ],
)
def test_a_value_that_nothing_computes_is_refused(spec: ModelSpec, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        spec.check_computed()
