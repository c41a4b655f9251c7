"""A target model and the draft model that is loaded with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Protocol

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.experts import Experts
from headway.engine.layers.group import Group
from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.work import Work
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import CpuWeights, DraftLayers, DraftLmHead
from headway.engine.state.specs import StateSpec


class DraftModel(Protocol):
    """The layers of a drafter that have weights: what loading, sizing and formats ask of them. How they are
    run, their drafter knows."""

    @property
    def num_layers(self) -> int:
        """Returns the number of layers that predict one token each."""
        ...

    @property
    def lm_head_shape(self) -> tuple[int, int]:
        """Returns (outputs, inputs) of the layer by which drafts are picked, of all ranks."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters that are not the target's by their paths, as `CausalLM.tensors` does."""
        ...

    def linears(self) -> tuple[Linear, ...]:
        """Returns the linear layers that are not the target's."""
        ...

    def experts(self) -> tuple[Experts, ...]:
        """Returns every mixture of experts once."""
        ...

    def state(self, max_window: int) -> tuple[tuple[StateSpec, ...], ...]:
        """Declares by layer what is kept between steps, as `CausalLM.state` does."""
        ...

    def work(self) -> Work:
        """Returns the products of a token with the weights of every layer once."""
        ...

    def norms_by_linear(self) -> dict[Linear, tuple[RMSNorm, ...]]:
        """Returns each linear layer whose input is the output of norms, with these norms."""
        ...

    def choose_formats(self, lm_head: DraftLmHead, layers: DraftLayers) -> None:
        """Changes the formats of the weights that drafts read, once, after loading."""
        ...

    def added_bytes(self, lm_head: DraftLmHead, layers: DraftLayers) -> int:
        """Returns the bytes that `choose_formats` takes beside those of the loaded weights."""
        ...


# Makes a draft model for a target, which may lend it parameters; its own are not initialised.
MakeDraft = Callable[[CausalLM, Placement], DraftModel]


class ModelPair:
    """draft: None where nothing drafts, or what drafts has no weights. The pool keeps the state of the
    target's layers, then that of the draft model's."""

    def __init__(self, spec: ModelSpec, place: Placement, make_draft: MakeDraft | None = None) -> None:
        """Makes both with parameters that are not initialised. Raises ModelError for a spec that says what no
        layer computes."""
        self.target = CausalLM(spec, place)
        self.draft = None if make_draft is None else make_draft(self.target, place)
        self._make_draft = make_draft

    def outline(self, group: Group | None = None) -> ModelPair:
        """Returns the same models without memory. group: whose rank has a share of them; None: the same."""
        return self.placed(
            Placement(torch.device("meta"), self.target.dtype, group=group or self.target.group)
        )

    def placed(self, place: Placement) -> ModelPair:
        """Returns models of these shapes whose parameters are not initialised."""
        return ModelPair(self.target.spec, place, self._make_draft)

    def with_draft(self, draft: DraftModel, make_draft: MakeDraft) -> ModelPair:
        """Returns the same target with a draft model. make_draft: makes another of its shape."""
        pair = copy(self)
        pair.draft, pair._make_draft = draft, make_draft
        return pair

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters of both."""
        return {path: tensor for model in self._models() for path, tensor in model.tensors().items()}

    def linears(self) -> Iterable[Linear]:
        """Returns every linear layer of both once."""
        return (linear for model in self._models() for linear in model.linears())

    def experts(self) -> Iterable[Experts]:
        """Returns every mixture of experts of both once."""
        return (experts for model in self._models() for experts in model.experts())

    def saved_by_integers(self, cpu_weights: CpuWeights) -> int:
        """Returns the bytes that all weights take less than dense ones on a CPU when those of each layer are
        brought into their format as soon as they are loaded: the largest are dense until then."""
        layers: list[Linear | Experts] = [*self.linears(), *self.experts()]
        saved = sum(layer.saved_bytes(cpu_weights) for layer in layers)
        return max(saved - max(layer.own_bytes for layer in layers), 0)

    @property
    def active_weights(self) -> int:
        """Returns the number of weights of both that multiply a token, those of lm_head among them."""
        weights = sum(model.work().active_weights for model in self._models())
        return weights + self.target.lm_head.num_weights

    def _models(self) -> tuple[CausalLM | DraftModel, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)
