"""Reads from config.json what a drafter's folder holds: an EAGLE-3 head, a trained MTP head, or a draft model
of a family that is served. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headway.engine.models.eagle3 import Eagle3Spec, read_eagle3_spec
from headway.engine.models.model_files import read_json_object
from headway.engine.models.registry import FAMILY_OF, read_model_spec
from headway.engine.models.spec import ModelSpec, MtpSpec
from headway.engine.models.trained_head import ARCHITECTURE, read_trained_head
from headway.engine.protocol.drafters import DrafterName
from headway.engine.protocol.errors import ModelError

DrafterSpec = Eagle3Spec | MtpSpec | ModelSpec


def drafter_in(folder: Path) -> DrafterName:
    """Returns the kind of drafter that the folder's config.json describes. An unknown one counts as EAGLE-3,
    which `read_drafter` then refuses. Raises ModelError for a file that cannot be read."""
    content = read_json_object(folder / "config.json") or {}
    names = content.get("architectures")
    if names == [ARCHITECTURE]:
        return "trained_head"
    is_served = isinstance(names, list) and any(names[:1] == [name] for name in FAMILY_OF)
    return "draft_model" if is_served and "speculators_model_type" not in content else "eagle3"


def read_drafter(folder: Path, target: ModelSpec, taps: tuple[int, ...] | None = None) -> DrafterSpec:
    """Reads config.json. Returns the spec of a head, or that of a draft model with the target's positions.
    taps: of an EAGLE-3 head, instead of those that it says. Raises ModelError for what is wrong, for what is
    not computed, and for what does not fit the target."""
    kind = drafter_in(folder)
    if kind == "eagle3":
        return read_eagle3_spec(folder, target, taps)
    if taps is not None:
        what = "trained head" if kind == "trained_head" else "draft model"
        raise ModelError(f"--drafter-taps is for EAGLE-3 heads, {folder} has a {what}; leave it out")
    if kind == "trained_head":
        return read_trained_head(folder, target)
    spec = read_model_spec(folder)
    if spec.vocab_size != target.vocab_size:
        raise ModelError(
            f"{folder / 'config.json'}: vocab_size is {spec.vocab_size:,}, the model has {target.vocab_size:,}; give a draft model "
            "with the same vocabulary"
        )
    if spec.prompt_grid is not None:
        raise ModelError(
            f"{folder}: {spec.architecture} has recurrent layers, whose state a draft would change; give a draft model "
            "with attention in every layer"
        )
    return replace(spec, max_position_embeddings=target.max_position_embeddings)
