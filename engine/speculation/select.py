"""Finds the drafter that a configuration names, declares its state, and makes it."""

from __future__ import annotations

import logging
from pathlib import Path

from headway.engine.layers.model_pair import MakeDraft, ModelPair
from headway.engine.loading.drafter import maker_of
from headway.engine.models.drafter_folder import drafter_in, read_drafter
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.draft_check import DraftCheck
from headway.engine.protocol.drafters import DRAFTER_TRAITS, JOINED, DrafterName, without_ngrams
from headway.engine.protocol.errors import ConfigError
from headway.engine.scheduling.plan import MAX_PENDING
from headway.engine.speculation import draft_model, mtp, ngram
from headway.engine.speculation.drafter import Drafter, DrafterFamily, NoDrafter
from headway.engine.speculation.joined import with_ngrams
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import StateSpec

DRAFTERS: dict[DrafterName, DrafterFamily] = {
    "mtp": mtp.FAMILY,
    "ngram": ngram.FAMILY,
    "none": DrafterFamily(lambda *_: NoDrafter(), lambda *_: ()),
    "eagle3": mtp.EAGLE3_FAMILY,
    "trained_head": mtp.TRAINED_FAMILY,
    "draft_model": draft_model.FAMILY,
}
DRAFTERS |= {JOINED[name]: with_ngrams(name, family) for name, family in DRAFTERS.items() if name in JOINED}

logger = logging.getLogger(__name__)


def drafter_name(config: EngineConfig, *, has_head: bool) -> DrafterName:
    """Returns the drafter, with auto resolved: "none" at depth 0. has_head: whether the model has an MTP
    head.

    Raises ConfigError if the named head does not exist, or if nothing drafts and speculation is required;
    ModelError for a drafter's folder whose config.json cannot be read.
    """
    name = without_ngrams(config.drafter)
    is_joined = name != config.drafter
    if name == "mtp" and not has_head:
        raise ConfigError(
            f"--drafter is {config.drafter}, but {config.model_path} has no MTP head; use ngram, which drafts for every model, or auto"
        )
    if name == "auto" and config.drafter_path is not None and config.depth > 0:
        name = drafter_in(Path(config.drafter_path))
    elif name == "auto":
        name = "mtp" if has_head else "ngram" if is_joined else "none"
    if config.require_speculation and (config.depth == 0 or name == "none"):
        cause = "--depth is 0" if config.depth == 0 else "--drafter is none"
        if config.depth and config.drafter == "auto":
            cause = f"{config.model_path} has no MTP head"
        raise ConfigError(
            f"--require-speculation is set, but {cause}; use --drafter ngram with a depth of 1 or more, which drafts for every model, or "
            "leave out --require-speculation"
        )
    if config.depth == 0:
        return "none"
    return JOINED[name] if is_joined and name in JOINED else name


def warn_without_head(config: EngineConfig, *, has_head: bool) -> None:
    """Logs that auto finds no drafter although the depth asks for drafts."""
    if config.depth > 0 and config.drafter == "auto" and not has_head:
        logger.warning(
            "up to %d drafts a round are wanted, but %s has no MTP head: it is served without speculation (--drafter ngram drafts for every model, "
            "none silences this line)",
            config.depth, config.model_path,
        )  # fmt: skip


def draft_maker_of(config: EngineConfig, spec: ModelSpec) -> MakeDraft | None:
    """Returns what makes the draft model of the drafter that the configuration names; None: it has none.
    Raises ModelError for a drafter's folder that does not fit the model."""
    if without_ngrams(config.drafter) in ("eagle3", "trained_head", "draft_model"):
        assert config.drafter_path is not None, "the drafter has a folder"
        return maker_of(read_drafter(Path(config.drafter_path), spec, config.drafter_taps))
    return DRAFTERS[config.drafter].make_model


def announced_head(spec: ModelSpec) -> MakeDraft | None:
    """Returns what makes the draft head that config.json announces, whatever drafts; None: there is none."""
    return None if spec.draft_head is None else mtp.FAMILY.make_model


def check_of_missing_head(config: EngineConfig, models: ModelPair) -> DraftCheck:
    """Returns the check of a missing head, if config.json announces one that auto would use; else an empty
    check."""
    announced = models.target.spec.draft_head
    is_wanted = config.depth > 0 and without_ngrams(config.drafter) == "auto"
    if not is_wanted or announced is None or models.draft is not None:
        return DraftCheck()
    reason = (
        f"config.json announces an MTP head of {announced.num_layers} layers, the weights have none that can be used: they were "
        "converted without it, or its tensors have names of another family"
    )
    return DraftCheck(state="missing", reason=reason)


def drafter_state(config: EngineConfig, models: ModelPair) -> tuple[StateSpec, ...]:
    """Declares the state of the drafter by block and by row. The configuration names its drafter."""
    return DRAFTERS[config.drafter].state(models, max_pending(config))


def max_pending(config: EngineConfig) -> int:
    """Returns the most pairs of a row that wait for its drafter. The configuration names its drafter."""
    return max(config.depth + 1, MAX_PENDING if DRAFTER_TRAITS[config.drafter].leaves_pending else 0)


def new_drafter(config: EngineConfig, models: ModelPair, pool: StatePool, rows: RowTensors) -> Drafter:
    """Returns the drafter that the configuration names, bound to these."""
    return DRAFTERS[config.drafter].make(models, pool, rows, config.depth)
