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
    """The layers of a drafter that have weights, as far as loading, memory sizes and formats are concerned.
    Their drafter runs them."""

    @property
    def num_layers(self) -> int:
        """Returns the number of layers that each predict one token."""
        ...

    @property
    def lm_head_shape(self) -> tuple[int, int]:
        """Returns (outputs, inputs) of the output layer of drafts, over all ranks."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters that it does not share with the target, by path, as `CausalLM.tensors`
        does."""
        ...

    def linears(self) -> tuple[Linear, ...]:
        """Returns the linear layers that it does not share with the target."""
        ...

    def experts(self) -> tuple[Experts, ...]:
        """Returns every mixture of experts once."""
        ...

    def state(self, max_window: int) -> tuple[tuple[StateSpec, ...], ...]:
        """Declares the state of each layer between steps, as `CausalLM.state` does."""
        ...

    def work(self) -> Work:
        """Returns the products of a token with the weights of every layer once, lm_head excluded."""
        ...

    def norms_by_linear(self) -> dict[Linear, tuple[RMSNorm, ...]]:
        """Returns each linear layer whose input is the output of norms, with these norms."""
        ...

    def choose_formats(self, lm_head: DraftLmHead, layers: DraftLayers) -> None:
        """Converts the weights that drafts read to their formats, once, after loading."""
        ...

    def added_bytes(self, lm_head: DraftLmHead, layers: DraftLayers) -> int:
        """Returns the further bytes that `choose_formats` takes; negative if it frees some."""
        ...


# Makes a draft model for a target, which may share parameters with it. Its own ones are not initialised.
MakeDraft = Callable[[CausalLM, Placement], DraftModel]


class ModelPair:
    """draft: None if there is no drafter, or one without weights. The pool stores the state of the target's
    layers, then that of the draft model's."""

    def __init__(self, spec: ModelSpec, place: Placement, make_draft: MakeDraft | None = None) -> None:
        """Makes both with parameters that are not initialised. Raises ModelError for a spec that says what no
        layer computes."""
        self.target = CausalLM(spec, place)
        self.draft = None if make_draft is None else make_draft(self.target, place)
        self._make_draft = make_draft

    def outline(self, group: Group | None = None) -> ModelPair:
        """Returns the same models without memory. group: the ranks that share them; None: the same ones."""
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
        """Returns the bytes that integer weights save on a CPU while they are loaded: each layer is converted
        as soon as it is loaded, so that the largest one is dense for a time."""
        layers: list[Linear | Experts] = [*self.linears(), *self.experts()]
        saved = sum(layer.saved_bytes(cpu_weights) for layer in layers)
        return max(saved - max(layer.own_bytes for layer in layers), 0)

    @property
    def active_weights(self) -> int:
        """Returns the number of weights of both that multiply a token, lm_head included."""
        weights = sum(model.work().active_weights for model in self._models())
        return weights + self.target.lm_head.num_weights

    def _models(self) -> tuple[CausalLM | DraftModel, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)
