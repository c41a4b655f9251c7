"""A multi-token prediction head. Each of its layers has a projection of a hidden state and a token, one
decoder layer, and a norm.

Its MtpSpec says which of the two comes first, which hidden state is read, and which is carried on. Slot i of
layer 0's KV cache holds the pair (h_{i-1}, t_i), which predicts t_{i+1}. Slot i of layer k > 0 holds the pair
of layer k - 1's carry at slot i - 1 and t_i. So the slots of layer k begin at k + 1.
"""

from __future__ import annotations

import torch

from headway.engine.layers.causal_lm import CausalLM, TargetStates
from headway.engine.layers.decoder import DecoderLayer
from headway.engine.layers.experts import Experts
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm, normed_side_by_side
from headway.engine.layers.placement import Placement
from headway.engine.layers.rotary import RotaryTables
from headway.engine.layers.soft_cap import soft_capped
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.weights import draft_format_bytes, draft_lm_head, round_layers
from headway.engine.layers.work import Work
from headway.engine.models.spec import LayerSpec, ModelSpec, MtpSpec
from headway.engine.protocol.config import DraftLayers, DraftLmHead
from headway.engine.state.pool import StatePool
from headway.engine.state.specs import StateSpec


class MtpLayer:
    """One layer of the head. Mutable: see `MtpHead.choose_formats`."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerSpec,
        index: int,  # among the layers of the head
        place: Placement,
        tables: RotaryTables,
    ) -> None:
        hidden = spec.hidden_size
        self.hidden_norm = RMSNorm.empty(hidden, spec.norm, place)
        self.token_norm = RMSNorm.empty(hidden, spec.norm, place)
        self.input = place.linear({"input": hidden}, 2 * hidden)
        self.block = DecoderLayer.of(spec, layer, place, tables, first_position=index + 1)
        self.final_norm = RMSNorm.empty(hidden, spec.norm, place)

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns the parameters by their paths."""
        return {
            f"{prefix}hidden_norm": self.hidden_norm.weight,
            f"{prefix}token_norm": self.token_norm.weight,
            **{prefix + path: tensor for path, tensor in self.input.tensors().items()},
            f"{prefix}final_norm": self.final_norm.weight,
            **self.block.tensors(prefix),
        }

    def linears(self) -> tuple[Linear, ...]:
        """Returns every linear layer once."""
        return self.input, *self.block.linears()

    def norms_by_linear(self) -> dict[Linear, tuple[RMSNorm, ...]]:
        """Returns each linear layer whose input is the output of norms, with these norms."""
        return {self.input: (self.hidden_norm, self.token_norm), **self.block.norms_by_linear()}


