"""Loads a head that `headway head train` has made, or draws weights of its shape.

A target whose output layer is its embedding lends the head's output layer its rows; else the head has them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.linear import finish_linears
from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.mtp_head import MtpHead
from headway.engine.layers.placement import Placement
from headway.engine.loading.checkpoint import DUMMY_SEED, copy_tensors, draw_tensors
from headway.engine.loading.eagle3 import OFFSETS, made_head, read_draft_ids
from headway.engine.loading.files import DTYPES, open_tensors
from headway.engine.loading.headers import Checkpoint, check_stored
from headway.engine.models.family import WeightNames
from headway.engine.models.registry import FAMILY_OF
from headway.engine.models.spec import ModelSpec
from headway.engine.models.trained_head import read_trained_head
from headway.engine.protocol.config import CpuWeights

LM_HEAD = "lm_head.weight"
NAMES = {
    "hidden_norm": "hidden_norm.weight",
    "token_norm": "token_norm.weight",
    "input.weight": "fc.weight",
    "final_norm": "norm.weight",
}
_LAYER = "layers.{}."


def head_names(target: ModelSpec) -> WeightNames:
    """Returns the names of a head's tensors: those of its layer are as in the target's checkpoint, from
    `layers.` on."""
    patterns = FAMILY_OF[target.architecture].names(target).patterns
    layer = {
        path.removeprefix(_LAYER): _LAYER + name.partition(_LAYER)[2]
        for path, name in patterns.items()
        if path.startswith(_LAYER)
    }
    return WeightNames(
        {f"mtp.{LM_HEAD}": LM_HEAD, **{f"mtp.{{}}.{path}": name for path, name in (NAMES | layer).items()}}
    )


def load_trained_head(
    folder: Path, models: ModelPair, progress: Callable[[float], None], cpu_weights: CpuWeights = "full"
) -> ModelPair:
    """Returns the target with the head in the folder. Raises ModelError. progress: called with the fraction
    that is loaded, after each tensor."""
    target = models.target
    with ExitStack() as stack:
        found, draft_ids = open_trained_head(folder, stack, target)
        make_head = partial(MtpHead, own=read_trained_head(folder, target.spec))
        head = made_head(folder, make_head, target)
        by_name = {found.names.of(path): tensor for path, tensor in head.tensors().items()}
        copy_tensors(found.stored, by_name, target.group.rank, progress)
    assert head.draft_ids is not None, "it has an output layer of its own"
    head.draft_ids.copy_(draft_ids)
    finish_linears(head.linears(), cpu_weights)
    return models.with_draft(head, make_head)


def draw_trained_head(
    folder: Path, models: ModelPair, progress: Callable[[float], None], cpu_weights: CpuWeights = "full"
) -> ModelPair:
    """Returns the target with a head of the shape that the folder's config.json describes, with random
    weights and the target's first ids as its vocabulary. Raises ModelError."""
    target = models.target
    make_head = partial(MtpHead, own=read_trained_head(folder, target.spec))
    head = made_head(folder, make_head, target)
    generator = torch.Generator(target.device).manual_seed(DUMMY_SEED)
    draw_tensors(head.tensors(), {}, generator, progress, unit_offset=target.spec.norm.unit_offset)
    finish_linears(head.linears(), cpu_weights)
    return models.with_draft(head, make_head)


def open_trained_head(folder: Path, stack: ExitStack, target: CausalLM) -> tuple[Checkpoint, torch.Tensor]:
    """Reads config.json, the headers of the weights, and of the weights the ids of the draft tokens alone,
    [draft vocab] int64. stack: closes the files. Raises ModelError for what is missing, unexpected, or of
    another shape or dtype, and for ids that no draft token can have."""
    spec = read_trained_head(folder, target.spec)
    assert spec.draft_vocab_size is not None, "its config.json has the size"
    files = open_tensors(folder, stack)
    found = Checkpoint(
        folder, target.spec, head_names(target.spec), target.dtype, files, files, files, frozenset(), None
    )
    draft_ids = read_draft_ids(found, spec.draft_vocab_size)
    if target.spec.tied:
        lent = files | {LM_HEAD: LentRows(target.embedding, draft_ids)}
        found = replace(found, stored=lent, tensors=lent)
    whole = MtpHead(target, Placement(torch.device("meta"), target.dtype), spec)
    check_stored(found, {found.names.of(path): tensor for path, tensor in whole.tensors().items()}, {OFFSETS})
    return found, draft_ids


@dataclass(frozen=True, slots=True)
class LentRows:
    """The Reader and the Header of rows of a weight that is loaded, or of its shape."""

    weight: torch.Tensor  # [vocab, hidden]
    ids: torch.Tensor  # [draft vocab] int64

    def keys(self) -> list[str]:
        return [LM_HEAD]

    def get_slice(self, name: str) -> LentRows:
        return self

    def get_tensor(self, name: str) -> torch.Tensor:
        return self[:]

    def get_shape(self) -> list[int]:
        return [len(self.ids), self.weight.shape[1]]

    def get_dtype(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.weight.dtype)

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        assert isinstance(places, slice), "rows are lent whole"
        return self.weight[self.ids[places].to(self.weight.device)]
