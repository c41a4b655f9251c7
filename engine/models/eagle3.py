"""Reads the config.json of an EAGLE-3 head, a drafter in a folder of its own, in both published layouts.

EAGLE-3: arXiv:2503.01840. The original layout (SafeAILab, SpecForge, SGLang) names an architecture such as
LlamaForCausalLMEagle3 and has all keys outermost; that of vLLM's `speculators` has `speculators_model_type`
and its layers under `transformer_layer_config`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.engine.models.config_keys import resolve_config
from headway.engine.models.model_files import is_folder, read_json_object
from headway.engine.models.quantization import KEYS
from headway.engine.models.registry import CONFIG_CLASSES, FAMILY_OF
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.errors import ModelError

# The family that reads the layers of a head, by their model_type.
DECODERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TAP_KEY = "eagle_aux_hidden_state_layer_ids"

Fusion = Literal["plain", "whole_norm", "part_norms"]


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """An EAGLE-3 head for a target: a projection of the target's residual stream at several layers, then
    layers of a decoder, the first of which also reads the embedding of the next token.

    decoder: the spec of its layers, with the target's vocabulary; its positions are not used. taps: the
    target's layers at whose input the stream is read, ascending. other_taps: the meaning of the same ids in
    the other convention; None: the convention is known, or the other one does not fit the target. fusion: the
    norms before the projection: none, one of all taps together, or one for each. norms_residual: the first
    layer adds to the norm of what it reads instead of to that itself. carries: what the next draft reads, the
    layers' sum before or after the final norm. has_embedding: the embedding is its own, not the target's.
    mask_token_id: of a P-EAGLE head (arXiv:2602.01469), which makes all drafts in one pass, the token that
    stands for a draft; None: they are made one after the other. mask_axes: of the stored taps that stand for
    those of a draft.
    """

    decoder: ModelSpec
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    other_taps: tuple[int, ...] | None = None
    fusion: Fusion = "plain"
    norms_residual: bool = False
    carries: Literal["pre_norm", "post_norm"] = "pre_norm"
    has_embedding: bool = False
    mask_token_id: int | None = None
    mask_axes: int = 3


def read_eagle3_spec(folder: Path, target: ModelSpec, taps: tuple[int, ...] | None = None) -> Eagle3Spec:
    """Reads `config.json` of a drafter's folder. taps: replace those of the file. Raises ModelError for
    faults, for features that are not computed, and for a head that does not fit the target."""
    file = folder / "config.json"
    content = read_json_object(file)
    if content is None:
        missing = "has no config.json" if is_folder(folder) else "does not exist"
        raise ModelError(
            f"the drafter's folder {folder} {missing}; give the folder of an EAGLE-3 head or of a draft model"
        )
    keys = _Keys(content, file)
    decoder = _decoder(keys)
    own_hidden, hidden = decoder.hidden_size, target.hidden_size
    read, other = keys.taps(len(target.layers)) if taps is None else (_given(taps, len(target.layers)), None)
    spec = Eagle3Spec(
        decoder=decoder,
        draft_vocab_size=keys.count("draft_vocab_size", decoder.vocab_size),
        target_hidden_size=keys.count("target_hidden_size", own_hidden),
        taps=read,
        other_taps=other,
        fusion=keys.fusion(),
        norms_residual=keys.norms_residual(),
        carries="post_norm" if keys.flag("norm_output") else "pre_norm",
        has_embedding=own_hidden != hidden,
        mask_token_id=keys.mask_token(decoder.vocab_size),
    )
    for name, found, wanted in (
        ("vocab_size", decoder.vocab_size, target.vocab_size),
        ("target_hidden_size (or hidden_size)", spec.target_hidden_size, hidden),
    ):
        if found != wanted:
            raise keys.error(
                f"{name} is {found:,}, the model has {wanted:,}; give a drafter that was trained for this model"
            )
    if spec.draft_vocab_size > decoder.vocab_size:
        raise keys.error(
            f"draft_vocab_size is {spec.draft_vocab_size:,}; it must be at most vocab_size, {decoder.vocab_size:,}"
        )
    return spec


class _Keys:
    """The keys of a config.json outside its decoder, with errors that name the file. Those of `eagle_config`
    override the outermost ones."""

    def __init__(self, content: Mapping[str, object], file: Path) -> None:
        inner = content.get("eagle_config") or {}
        self.content, self.file = content, file
        if not isinstance(inner, dict):
            raise self.error(f"eagle_config is {inner!r}; it must be an object")
        self._inner: dict[str, object] = inner
        kind = content.get("speculators_model_type")
        if kind not in (None, "eagle3", "peagle"):
            raise self.error(f"speculators_model_type is {kind!r}; supported are 'eagle3' and 'peagle'")
        self.is_speculators = kind is not None
        # In the original layout one of these two makes the head a P-EAGLE head.
        of_kind = {None: ("pard_token", "ptd_token_id"), "eagle3": (), "peagle": ("mask_token_id",)}
        self._mask_keys = of_kind[kind]
        if self.flag("use_aux_hidden_state", default=True) is False:
            raise self.error("use_aux_hidden_state is false; supported are heads that read several layers")

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.file}: {what}")

    def _value(self, key: str) -> object:
        inner = self._inner.get(key)
        return self.content.get(key) if inner is None else inner

    def flag(self, key: str, *, default: bool = False) -> bool:
        found = self._value(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.error(f"{key} is {found!r}; it must be true or false")
        return found

    def count(self, key: str, default: int) -> int:
        found = self._value(key)
        if found is None:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.error(f"{key} is {found!r}; it must be a positive integer")
        return found

    def mask_token(self, vocab_size: int) -> int | None:
        """Returns the mask token of a head that makes all drafts in one pass."""
        found = [(key, self._value(key)) for key in self._mask_keys if self._value(key) is not None]
        if not found:
            if self.content.get("speculators_model_type") == "peagle":
                raise self.error("mask_token_id is missing; give it as the head was trained")
            return None
        key, token = found[0]
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise self.error(f"{key} is {token!r}; it must be a token below vocab_size, {vocab_size:,}")
        return token

    def taps(self, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Returns the layers at whose input the stream is read, and those of the other convention.

        speculators and vLLM count the layers that the stream enters; SGLang's `eagle_config` those that it
        leaves, each one less. Heads are published with either convention in either place: the one of its
        place comes first, if it fits the model.
        """
        inner, outer = self._inner.get(TAP_KEY), self.content.get(TAP_KEY)
        found, steps = (inner, (1, 0)) if inner else (outer, (0, 1))
        if not found:
            taps = (2, num_layers // 2, num_layers - 3)
            said = f"{TAP_KEY} is not given, which means {list(taps)} for {num_layers} layers"
            return self._fitting([taps], num_layers, said, 1)[0], None
        if not isinstance(found, list) or not all(type(index) is int for index in found):
            raise self.error(f"{TAP_KEY} is {found!r}; it must be a list of layers")
        meant = [tuple(index + step for index in found) for step in steps]
        first, *others = self._fitting(meant, num_layers, f"{TAP_KEY} is {found}", 1 - steps[0])
        return first, others[0] if others else None

    def _fitting(
        self, meant: list[tuple[int, ...]], num_layers: int, said: str, least: int
    ) -> list[tuple[int, ...]]:
        """Returns the taps that the model has, at least one. least: the number of the first layer."""
        fitting = [taps for taps in meant if _has_taps(taps, num_layers)]
        if not fitting:
            raise self.error(
                f"{said}; the model has {num_layers} layers, so that it must be ascending numbers from {least} "
                f"to {num_layers - 2 + least}; give a drafter that was trained for this model"
            )
        return fitting

    def fusion(self) -> Fusion:
        of_whole, of_parts = self.flag("norm_before_fc"), self.flag("fc_norm")
        if of_whole and of_parts:
            raise self.error("norm_before_fc and fc_norm are both true; they exclude each other")
        return "whole_norm" if of_whole else "part_norms" if of_parts else "plain"

    def norms_residual(self) -> bool:
        """Returns norm_before_residual, which the original layout leaves out if it is false. It must be given
        in the speculators layout, whose readers disagree about the default."""
        if self.is_speculators and self._value("norm_before_residual") is None:
            raise self.error(
                "norm_before_residual is missing; give it as the head was trained, true or false"
            )
        return self.flag("norm_before_residual")


def _has_taps(taps: tuple[int, ...], num_layers: int) -> bool:
    return list(taps) == sorted(set(taps)) and all(1 <= tap < num_layers for tap in taps)


def _given(taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns the taps that a start sets. Raises ModelError for layers that the model lacks."""
    if not _has_taps(taps, num_layers):
        shown = ",".join(map(str, taps))
        raise ModelError(
            f"--drafter-taps is {shown}; the model has {num_layers} layers, so that it must be ascending numbers from 1 to {num_layers - 1}"
        )
    return taps


def _decoder(keys: _Keys) -> ModelSpec:
    """Returns the spec of the layers, which their family reads."""
    content = keys.content
    if keys.is_speculators:
        inner = content.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise keys.error(f"transformer_layer_config is {inner!r}; it must be an object")
        kind = inner.get("model_type")
        if not isinstance(kind, str) or kind not in DECODERS:
            raise keys.error(
                f"model_type of transformer_layer_config is {kind!r}; supported are {' and '.join(DECODERS)}"
            )
        architecture = DECODERS[kind]
        content = {**inner, **{key: content[key] for key in KEYS if content.get(key) is not None}}
    else:
        names = content.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        architecture = name.removeprefix("Eagle3").removesuffix("Eagle3")
        if architecture == name or architecture not in DECODERS.values():
            supported = " and ".join(f"{decoder}Eagle3" for decoder in DECODERS.values())
            raise keys.error(
                f"the architecture of the drafter is {name or 'not named'}; supported are {supported}, the "
                "speculators layout with speculators_model_type 'eagle3' or 'peagle', and draft models of a family that is served"
            )
    resolved = resolve_config({**content, "architectures": [architecture]}, keys.file, CONFIG_CLASSES)
    return FAMILY_OF[architecture].read(resolved)
