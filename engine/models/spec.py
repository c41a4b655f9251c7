"""Describes a model by plain values: the families return them, the layers are built from them.

Imports no torch: the API process reads them, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A root-mean-square norm. unit_offset: it multiplies by 1 + weight (Gemma, Qwen3.5) instead of by weight."""

    epsilon: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Every frequency is divided by the factor (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """YaRN (arXiv:2309.00071). attention_factor: cosines and sines are multiplied by it."""

    factor: float
    attention_factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, half-split, of the first rotary_dim dimensions of each head."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with grouped heads.

    qk_norm: the norm of each head of queries and keys before RoPE, if any. scale: the factor of the scores.
    sliding_window: the number of last tokens that a token attends to; None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm: NormSpec | None = None
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A feed-forward: down(silu(gate(x)) * up(x))."""

    intermediate_size: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: AttentionSpec
    feed_forward: DenseSpec


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """Multi-token prediction layers: each is an input projection of two normed vectors, a decoder layer and a norm.

    Layer k > 0 reads the carry of layer k - 1 and predicts one token further, the only way that is computed;
    drafts beyond the layers repeat the last one on its own carry.
    first: which of the two comes first in the projection's input. reads: the target's hidden state before or after its
    final norm. carries: what the next draft reads, the decoder layer's output before or after the norm.
    """

    num_layers: int
    layer: LayerSpec
    first: Literal["hidden", "embedding"] = "embedding"
    reads: Literal["pre_norm", "post_norm"] = "post_norm"
    carries: Literal["pre_norm", "post_norm"] = "post_norm"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder. residual_scale: the outputs of mixers and feed-forwards are multiplied by it before they are added.

    draft_head: the layers that config.json announces; whether the checkpoint has them, its tensors say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position_embeddings: int
    tied: bool
    residual_scale: float = 1.0
    draft_head: MtpSpec | None = None

    @property
    def attention(self) -> AttentionSpec:
        """The attention of the first layer: all layers have heads of one shape."""
        return self.layers[0].mixer

    @property
    def intermediate_size(self) -> int:
        """The largest of all layers."""
        return max(layer.feed_forward.intermediate_size for layer in self.layers)
