"""The table of cosines and sines of rotary position embedding, with the scalings that transformers names."""

from __future__ import annotations

import math

import torch

from headway.engine.layers.placement import Placement
from headway.engine.models.spec import LinearRopeScaling, Llama3RopeScaling, RopeSpec, YarnRopeScaling

POSITIONS_AT_ONCE = 1 << 16


class RotaryTables:
    """The tables of a model, one for each RopeSpec of its layers. Mutable: `of` adds new ones."""

    def __init__(self, num_positions: int, place: Placement) -> None:
        self._num_positions, self._place = num_positions, place
        self._tables: dict[RopeSpec, torch.Tensor] = {}

    def of(self, rope: RopeSpec) -> torch.Tensor:  # [num_positions, rotary_dim]
        """Returns the table of the spec, see `rotary_table`."""
        if rope not in self._tables:
            self._tables[rope] = rotary_table(rope, self._num_positions, self._place)
        return self._tables[rope]

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())


def rotary_table(rope: RopeSpec, num_positions: int, place: Placement) -> torch.Tensor:
    """Returns the cosines, then the sines, of every position: [num_positions, rotary_dim] float32 or float64.

    The angles are rounded to float32 for every dtype, as they were when the models were trained. They are
    computed on the CPU, so that they are the same on every device, POSITIONS_AT_ONCE at a time, since there
    may be no memory for a copy of a long table.
    """
    dtype = torch.float64 if place.dtype == torch.float64 else torch.float32
    table = torch.empty(num_positions, rope.rotary_dim, device=place.device, dtype=dtype)
    if table.is_meta:
        return table
    frequencies, factor = inverse_frequencies(rope)
    for start in range(0, num_positions, POSITIONS_AT_ONCE):
        part = table[start : start + POSITIONS_AT_ONCE]
        positions = torch.arange(start, start + len(part), dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        part.copy_(torch.cat([angles.cos(), angles.sin()], dim=-1) * factor)
    return table


def inverse_frequencies(rope: RopeSpec) -> tuple[torch.Tensor, float]:
    """Returns the inverse frequencies, [rotary_dim / 2] float32, and the factor of cosines and sines, both
    equal to those of transformers."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    powers = rope.theta**exponents
    match rope.scaling:
        case LinearRopeScaling(factor):
            return 1.0 / powers / factor, 1.0
        case Llama3RopeScaling():
            return _llama3(1.0 / powers, rope.scaling), 1.0
        case YarnRopeScaling():
            return _yarn(powers, rope, rope.scaling), rope.scaling.attention_factor
        case None:
            return 1.0 / powers, 1.0


def _llama3(
    frequencies: torch.Tensor,  # [rotary_dim / 2] float32
    scaling: Llama3RopeScaling,
) -> torch.Tensor:  # [rotary_dim / 2] float32
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_max_positions / (2 * math.pi / frequencies)  # within the trained context
    share = (turns - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    wavelengths = 2 * math.pi / frequencies
    is_long = wavelengths > scaling.original_max_positions / low
    is_short = wavelengths < scaling.original_max_positions / high
    scaled = torch.where(is_long, frequencies / scaling.factor, frequencies)
    return torch.where(is_long | is_short, scaled, between)


def _yarn(
    powers: torch.Tensor,  # [rotary_dim / 2] float32: theta ** (2 i / rotary_dim)
    rope: RopeSpec,
    scaling: YarnRopeScaling,
) -> torch.Tensor:  # [rotary_dim / 2] float32
    def dimension_of(turns: float) -> float:
        """Returns the dimension that completes this number of rotations within the trained context."""
        wavelengths = scaling.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = 0.001 if low == high else high - low
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
