"""Loads a drafter from a folder of its own: an EAGLE-3 head, a trained MTP head or a draft model.

The folder describes it completely, except for the device, the dtype and the positions, which are those of the
target.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.draft_lm import DraftLM
from headway.engine.layers.eagle3_head import Eagle3Head
from headway.engine.layers.linear import finish_linears
from headway.engine.layers.model_pair import DraftModel, MakeDraft, ModelPair
from headway.engine.layers.mtp_head import MtpHead
from headway.engine.loading.checkpoint import load_model, make_dummy_model
from headway.engine.loading.eagle3 import draw_head, load_eagle3, open_eagle3
from headway.engine.loading.headers import checked_outline, dtype_name, open_checkpoint
from headway.engine.loading.trained_head import load_trained_head, open_trained_head
from headway.engine.models.drafter_folder import DrafterSpec, read_drafter
from headway.engine.models.eagle3 import Eagle3Spec
from headway.engine.models.spec import ModelSpec, MtpSpec
from headway.engine.protocol.config import CpuWeights


def maker_of(spec: DrafterSpec) -> MakeDraft:
    """Returns the function that makes the layers of the drafter that a folder describes."""
    if isinstance(spec, MtpSpec):
        return partial(MtpHead, own=spec)
    return partial(Eagle3Head, spec) if isinstance(spec, Eagle3Spec) else partial(DraftLM.of, spec)


def load_drafter(
    folder: Path,
    models: ModelPair,
    progress: Callable[[float], None],
    *,
    is_dummy: bool = False,
    cpu_weights: CpuWeights = "full",
    taps: tuple[int, ...] | None = None,
) -> ModelPair:
    """Returns the target with the drafter in the folder. Raises ModelError. progress: called with the
    fraction that is loaded, after each tensor. is_dummy: the weights are drawn at random. cpu_weights: see
    EngineConfig. taps: see `read_drafter`."""
    target = models.target
    spec = read_drafter(folder, target.spec, taps)
    if not isinstance(spec, ModelSpec):
        head: DraftModel
        if is_dummy:
            head, make_head = draw_head(folder, maker_of(spec), target, progress)
        elif isinstance(spec, Eagle3Spec):
            head, make_head = load_eagle3(folder, spec, target, progress)
        else:
            head, make_head = load_trained_head(folder, spec, target, progress)
        finish_linears(head.linears(), cpu_weights)
        return models.with_draft(head, make_head)
    make_model = make_dummy_model if is_dummy else load_model
    loaded = make_model(
        folder,
        device=target.device,
        dtype=dtype_name(target.dtype),
        make_draft=None,
        progress=progress,
        max_model_len=target.spec.max_position_embeddings,
        group=target.group,
        cpu_weights=cpu_weights,
    ).target
    return models.with_draft(DraftLM(loaded), maker_of(loaded.spec))


def checked_maker(
    folder: Path,
    stack: ExitStack,
    target: CausalLM,
    device: torch.device,
    taps: tuple[int, ...] | None = None,
) -> MakeDraft:
    """Checks that every tensor of the drafter is stored in its shape. Returns the function that makes its
    layers. stack: closes the files. device: expands quantised weights. taps: see `read_drafter`. Raises
    ModelError."""
    spec = read_drafter(folder, target.spec, taps)
    if isinstance(spec, Eagle3Spec):
        return maker_of(open_eagle3(folder, spec, stack, target, device)[1])
    if isinstance(spec, MtpSpec):
        open_trained_head(folder, spec, stack, target)
        return maker_of(spec)
    found = open_checkpoint(
        folder, stack, device=device, dtype=dtype_name(target.dtype), make_draft=None,
        max_model_len=target.spec.max_position_embeddings,
    )  # fmt: skip
    checked_outline(found)
    return maker_of(found.spec)
