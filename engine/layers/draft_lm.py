"""A whole model as the layers of a drafter: it reads tokens alone."""

from __future__ import annotations

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.decoder import run_layers
from headway.engine.layers.experts import Experts
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.weights import draft_format_bytes, draft_lm_head, round_layers
from headway.engine.layers.work import Work
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import DraftLayers, DraftLmHead
from headway.engine.state.pool import StatePool
from headway.engine.state.specs import StateSpec


class DraftLM:
    """A DraftModel, whose methods are explained there. Slot i of its KV cache holds token t_i, from 0 on.

    Mutable: `choose_formats` changes the formats of the weights, once, after loading.
    """

    num_layers = 1  # each predicts one token

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    @classmethod
    def of(cls, spec: ModelSpec, target: CausalLM, place: Placement) -> DraftLM:
        """Returns a draft model of the spec with parameters that are not initialised; it shares none with the
        target."""
        return cls(CausalLM(spec, place))

    @property
    def lm_head_shape(self) -> tuple[int, int]:
        return self._model.spec.vocab_size, self._model.spec.hidden_size

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"draft.{path}": tensor for path, tensor in self._model.tensors().items()}

    def linears(self) -> tuple[Linear, ...]:
        return self._model.linears()

    def state(self, max_window: int) -> tuple[tuple[StateSpec, ...], ...]:
        return self._model.state(max_window)

    def work(self) -> Work:
        return self._model.work()

    def norms_by_linear(self) -> dict[Linear, tuple[RMSNorm, ...]]:
        found: dict[Linear, tuple[RMSNorm, ...]] = {}
        for layer in self._model.layers:
            found |= layer.norms_by_linear()
        return found

    def choose_formats(self, lm_head: DraftLmHead, layers: DraftLayers) -> None:
        """Changes the formats of lm_head and of the layers of `norms_by_linear`."""
        own = self._model.lm_head
        own.store(draft_lm_head(own, lm_head, largest_input=self._model.final_norm.largest()).stored)
        if layers == "fp8":
            round_layers(self.norms_by_linear())

    def added_bytes(self, lm_head: DraftLmHead, layers: DraftLayers) -> int:
        own, is_tied = self._model.lm_head, self._model.spec.tied
        given_up = own.nbytes if lm_head == "fp8" and not is_tied else 0
        return draft_format_bytes(own, self.norms_by_linear(), lm_head, layers) - given_up

    def experts(self) -> tuple[Experts, ...]:
        return self._model.experts()

    def forward(self, inputs: ForwardInputs, pool: StatePool) -> torch.Tensor:
        """Runs all layers. Returns [tokens, hidden], the last states."""
        stream, layers = self._model.embedded(inputs), self._model.layers
        run_layers(layers, [pool.draft_layer(index) for index in range(len(layers))], stream, inputs)
        return stream.sum()

    def fill_cache(self, inputs: ForwardInputs, pool: StatePool) -> None:
        """Writes the keys and values that `forward` writes, without computing its result."""
        stream, layers = self._model.embedded(inputs), self._model.layers
        states = [pool.draft_layer(index) for index in range(len(layers))]
        run_layers(layers[:-1], states[:-1], stream, inputs)
        layers[-1].update_state(stream, inputs, states[-1])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden], last states. Returns [n, vocab]."""
        return self._model.logits(hidden)
