"""A decoder layer, the protocol of its mixer, and the pass through a list of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from headway.engine.layers.attention import Attention
from headway.engine.layers.delta_net import DeltaNet
from headway.engine.layers.experts import Experts
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.layers.mlp import GatedMlp
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.rotary import RotaryTables
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.work import Work
from headway.engine.models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
)
from headway.engine.state.specs import LayerState, StateSpec
from headway.kernels import Activation


class Mixer(Protocol):
    """A layer that mixes the tokens of a sequence: attention, or a recurrence.

    It declares the state that it keeps between steps, and gets the tensors of that state with each call. It
    reads the residual stream through `input` only and writes to it through `output` only; it does not know
    how these products are fused with the norm before and the addition after them.
    """

    @property
    def input(self) -> Linear: ...

    @property
    def output(self) -> Linear: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """See DecoderLayer."""
        ...

    def linears(self) -> tuple[Linear, ...]:
        """Returns every linear layer once, `input` and `output` among them."""
        ...

    def state(self, max_window: int) -> tuple[StateSpec, ...]:
        """Declares what is kept between steps. max_window: the most tokens of a row in a round."""
        ...

    def work(self) -> Work:
        """Returns the products of a token with weights."""
        ...

    def prompt_flop(self, length: int) -> float:
        """Returns the operations for a prompt of that length besides those of `work`."""
        ...

    def cache_bytes(self, context: float) -> float:
        """Returns the bytes of paged state that a round reads of a row with that many tokens."""
        ...

    def __call__(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> torch.Tensor:
        """x: [tokens, hidden], for `input`. Returns [tokens, in of `output`], which `output` is to
        multiply."""
        ...

    def update_state(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> None:
        """Changes the state as a call does, without computing its result."""
        ...

    def commit(self, inputs: ForwardInputs, accepted: torch.Tensor, state: LayerState) -> None:
        """Sets the state of all layers with such state to the one after the accepted tokens.

        inputs: those of the call. accepted: [rows] int64, the number of accepted tokens of each row. state:
        [layers, ...] by name.
        """
        ...


class FeedForward(Protocol):
    """A layer that computes each token by itself. It reads the residual stream and writes to it, with one
    product or several."""

    @property
    def input(self) -> Linear | None:
        """Returns the only linear layer that multiplies the norm of the stream; None if there are others."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """See DecoderLayer."""
        ...

    def linears(self) -> tuple[Linear, ...]:
        """Returns every linear layer once."""
        ...

    def work(self) -> Work:
        """Returns the products of a token with weights."""
        ...

    def __call__(
        self,
        stream: ResidualStream,
        norm: RMSNorm,
        post_norm: RMSNorm | None = None,
        slot_mapping: torch.Tensor | None = None,  # [tokens] int64; -1: the token's result is not read
    ) -> None:
        """Adds its result for the norm of the stream. post_norm: norms the result before it is added."""
        ...


def _attention(
    spec: AttentionSpec, hidden_size: int, place: Placement, tables: RotaryTables, first_position: int
) -> Mixer:
    return Attention(spec, hidden_size, place, tables, first_position=first_position)


def _delta_net(
    spec: DeltaNetSpec, hidden_size: int, place: Placement, tables: RotaryTables, first_position: int
) -> Mixer:
    return DeltaNet(spec, hidden_size, place)


# The makers of layers by the type of their spec.
MIXERS: dict[type, Callable[..., Mixer]] = {AttentionSpec: _attention, DeltaNetSpec: _delta_net}
FEED_FORWARDS: dict[type, Callable[..., FeedForward]] = {DenseSpec: GatedMlp, ExpertsSpec: Experts}


class DecoderLayer:
    """A mixer, then a feed-forward, each after a norm, added to the residual stream. Their results may be
    normed, too."""

    def __init__(
        self,
        input_norm: RMSNorm,
        mixer: Mixer,
        feed_forward_norm: RMSNorm,
        feed_forward: FeedForward,
        *,
        post_mixer_norm: RMSNorm | None = None,
        post_feed_forward_norm: RMSNorm | None = None,
    ) -> None:
        self.input_norm, self.mixer = input_norm, mixer
        self.feed_forward_norm, self.feed_forward = feed_forward_norm, feed_forward
        self.post_mixer_norm, self.post_feed_forward_norm = post_mixer_norm, post_feed_forward_norm

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        layer: LayerSpec,
        place: Placement,
        tables: RotaryTables,
        *,
        first_position: int = 0,  # earlier positions have no state
    ) -> DecoderLayer:
        """Returns the layer of a spec, with parameters that are not initialised."""
        hidden = spec.hidden_size
        post_mixer, post_feed_forward = (
            None if norm is None else RMSNorm.empty(hidden, norm, place)
            for norm in (layer.post_mixer_norm, layer.post_feed_forward_norm)
        )
        return cls(
            RMSNorm.empty(hidden, spec.norm, place),
            MIXERS[type(layer.mixer)](layer.mixer, hidden, place, tables, first_position),
            RMSNorm.empty(hidden, spec.norm, place),
            FEED_FORWARDS[type(layer.feed_forward)](layer.feed_forward, hidden, place),
            post_mixer_norm=post_mixer,
            post_feed_forward_norm=post_feed_forward,
        )

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns the parameters by their path; parts of a fused parameter are views of it."""
        norms = {
            "input_norm": self.input_norm,
            "post_mixer_norm": self.post_mixer_norm,
            "feed_forward_norm": self.feed_forward_norm,
            "post_feed_forward_norm": self.post_feed_forward_norm,
        }
        own = {path: norm.weight for path, norm in norms.items() if norm is not None}
        own |= self.mixer.tensors() | self.feed_forward.tensors()
        return {prefix + path: tensor for path, tensor in own.items()}

    def linears(self) -> tuple[Linear, ...]:
        return self.mixer.linears() + self.feed_forward.linears()

    def norms_by_linear(self) -> dict[Linear, tuple[RMSNorm, ...]]:
        """Returns each linear layer whose input is the output of norms, with these norms."""
        found: dict[Linear, tuple[RMSNorm, ...]] = {self.mixer.input: (self.input_norm,)}
        reader = self.feed_forward.input
        return found if reader is None else {**found, reader: (self.feed_forward_norm,)}

    def work(self) -> Work:
        return Work.in_turn((self.mixer.work(), self.feed_forward.work()))

    def state(self, max_window: int) -> tuple[StateSpec, ...]:
        """Declares the state of the layer between steps. max_window: see Mixer."""
        return self.mixer.state(max_window)

    def __call__(self, stream: ResidualStream, inputs: ForwardInputs, state: LayerState) -> None:
        mixed = self.mixer(stream.normed(self.input_norm, self.mixer.input), inputs, state)
        stream.add(mixed, self.mixer.output, self.post_mixer_norm)
        norms = self.feed_forward_norm, self.post_feed_forward_norm
        self.feed_forward(stream, *norms, inputs.slot_mapping)

    def update_state(self, stream: ResidualStream, inputs: ForwardInputs, state: LayerState) -> None:
        """Changes the state as a call does, without computing its result."""
        self.mixer.update_state(stream.normed(self.input_norm, self.mixer.input), inputs, state)


def run_layers(
    layers: Sequence[DecoderLayer],
    states: Sequence[LayerState],
    stream: ResidualStream,
    inputs: ForwardInputs,
) -> None:
    """Runs the layers on the stream, one after the other."""
    for layer, state in zip(layers, states, strict=True):
        layer(stream, inputs, state)
