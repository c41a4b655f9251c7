"""A decoder of any family, built from its ModelSpec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.engine.layers.decoder import DecoderLayer, run_layers
from headway.engine.layers.experts import Experts
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.rotary import RotaryTables
from headway.engine.layers.soft_cap import soft_capped
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.work import Work
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import MAX_DEPTH
from headway.engine.state.pool import StatePool
from headway.engine.state.specs import StateSpec


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The hidden states of a forward pass for the output layer and a drafter.

    last: the states before the final norm. taps: the residual stream at the input of some layers, in their
    order.
    """

    last: torch.Tensor  # [tokens, hidden]
    taps: tuple[torch.Tensor, ...] = ()  # [tokens, hidden] each

    def split(self, count: int) -> tuple[TargetStates, TargetStates]:
        """Returns the states of the first tokens and those of the others, in the same memory."""
        first, second = (
            TargetStates(self.last[part], tuple(tap[part] for tap in self.taps))
            for part in (slice(count), slice(count, None))
        )
        return first, second


class CausalLM:
    """A decoder. A row's result does not depend on other rows. Inputs are not changed.

    Immutable once it is loaded, except for the weight formats of its Linear layers.
    """

    def __init__(self, spec: ModelSpec, place: Placement) -> None:
        """Raises ModelError for a spec with features that no layer computes."""
        spec.check_computed()
        self.spec = spec
        self.device, self.dtype, self.group = place.device, place.dtype, place.group
        self.tables = RotaryTables(spec.max_position_embeddings, place)
        self.embedding = place.empty(spec.vocab_size, spec.hidden_size)
        self.layers = [DecoderLayer.of(spec, layer, place, self.tables) for layer in spec.layers]
        self.final_norm = RMSNorm.empty(spec.hidden_size, spec.norm, place)
        if spec.tied:
            own = place.share(spec.vocab_size, "tokens in its vocabulary")
            self.lm_head = Linear(self.embedding.narrow(0, self.group.rank * own, own))
        else:
            self.lm_head = place.linear({"lm_head": spec.vocab_size}, spec.hidden_size)

    @property
    def rotary_bytes(self) -> int:
        """Returns the bytes of the rotary tables, which are no parameters."""
        return self.tables.nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns every parameter once, by its path; the loader writes them in place. Parts of fused
        parameters are views. Weights in other formats than dense are left out."""
        named = {"embedding": self.embedding, "final_norm": self.final_norm.weight}
        for index, layer in enumerate(self.layers):
            named |= layer.tensors(f"layers.{index}.")
        return named | self.lm_head.tensors()

    def state(self, max_window: int = MAX_DEPTH + 1) -> tuple[tuple[StateSpec, ...], ...]:
        """Declares the state of each layer between steps. max_window: the most tokens of a row in a round."""
        return tuple(layer.state(max_window) for layer in self.layers)

    def linears(self) -> tuple[Linear, ...]:
        """Returns every linear layer once."""
        return *(linear for layer in self.layers for linear in layer.linears()), self.lm_head

    def experts(self) -> tuple[Experts, ...]:
        """Returns every mixture of experts once."""
        found = (layer.feed_forward for layer in self.layers)
        return tuple(block for block in found if isinstance(block, Experts))

    def work(self) -> Work:
        """Returns the products of a token with the weights of the layers, lm_head excluded."""
        return Work.in_turn(layer.work() for layer in self.layers)

    def prompt_flop(self, length: int) -> float:
        """Returns the operations of the layers for a prompt of that length besides those of `work`."""
        return sum(layer.mixer.prompt_flop(length) for layer in self.layers)

    def cache_bytes(self, context: float) -> float:
        """Returns the bytes of keys and values that a round reads of a row with that many tokens."""
        return sum(layer.mixer.cache_bytes(context) for layer in self.layers)

    def forward(self, inputs: ForwardInputs, pool: StatePool, taps: Sequence[int] = ()) -> TargetStates:
        """Runs all layers.

        taps: ascending indices of layers, from 1 on; the stream is copied as it enters them, which changes no
        other result.
        """
        assert all(0 < tap < len(self.layers) for tap in taps), (
            f"taps {tuple(taps)} of {len(self.layers)} layers"
        )
        stream = self.embedded(inputs)
        states = [pool.layer(index) for index in range(len(self.layers))]
        tapped, first = [], 0
        for tap in taps:
            run_layers(self.layers[first:tap], states[first:tap], stream, inputs)
            tapped.append(stream.tap())
            first = tap
        run_layers(self.layers[first:], states[first:], stream, inputs)
        return TargetStates(stream.sum(), tuple(tapped))

    def embedded(self, inputs: ForwardInputs) -> ResidualStream:
        """Returns the stream that enters the first layer."""
        return ResidualStream.of_tokens(
            inputs.token_ids,
            self.embedding,
            self.spec.residual_scale,
            embedding_scale=self.spec.embedding_scale,
            group=self.group,
        )

    def commit(self, inputs: ForwardInputs, accepted: torch.Tensor, pool: StatePool) -> None:
        """Sets the layers' state to the one after the accepted tokens.

        inputs: those of `forward`. accepted: [rows] int64, the number of accepted tokens of each row.
        """
        for index, states in pool.kinds():
            self.layers[index].mixer.commit(inputs, accepted, states)

    def no_states(self, count: int) -> torch.Tensor:
        """Returns [count, hidden] zeros as hidden states for warm-up launches."""
        return torch.zeros(count, self.spec.hidden_size, dtype=self.dtype, device=self.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden], the last states of `forward`. Returns [n, vocab]."""
        own = soft_capped(self.lm_head(self.final_norm(hidden)), self.spec.logit_soft_cap)
        return self.group.gather(own)
