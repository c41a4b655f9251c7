"""Outlines of a model and a device without either."""

from __future__ import annotations

import torch

from headway.engine.layers.mtp_head import MtpHead
from headway.engine.loading.headers import outline_of
from headway.engine.models.spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    MtpSpec,
    NormSpec,
    RopeSpec,
)
from headway.engine.outline import DeviceFacts, Outline


def outline(
    *,
    hidden: int = 4096,
    vocab_size: int = 151_680,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    has_draft_head: bool = True,
    sharing: int = 4,
    num_layers: int = 1,
    has_float8: bool = False,
    num_multiprocessors: int = 132,
    available: int = 110 << 30,
) -> Outline:
    """Returns the measures of a 7B on a GPU, without weights or memory."""
    norm, rope = NormSpec(1e-6), RopeSpec(1e6, 128)
    layer = LayerSpec(AttentionSpec(8 * sharing, 8, 128, rope, 0.1), DenseSpec(11_008))
    spec = ModelSpec(
        "MiMoForCausalLM",
        vocab_size,
        hidden,
        (layer,) * num_layers,
        norm,
        32_768,
        tied=False,
        draft_head=MtpSpec(1, layer),
    )
    facts = DeviceFacts(
        torch.device(device), has_float8, "8.0" if device == "cuda" else "-", num_multiprocessors, 4
    )
    return Outline(outline_of(spec, dtype, MtpHead if has_draft_head else None), facts, available)