class MtpHead:
    """The MTP layers that a model's spec announces, or those of a folder of their own, with the model's
    embedding: a DraftModel, whose methods are explained there.

    draft_ids: [draft vocab] int64, the target's id of each token of an output layer of its own; None: it has
    the model's. Mutable: `choose_formats` changes the formats of the weights that drafts read, once, after
    loading.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, target: CausalLM, place: Placement, own: MtpSpec | None = None) -> None:
        """own: of a head in a folder of its own; None: the head that the model's spec announces."""
        spec, head = target.spec, own or target.spec.draft_head
        self.hidden_size, self.vocab_size, self.dtype = spec.hidden_size, spec.vocab_size, target.dtype
        assert head is not None, "the family announces no MTP head"
        self.spec = head
        self._residual_scale, self._embedding_scale = spec.residual_scale, spec.embedding_scale
        self._logit_soft_cap, self._group = spec.logit_soft_cap, place.group
        self._embedding, self._target_norm = target.embedding, target.final_norm
        self.layers = [
            MtpLayer(spec, head.layer, index, place, target.tables) for index in range(head.num_layers)
        ]
        self._lm_head = target.lm_head
        self.draft_ids: torch.Tensor | None = None
        if head.draft_vocab_size is not None:
            self._lm_head = place.linear({"lm_head": head.draft_vocab_size}, self.hidden_size)
            self.draft_ids = torch.arange(head.draft_vocab_size, device=place.device)
        self._draft_lm_head = self._lm_head

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def lm_head_shape(self) -> tuple[int, int]:
        return self.spec.draft_vocab_size or self.vocab_size, self.hidden_size

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {
            path: tensor
            for index, layer in enumerate(self.layers)
            for path, tensor in layer.tensors(f"mtp.{index}.").items()
        }
        return found | {f"mtp.{path}": t for own in self._own_lm_head() for path, t in own.tensors().items()}

    def state(self, max_window: int) -> tuple[tuple[StateSpec, ...], ...]:
        return tuple(layer.block.state(max_window) for layer in self.layers)

    def linears(self) -> tuple[Linear, ...]:
        return *(linear for layer in self.layers for linear in layer.linears()), *self._own_lm_head()

    def mask(self) -> None:
        """Returns None: drafts are made one after the other."""

    def experts(self) -> tuple[Experts, ...]:
        found = (layer.block.feed_forward for layer in self.layers)
        return tuple(block for block in found if isinstance(block, Experts))

    def work(self) -> Work:
        parts = (work for layer in self.layers for work in (Work.of([layer.input]), layer.block.work()))
        return Work.in_turn(parts)

    def draft_hidden(self, states: TargetStates) -> torch.Tensor:
        """states: those of n tokens. Returns [n, hidden]: the input of the head."""
        return states.last if self.spec.reads == "pre_norm" else self._target_norm(states.last)

    def draft(
        self, inputs: ForwardInputs, hidden: torch.Tensor, pool: StatePool, index: int = 0
    ) -> torch.Tensor:
        """Runs one MTP layer over pairs: token t_i of `inputs` at position i, and hidden of i - 1.

        hidden: [tokens, hidden], of `draft_hidden` for layer 0, the carry of layer index - 1 for the others,
        or the last layer's own carry. Returns the carry, [tokens, hidden]. Positions up to index have no
        pair, and no token attends to them.
        """
        layer = self.layers[index]
        stream = self._stream(layer, hidden, inputs.token_ids)
        layer.block(stream, inputs, pool.draft_layer(index))
        if self.spec.carries == "pre_norm":
            return stream.sum()
        return stream.normed(layer.final_norm).values

    def logits(self, carry: torch.Tensor, index: int = 0) -> torch.Tensor:
        """carry: [n, hidden] of `draft` with the same index. Returns [n, vocab or draft vocab], for the token
        at position i + 1."""
        if self.spec.carries == "pre_norm":
            carry = self.layers[index].final_norm(carry)
        return self._group.gather(soft_capped(self._draft_lm_head(carry), self._logit_soft_cap))

    def fill_cache(
        self, inputs: ForwardInputs, hidden: torch.Tensor, pool: StatePool, index: int = 0
    ) -> None:
        """Writes the keys and values that `draft` writes, without computing its result."""
        layer = self.layers[index]
        stream = self._stream(layer, hidden, inputs.token_ids)
        layer.block.update_state(stream, inputs, pool.draft_layer(index))

    def norms_by_linear(self) -> dict[Linear, tuple[RMSNorm, ...]]:
        return {linear: norms for layer in self.layers for linear, norms in layer.norms_by_linear().items()}

    def choose_formats(self, lm_head: DraftLmHead, layers: DraftLayers) -> None:
        """Converts the weights that drafts read: a copy of the output layer, which `logits` uses, and those
        of `norms_by_linear`."""
        largest = max(layer.final_norm.largest() for layer in self.layers)
        self._draft_lm_head = draft_lm_head(self._lm_head, lm_head, largest_input=largest)
        if layers == "fp8":
            round_layers(self.norms_by_linear())

    def added_bytes(self, lm_head: DraftLmHead, layers: DraftLayers) -> int:
        return draft_format_bytes(self._lm_head, self.norms_by_linear(), lm_head, layers)

    def _own_lm_head(self) -> tuple[Linear, ...]:
        return () if self.draft_ids is None else (self._lm_head,)

    def _stream(
        self,
        layer: MtpLayer,
        hidden: torch.Tensor,  # [tokens, hidden]: h_{i-1}, or the carry of slot i - 1
        token_ids: torch.Tensor,  # [tokens] int64: t_i
    ) -> ResidualStream:
        both = normed_side_by_side(
            hidden,
            token_ids,
            self._embedding,
            hidden_norm=layer.hidden_norm,
            token_norm=layer.token_norm,
            step=layer.input.input_step,
            embedding_scale=self._embedding_scale,
            hidden_first=self.spec.first == "hidden",
        )
        return ResidualStream(self._group.gather(layer.input(both)), self._residual_scale, self._group)
