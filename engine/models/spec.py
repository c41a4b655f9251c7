"""Describes a model by plain values: families return them, and layers are built from them.

Imports no torch: the API process reads them, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headway.engine.models.quantization import Quantization
from headway.engine.protocol.errors import ModelError

# Tokens that a delta net computes at once in the chunked form: the size that flash-linear-attention and
# transformers use.
DELTA_NET_GRID = 64


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A root-mean-square norm. unit_offset: it multiplies by 1 + weight (Gemma, Qwen3.5) instead of by
    weight."""

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
    sliding_window: the number of last tokens that a token attends to, itself included; None for all.
    has_output_gate: each query head comes with a gate as long as itself, and its result is multiplied by the
    gate's sigmoid. soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 for as they are.
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
    has_output_gate: bool = False
    soft_cap: float = 0.0

    @property
    def gqa_group_size(self) -> int:
        """Returns the number of query heads that share a head of keys and values."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A gated delta net (arXiv:2412.06464): a recurrence after a causal convolution, with a gated norm of its
    results.

    Each head of queries and keys serves num_value_heads / num_key_heads consecutive heads of values.
    kernel_size: the taps of the convolution. norm: of each head of the results, by a plain weight.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    norm: NormSpec

    @property
    def num_channels(self) -> int:
        """Returns the number of channels of the convolution: all queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A feed-forward: down(activation(gate(x)) * up(x)). activation: gelu_tanh approximates GELU by tanh."""

    intermediate_size: int
    has_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts: gated feed-forwards, of which each token uses the top_k with the highest scores.

    A token's scores are the softmax over all num_experts logits of a router, and its result is the sum of its
    experts' results times their scores. intermediate_size: the size of each expert. normalises: a token's
    top_k scores are divided by their sum. has_shared_expert: each token uses one more expert, whose result is
    multiplied by the sigmoid of a logit of its own.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalises: bool = True
    has_shared_expert: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer. post_mixer_norm, post_feed_forward_norm: the norms of the results of mixer and
    feed-forward before they are added to the residual stream, if there are any."""

    mixer: AttentionSpec | DeltaNetSpec
    feed_forward: DenseSpec | ExpertsSpec
    post_mixer_norm: NormSpec | None = None
    post_feed_forward_norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """Multi-token prediction layers: each is an input projection of two normed vectors, a decoder layer and a
    norm.

    Layer k > 0 reads the carry of layer k - 1 and predicts one token further; further drafts repeat the last
    layer on its own carry. first: which of the two vectors comes first in the projection's input. reads: the
    target's hidden state before or after its final norm. carries: the input of the next draft, which is the
    decoder layer's output before or after the norm. draft_vocab_size: the size of an output layer of its own,
    over some of the target's tokens; None: the target's output layer is used.
    """

    num_layers: int
    layer: LayerSpec
    first: Literal["hidden", "embedding"] = "embedding"
    reads: Literal["pre_norm", "post_norm"] = "post_norm"
    carries: Literal["pre_norm", "post_norm"] = "post_norm"
    draft_vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder. residual_scale: the outputs of mixers and feed-forwards are multiplied by it before they are
    added. embedding_scale: the factor of embedded tokens, rounded to the weights' dtype. logit_soft_cap:
    logits are cap * tanh(logit / cap); 0: they are as they are.

    draft_head: the layers that config.json announces; only its tensors say whether the checkpoint has them.
    quantization: the format of stored weights, None if they are not quantised. named_dtype: the dtype of
    weights that config.json names.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position_embeddings: int
    tied: bool
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_soft_cap: float = 0.0
    draft_head: MtpSpec | None = None
    quantization: Quantization | None = None
    named_dtype: str | None = None

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Returns the attention of each layer that has one, and then that of the draft head's layers."""
        layers = self.layers if self.draft_head is None else (*self.layers, self.draft_head.layer)
        return tuple(layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def prompt_grid(self) -> int | None:
        """Returns the length of the pieces in which recurrent layers compute prompts, which are cut at its
        multiples; None: prompts may be cut anywhere."""
        is_recurrent = any(isinstance(layer.mixer, DeltaNetSpec) for layer in self.layers)
        return DELTA_NET_GRID if is_recurrent else None

    def check_computed(self) -> None:
        """Raises ModelError for features that the layers do not compute."""
        for attention in self.attentions:
            if attention.sliding_window is not None and attention.sliding_window < 1:
                raise ModelError(
                    f"{self.architecture} has a sliding window of {attention.sliding_window} tokens; it must be 1 or more"
                )
        for cap in (self.logit_soft_cap, *(attention.soft_cap for attention in self.attentions)):
            if not 0 <= cap < math.inf:
                raise ModelError(
                    f"{self.architecture} has a soft cap of {cap}; it must be 0, for none, or more"
                )
        for layer in self.layers:
            if isinstance(layer.mixer, DeltaNetSpec) and layer.mixer.norm.unit_offset:
                raise ModelError(
                    f"{self.architecture} has delta nets whose results are normed by 1 + weight; supported is a plain weight"
                )
