"""Reads the rotary position embedding that a config.json asks for, as transformers' modeling_rope_utils
computes it."""

from __future__ import annotations

import math

from headway.engine.models.config_keys import ResolvedConfig, Rope
from headway.engine.models.spec import (
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeScaling,
    RopeSpec,
    YarnRopeScaling,
)

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_BETA_FAST, DEFAULT_BETA_SLOW = 32.0, 1.0
MAX_FACTOR = 1e6


def rope_spec(resolved: ResolvedConfig, layer_type: str, *, default_share: float | None = None) -> RopeSpec:
    """Returns the positions of a type of layer. Raises ModelError for features that are not computed.
    default_share: the share of each head's dimensions that is rotated if the configuration has no
    partial_rotary_factor; None: the family rotates whole heads, whatever the configuration says.
    """
    rope = resolved.rope_of(layer_type)
    kind, parameters = rope.rope_type, rope.parameters
    if kind not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(map(repr, SUPPORTED_ROPE_TYPES))
        raise resolved.error(f"rope scaling {kind!r} is not supported; supported are {supported}")
    # Without scaling these families rotate whole heads whatever partial_rotary_factor says; with scaling
    # transformers fails.
    partial = parameters.get("partial_rotary_factor", 1.0)
    if default_share is None and kind != "default" and (isinstance(partial, bool) or partial != 1.0):
        raise resolved.error(
            f"partial_rotary_factor is {partial!r} with rope scaling {kind!r}; supported is 1.0"
        )
    reader = _Parameters(resolved, rope)
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = LinearRopeScaling(reader.number("factor", least=1.0))
    elif kind == "llama3":
        scaling = reader.llama3()
    elif kind == "yarn":
        scaling = reader.yarn()
    rotary_dim = resolved.head_dim if default_share is None else _rotary_dim(resolved, rope, default_share)
    return RopeSpec(rope.theta, rotary_dim, scaling)


def _rotary_dim(resolved: ResolvedConfig, rope: Rope, default_share: float) -> int:
    share = rope.parameters.get("partial_rotary_factor", default_share)
    is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    rotary_dim = int(resolved.head_dim * share) if is_share else 0  # type: ignore[operator]
    if rotary_dim < 2 or rotary_dim % 2 != 0:
        raise resolved.error(
            f"partial_rotary_factor is {share!r} with heads of {resolved.head_dim}; it must be a number up to 1 that leaves "
            "an even number of dimensions, 2 or more"
        )
    return rotary_dim


class _Parameters:
    """The keys of one rope_scaling or rope_parameters object, with errors that name them."""

    def __init__(self, resolved: ResolvedConfig, rope: Rope) -> None:
        self._resolved, self._rope = resolved, rope
        self._found = {key: v for key, v in rope.parameters.items() if v is not None}

    def number(self, key: str, *, least: float, default: float | None = None) -> float:
        """Returns the value, which must lie between `least` and MAX_FACTOR. A key that is missing or null has
        the default, where there is one."""
        value = self._found.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= float(value) <= MAX_FACTOR:  # type: ignore[arg-type]
            said = "missing" if value is None else repr(value)
            raise self._resolved.error(
                f"{key} of rope scaling {self._rope.rope_type!r} is {said}; it must be a number from "
                f"{least:g} to {MAX_FACTOR:g}"
            )
        return float(value)  # type: ignore[arg-type]

    def original_max_positions(self) -> int:
        value = self._found.get(
            "original_max_position_embeddings", self._resolved.keys.max_position_embeddings
        )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._resolved.error(
                f"original_max_position_embeddings is {value!r}; it must be a positive integer"
            )
        return value

    def llama3(self) -> Llama3RopeScaling:
        low = self.number("low_freq_factor", least=1e-6)
        high = self.number("high_freq_factor", least=1e-6)
        if high <= low:
            raise self._resolved.error(
                f"high_freq_factor is {high:g}; it must be above the low_freq_factor {low:g}"
            )
        return Llama3RopeScaling(self.number("factor", least=1.0), low, high, self.original_max_positions())

    def yarn(self) -> YarnRopeScaling:
        if self._rope.theta <= 1:
            raise self._resolved.error(f"rope_theta is {self._rope.theta:g}; YaRN needs one above 1")
        original = self.original_max_positions()
        implied = max(self._resolved.keys.max_position_embeddings / original, 1.0)
        if "factor" not in self._rope.parameters:
            raise self._resolved.error("factor of rope scaling 'yarn' is missing")
        factor = self.number("factor", least=1.0, default=implied)
        truncate = self._found.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self._resolved.error(f"truncate is {truncate!r}; it must be true or false")
        return YarnRopeScaling(
            factor=factor,
            attention_factor=self.number(
                "attention_factor", least=0.0, default=self._attention_factor(factor)
            ),
            original_max_positions=original,
            beta_fast=self.number("beta_fast", least=0.0, default=DEFAULT_BETA_FAST) or DEFAULT_BETA_FAST,
            beta_slow=self.number("beta_slow", least=0.0, default=DEFAULT_BETA_SLOW) or DEFAULT_BETA_SLOW,
            truncate=truncate,
        )

    def _attention_factor(self, factor: float) -> float:
        """Returns the factor of the paper, or the quotient of two if both mscale and mscale_all_dim are given
        (DeepSeek)."""
        first = self.number("mscale", least=0.0, default=0.0)
        second = self.number("mscale_all_dim", least=0.0, default=0.0)
        if first and second:
            return _magnitude(factor, first) / _magnitude(factor, second)
        return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
