"""A multi-token prediction head: a projection of a hidden state and a token, one decoder layer, and a norm.

Which of the two comes first, which hidden state is read and which is carried on, its MtpSpec says. Slot i of its KV cache
holds the pair (h_{i-1}, t_i), which predicts t_{i+1}; slot 0 does not exist.
"""

from __future__ import annotations

import torch

from headway.engine.layers.decoder import DecoderLayer
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.weights import float8_weight, int4_screened_weight
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import DraftLayers, DraftLmHead
from headway.engine.state.pool import BLOCK_HIDDEN, StatePool
from headway.engine.state.specs import BlockSpec, StateSpec


class MtpHead:
    """The MTP layer of a model, with the model's own embedding and output layer.

    Its keys and values are the pool's layer after those of the decoder. Mutable: `choose_formats` changes the
    formats of the weights that drafts read, once, after loading.
    """

    def __init__(
        self,
        spec: ModelSpec,
        place: Placement,
        embedding: torch.Tensor,  # [vocab, hidden], the model's
        lm_head: Linear,  # the model's
        target_norm: RMSNorm,  # the model's final norm
        cos_sin: torch.Tensor,  # [max_position, rotary_dim]
    ) -> None:
        assert spec.mtp is not None, "the family announces no MTP head"
        hidden = spec.hidden_size
        self.spec, self._pool_layer = spec.mtp, len(spec.layers)
        self._residual_scale = spec.residual_scale
        self._embedding, self._lm_head, self._target_norm = embedding, lm_head, target_norm
        self._draft_lm_head = lm_head
        self.hidden_norm = RMSNorm.empty(hidden, spec.norm, place)
        self.token_norm = RMSNorm.empty(hidden, spec.norm, place)
        self.input = Linear(place.empty(hidden, 2 * hidden))
        self.block = DecoderLayer.of(spec, spec.mtp.layer, place, cos_sin, first_position=1)
        self.final_norm = RMSNorm.empty(hidden, spec.norm, place)

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """See CausalLM."""
        return {
            f"{prefix}hidden_norm": self.hidden_norm.weight,
            f"{prefix}token_norm": self.token_norm.weight,
            f"{prefix}input": self.input.weight,
            f"{prefix}final_norm": self.final_norm.weight,
            **self.block.tensors(prefix),
        }

    def state(self) -> tuple[tuple[StateSpec, ...], ...]:
        """Declares by layer of the pool, after those of the decoder, what is kept between steps."""
        return (self.block.state(),)

    def block_state(self) -> tuple[BlockSpec, ...]:
        """Declares what is also kept of each block: the hidden state of its last token."""
        weight = self.final_norm.weight
        return (BlockSpec(BLOCK_HIDDEN, tuple(weight.shape), weight.dtype),)

    def linears(self) -> tuple[Linear, ...]:
        """Returns the linear layers that are not the model's."""
        return self.input, *self.block.linears()

    def draft_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden] of the model's `forward`. Returns [n, hidden]: what the head reads of it."""
        return hidden if self.spec.reads == "pre_norm" else self._target_norm(hidden)

    def draft(self, inputs: ForwardInputs, hidden: torch.Tensor, pool: StatePool) -> torch.Tensor:
        """Runs the MTP layer over pairs: token t_i of `inputs` at position i, and hidden of i - 1.

        hidden: [tokens, hidden], of `draft_hidden` or the carry of an earlier pass. Returns the carry, [tokens, hidden].
        Nothing attends to position 0, which has no pair.
        """
        stream = self._stream(hidden, inputs.token_ids)
        self.block(stream, inputs, pool.layer(self._pool_layer))
        if self.spec.carries == "pre_norm":
            return stream.sum()
        return stream.normed(self.final_norm).values

    def logits(self, carry: torch.Tensor) -> torch.Tensor:
        """carry: [n, hidden] of `draft`. Returns [n, vocab], for the token at position i + 1."""
        if self.spec.carries == "pre_norm":
            carry = self.final_norm(carry)
        return self._draft_lm_head(carry)

    def fill_cache(self, inputs: ForwardInputs, hidden: torch.Tensor, pool: StatePool) -> None:
        """Writes the keys and values that `draft` writes, without computing its result."""
        stream = self._stream(hidden, inputs.token_ids)
        self.block.update_state(stream, inputs, pool.layer(self._pool_layer))

    def norms_by_linear(self) -> dict[Linear, tuple[RMSNorm, ...]]:
        """Returns each linear layer whose input is the output of norms, with these norms."""
        return {
            self.input: (self.hidden_norm, self.token_norm),
            self.block.mixer.input: (self.block.input_norm,),
            self.block.feed_forward.input: (self.block.feed_forward_norm,),
        }

    def choose_formats(self, lm_head: DraftLmHead, layers: DraftLayers) -> None:
        """Changes the formats of the weights that drafts read.

        lm_head "fp8": `logits` multiplies in float8; "int4": with few rows logits are exact where they could be the greatest and
        approximate elsewhere, with more rows in float8. layers "fp8": the layers of `norms_by_linear` multiply in float8, and
        their weights are given up.
        """
        if lm_head in ("fp8", "int4"):
            exact = self._lm_head.weight
            rounded = float8_weight(exact, largest_input=self.final_norm.largest())
            self._draft_lm_head = Linear(
                rounded if lm_head == "fp8" else int4_screened_weight(exact, rounded)
            )
        if layers == "fp8":
            for linear, norms in self.norms_by_linear().items():
                largest = max(norm.largest() for norm in norms)
                linear.store(float8_weight(linear.weight, largest_input=largest))

    def _stream(
        self,
        hidden: torch.Tensor,  # [tokens, hidden]: h_{i-1}, or the carry of slot i - 1
        token_ids: torch.Tensor,  # [tokens] int64: t_i
    ) -> ResidualStream:
        step = self.input.input_step
        dtype = hidden.dtype if step is None else torch.float8_e4m3fn
        both = hidden.new_empty(len(hidden), 2 * hidden.shape[1], dtype=dtype)
        halves = both.chunk(2, dim=1)
        normed_hidden, normed_token = halves if self.spec.first == "hidden" else halves[::-1]
        self.hidden_norm(hidden, step, out=normed_hidden)
        self.token_norm.embedded(token_ids, self._embedding, step, out=normed_token)
        return ResidualStream(self.input(both), self._residual_scale)
