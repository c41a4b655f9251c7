"""An EAGLE-3 head (arXiv:2503.01840): a projection of the target's residual stream at several layers, then
layers of a decoder that draft over a vocabulary of their own.

The pair (x_{i-1}, t_i) of slot i predicts t_{i+1}: x is the projection of what the target computed for the
token before t_i, or, where that token is a draft, the carry of slot i - 1. So slots begin at 1, as those of
an MTP head do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.layers.attention import Attention
from headway.engine.layers.causal_lm import CausalLM, TargetStates
from headway.engine.layers.decoder import DecoderLayer, run_layers
from headway.engine.layers.experts import Experts
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.layers.mlp import GatedMlp
from headway.engine.layers.norm import RMSNorm, normed_side_by_side
from headway.engine.layers.placement import Placement
from headway.engine.layers.rotary import RotaryTables
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.weights import draft_format_bytes, draft_lm_head, round_layers
from headway.engine.layers.work import Work
from headway.engine.models.eagle3 import Eagle3Spec
from headway.engine.models.spec import AttentionSpec, DenseSpec
from headway.engine.protocol.config import DraftLayers, DraftLmHead
from headway.engine.state.pool import StatePool
from headway.engine.state.specs import LayerState, StateSpec
from headway.kernels import Activation

FIRST_POSITION = 1


class Eagle3Layer:
    """The first layer, whose attention reads two normed vectors: the embedded token and the carry."""

    def __init__(self, spec: Eagle3Spec, place: Placement, tables: RotaryTables) -> None:
        decoder = spec.decoder
        hidden, layer = decoder.hidden_size, decoder.layers[0]
        assert isinstance(layer.mixer, AttentionSpec), layer.mixer
        assert isinstance(layer.feed_forward, DenseSpec), layer.feed_forward
        self._norms_residual = spec.norms_residual
        self.token_norm = RMSNorm.empty(hidden, decoder.norm, place)
        self.hidden_norm = RMSNorm.empty(hidden, decoder.norm, place)
        self.attention = Attention(
            layer.mixer, hidden, place, tables, first_position=FIRST_POSITION, input_size=2 * hidden
        )
        self.feed_forward_norm = RMSNorm.empty(hidden, decoder.norm, place)
        self.feed_forward = GatedMlp(layer.feed_forward, hidden, place)

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns the parameters by their paths."""
        own = {
            "input_norm": self.token_norm.weight,
            "hidden_norm": self.hidden_norm.weight,
            "feed_forward_norm": self.feed_forward_norm.weight,
            **self.attention.tensors(),
            **self.feed_forward.tensors(),
        }
        return {prefix + path: tensor for path, tensor in own.items()}

    def both_normed(
        self,
        hidden: torch.Tensor,  # [tokens, hidden]
        token_ids: torch.Tensor,  # [tokens] int64
        embedding: torch.Tensor,  # [vocab, hidden]
    ) -> Activation:
        """Returns the normed embeddings and hidden states side by side, [tokens, 2 * hidden]."""
        both = normed_side_by_side(
            hidden,
            token_ids,
            embedding,
            hidden_norm=self.hidden_norm,
            token_norm=self.token_norm,
            step=self.attention.input.input_step,
        )
        return Activation(both)

    def residual(
        self,
        hidden: torch.Tensor,  # [tokens, hidden]
    ) -> torch.Tensor:
        """Returns the residual stream of the layer, [tokens, hidden], in memory of its own."""
        return self.hidden_norm(hidden) if self._norms_residual else hidden.clone()


