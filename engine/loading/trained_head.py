"""Loads a head that `headway head train` has made.

If the target's output layer is its embedding, the rows of the head's output layer are copied from there;
otherwise they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.model_pair import MakeDraft
from headway.engine.layers.mtp_head import MtpHead
from headway.engine.layers.placement import Placement
from headway.engine.loading.eagle3 import OFFSETS, fill_head, made_head, read_draft_ids
from headway.engine.loading.files import open_tensors
from headway.engine.loading.headers import Checkpoint, check_stored, headers_of
from headway.engine.models.family import WeightNames
from headway.engine.models.registry import FAMILY_OF
from headway.engine.models.spec import ModelSpec, MtpSpec

LM_HEAD = "lm_head.weight"
_LENT = f"mtp.{LM_HEAD}"  # by its path, where the target lends it
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
        {_LENT: LM_HEAD, **{f"mtp.{{}}.{path}": name for path, name in (NAMES | layer).items()}}
    )


def load_trained_head(
    folder: Path, spec: MtpSpec, target: CausalLM, progress: Callable[[float], None]
) -> tuple[MtpHead, MakeDraft]:
    """Returns the head in the folder, which the spec describes, and a function that makes others of its
    shape. Raises ModelError. progress: called with the loaded fraction after each tensor."""
    make_head = partial(MtpHead, own=spec)
    with ExitStack() as stack:
        found, draft_ids = open_trained_head(folder, spec, stack, target)
        head = made_head(folder, make_head, target)
        parameters = head.tensors()
        lent = parameters.pop(_LENT) if target.spec.tied else None
        fill_head(parameters, headers_of(found, parameters), target, progress)
    assert head.draft_ids is not None, "it has an output layer of its own"
    head.draft_ids.copy_(draft_ids)
    if lent is not None:
        lent.copy_(target.embedding[head.draft_ids[target.group.rank * len(lent) :][: len(lent)]])
    return head, make_head


def open_trained_head(
    folder: Path, spec: MtpSpec, stack: ExitStack, target: CausalLM
) -> tuple[Checkpoint, torch.Tensor]:
    """Reads the headers of the weights. Returns them, and the ids of the draft tokens, [draft vocab] int64,
    which are the only values that are read. stack: closes the files. Raises ModelError for what is missing,
    unexpected, or of another shape or dtype, and for ids that no draft token can have."""
    assert spec.draft_vocab_size is not None, "its config.json has the size"
    files, names = open_tensors(folder, stack), head_names(target.spec)
    found = Checkpoint(folder, target.spec, names, target.dtype, files, files, files, frozenset(), None)
    whole = MtpHead(target, Placement(torch.device("meta"), target.dtype), spec)
    check_stored(found, _stored_of(whole, found), {OFFSETS})
    return found, read_draft_ids(found, spec.draft_vocab_size)


def _stored_of(head: MtpHead, found: Checkpoint) -> dict[str, torch.Tensor]:
    """Returns the parameters that the folder stores, by name."""
    lent = _LENT if found.spec.tied else None
    return {found.names.of(path): tensor for path, tensor in head.tensors().items() if path != lent}