class Eagle3Head:
    """A DraftModel, whose methods are explained there. Its parameters are in a folder of their own; it may
    share the target's embedding.

    draft_ids: [draft vocab] int64, the target's id of each token that it drafts. taps, other_taps: see
    Eagle3Spec. Mutable: `choose_formats` changes the formats of the weights, once, after loading, and
    `probe.settle_taps` the taps, before steps are captured.
    """

    num_layers = 1  # that predict one token each

    def __init__(self, spec: Eagle3Spec, target: CausalLM, place: Placement) -> None:
        decoder, tables = spec.decoder, target.tables
        hidden, num_taps, tapped = decoder.hidden_size, len(spec.taps), spec.target_hidden_size
        self._spec, self._group = spec, place.group
        self.hidden_size, self.vocab_size, self.dtype = hidden, decoder.vocab_size, place.dtype
        self.taps, self.other_taps = spec.taps, spec.other_taps
        self._own_embedding = place.empty(decoder.vocab_size, hidden) if spec.has_embedding else None
        self._embedding = target.embedding if self._own_embedding is None else self._own_embedding
        norm_sizes = {"plain": [], "whole_norm": [num_taps * tapped], "part_norms": [tapped] * num_taps}
        self.tap_norms = [RMSNorm.empty(size, decoder.norm, place) for size in norm_sizes[spec.fusion]]
        self.input = place.linear({"input": hidden}, num_taps * tapped)
        self.first = Eagle3Layer(spec, place, tables)
        self.others = [
            DecoderLayer.of(decoder, layer, place, tables, first_position=FIRST_POSITION)
            for layer in decoder.layers[1:]
        ]
        self.final_norm = RMSNorm.empty(hidden, decoder.norm, place)
        self.lm_head = place.linear({"lm_head": spec.draft_vocab_size}, hidden)
        self.draft_ids = torch.arange(spec.draft_vocab_size, device=place.device)
        # A head that makes all drafts in one pass reads these instead of the taps of a draft.
        axes = (1,) * (spec.mask_axes - 1)
        self._mask_taps = None if spec.mask_token_id is None else place.empty(*axes, num_taps * tapped)

    @property
    def lm_head_shape(self) -> tuple[int, int]:
        return self._spec.draft_vocab_size, self.hidden_size

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {} if self._own_embedding is None else {"embedding": self._own_embedding}
        own |= {f"tap_norms.{index}.norm": norm.weight for index, norm in enumerate(self.tap_norms)}
        own |= self.input.tensors() | self.first.tensors("layers.0.")
        for index, layer in enumerate(self.others, start=1):
            own |= layer.tensors(f"layers.{index}.")
        own |= {} if self._mask_taps is None else {"mask_taps": self._mask_taps}
        own |= {"final_norm": self.final_norm.weight, **self.lm_head.tensors()}
        return {f"eagle.{path}": tensor for path, tensor in own.items()}

    def linears(self) -> tuple[Linear, ...]:
        first, others = self.first, (linear for layer in self.others for linear in layer.linears())
        return self.input, *first.attention.linears(), *first.feed_forward.linears(), *others, self.lm_head

    def experts(self) -> tuple[Experts, ...]:
        """Returns none: the families of its layers are dense."""
        return ()

    def state(self, max_window: int) -> tuple[tuple[StateSpec, ...], ...]:
        return self.first.attention.state(max_window), *(layer.state(max_window) for layer in self.others)

    def work(self) -> Work:
        first = (Work.of([self.input]), self.first.attention.work(), self.first.feed_forward.work())
        return Work.in_turn((*first, *(layer.work() for layer in self.others)))

    def norms_by_linear(self) -> dict[Linear, tuple[RMSNorm, ...]]:
        first = self.first
        found = {
            first.attention.input: (first.token_norm, first.hidden_norm),
            first.feed_forward.input: (first.feed_forward_norm,),
        }
        for layer in self.others:
            found |= layer.norms_by_linear()
        return found

    def choose_formats(self, lm_head: DraftLmHead, layers: DraftLayers) -> None:
        """Changes the formats of lm_head and of the layers of `norms_by_linear`."""
        rounded = draft_lm_head(self.lm_head, lm_head, largest_input=self.final_norm.largest())
        self.lm_head.store(rounded.stored)
        if layers == "fp8":
            round_layers(self.norms_by_linear())

    def added_bytes(self, lm_head: DraftLmHead, layers: DraftLayers) -> int:
        given_up = self.lm_head.nbytes if lm_head == "fp8" else 0
        return draft_format_bytes(self.lm_head, self.norms_by_linear(), lm_head, layers) - given_up

    def draft_hidden(self, states: TargetStates) -> torch.Tensor:
        """states: those of n tokens, with the taps. Returns [n, hidden]: the input of the head."""
        return self._fused(states.taps)

    def mask(self) -> tuple[int, torch.Tensor] | None:
        """Returns the token and the state, [hidden], that the head reads in place of a draft, if it makes all
        drafts in one pass."""
        if self._mask_taps is None or self._spec.mask_token_id is None:
            return None
        return self._spec.mask_token_id, self._fused(self._mask_taps.view(len(self.taps), 1, -1).unbind())[0]

    def _fused(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """taps: [n, target's hidden] each. Returns [n, hidden]."""
        parts = tuple(taps)
        if self._spec.fusion == "part_norms":
            parts = tuple(norm(part) for norm, part in zip(self.tap_norms, parts, strict=True))
        fused = torch.cat(parts, dim=1)
        if self._spec.fusion == "whole_norm":
            fused = self.tap_norms[0](fused)
        return self._group.gather(self.input(fused))

    def draft(
        self, inputs: ForwardInputs, hidden: torch.Tensor, pool: StatePool, index: int = 0
    ) -> torch.Tensor:
        """Runs the head over pairs: token t_i of `inputs` at position i, and hidden of i - 1.

        hidden: [tokens, hidden], of `draft_hidden`, or the carry of slot i - 1. index: 0, there is one
        prediction. Returns the carry, [tokens, hidden].
        """
        stream = self._after_first(inputs, hidden, pool)
        run_layers(self.others, self._states(pool), stream, inputs)
        if self._spec.carries == "pre_norm":
            return stream.sum()
        return stream.normed(self.final_norm).values

    def logits(self, carry: torch.Tensor, index: int = 0) -> torch.Tensor:
        """carry: [n, hidden] of `draft`. Returns [n, draft vocab], for the token at position i + 1."""
        if self._spec.carries == "pre_norm":
            carry = self.final_norm(carry)
        return self._group.gather(self.lm_head(carry))

    def fill_cache(
        self, inputs: ForwardInputs, hidden: torch.Tensor, pool: StatePool, index: int = 0
    ) -> None:
        """Writes the keys and values that `draft` writes, without computing its result."""
        if not self.others:
            x = self.first.both_normed(hidden, inputs.token_ids, self._embedding)
            self.first.attention.update_state(x, inputs, pool.draft_layer(0))
            return
        stream, states = self._after_first(inputs, hidden, pool), self._states(pool)
        run_layers(self.others[:-1], states[:-1], stream, inputs)
        self.others[-1].update_state(stream, inputs, states[-1])

    def _after_first(
        self,
        inputs: ForwardInputs,
        hidden: torch.Tensor,  # [tokens, hidden]
        pool: StatePool,
    ) -> ResidualStream:
        first = self.first
        x = first.both_normed(hidden, inputs.token_ids, self._embedding)
        stream = ResidualStream(first.residual(hidden), group=self._group)
        stream.add(first.attention(x, inputs, pool.draft_layer(0)), first.attention.output)
        first.feed_forward(stream, first.feed_forward_norm)
        return stream

    def _states(self, pool: StatePool) -> list[LayerState]:
        """Returns the state of the layers after the first."""
        return [pool.draft_layer(index) for index, _ in enumerate(self.others, start=1)]
