"""Converts loaded weights to other formats."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm
from headway.engine.protocol.config import DraftLayers, DraftLmHead
from headway.kernels import DenseWeight, Float8Weight, Int4ScreenedWeight, pack_nibbles

MAX_FLOAT8, TINY = 448.0, 1e-30
QUANTIZED_AT_ONCE = 4096
# Scales tried for a row of 4-bit integers: such shares of the one that holds its greatest weight. Standard
# deviations by which an output of theirs is taken to be off at most.
SCALE_SHARES, DEVIATIONS = tuple(0.85**power for power in range(13)), 6.0
MIN_NIBBLE, MAX_NIBBLE = -8.0, 7.0


def float8_weight(
    weight: torch.Tensor,  # [out, in] float
    *,
    largest_input: float,  # the magnitude that no input exceeds
) -> Float8Weight:
    """Returns a copy in float8_e4m3fn, for results that may be a little wrong: drafts."""
    values, scale = to_float8(weight)
    return Float8Weight(values, scale, float8_step(largest_input, weight.device), weight.dtype)


def int4_screened_weight(
    weight: torch.Tensor,  # [out, in] float, `in` a multiple of 256
    many: DenseWeight | Float8Weight,
) -> Int4ScreenedWeight:
    """Returns the weight with a copy in 4 bits. many: the weight for more rows than 4 bits are good for."""
    return Int4ScreenedWeight(weight, *quantize_to_nibbles(weight), many)


def draft_lm_head(lm_head: Linear, kind: DraftLmHead, *, largest_input: float) -> Linear:
    """Returns the output layer of drafts. "fp8": it multiplies in float8; "int4": for few rows logits are
    exact where they could be the greatest and approximate elsewhere, and it uses float8 for more rows; else
    it is the layer itself."""
    if kind not in ("fp8", "int4") or lm_head.is_quantized:
        return lm_head
    rounded = float8_weight(lm_head.weight, largest_input=largest_input)
    return Linear(rounded if kind == "fp8" else int4_screened_weight(lm_head.weight, rounded))


def round_layers(norms_by_linear: Mapping[Linear, tuple[RMSNorm, ...]]) -> None:
    """Makes layers whose input is the output of norms multiply in float8. Their dense weights are freed."""
    for linear, norms in norms_by_linear.items():
        if not linear.is_quantized:
            largest = max(norm.largest() for norm in norms)
            linear.store(float8_weight(linear.weight, largest_input=largest))


def draft_format_bytes(
    lm_head: Linear,
    norms_by_linear: Mapping[Linear, tuple[RMSNorm, ...]],
    kind: DraftLmHead,
    layers: DraftLayers,
) -> int:
    """Returns the further bytes that `draft_lm_head` and, where layers is "fp8", `round_layers` take;
    negative if they free some."""
    added = 0 if kind == "full" else float8_bytes(lm_head.weight)
    if kind == "int4":
        added += nibbles_bytes(lm_head.weight)
    if layers == "fp8":
        added += sum(float8_bytes(linear.weight) - linear.nbytes for linear in norms_by_linear)
    return added


def float8_bytes(weight: torch.Tensor) -> int:
    """Returns the bytes of a copy in float8_e4m3fn: the values, a scale and a step."""
    return weight.numel() + 8


def nibbles_bytes(weight: torch.Tensor) -> int:
    """Returns the bytes of a copy in 4 bits: the values, a scale and an error of each output, two spreads."""
    return weight.numel() // 2 + 8 * len(weight) + 8


def float8_step(largest_input: float, device: torch.device) -> torch.Tensor:
    """Returns [1] float32: a power of two, so that nothing but float8 itself rounds inputs."""
    step = 2.0 ** math.ceil(math.log2(max(largest_input, TINY) / MAX_FLOAT8))
    return torch.full((1,), step, device=device)


def to_float8(
    weight: torch.Tensor,  # [out, in] float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight as float8_e4m3fn, [out, in], and the scale of all values, [1] float32.

    Some rows are converted at a time, so that the memory for intermediate results stays small.
    """
    # This is allocated before the temporary tensors below, since it would otherwise keep the allocator from
    # returning their memory.
    rounded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    parts = torch.split(weight, QUANTIZED_AT_ONCE)
    largest = torch.stack([part.abs().amax() for part in parts]).amax()
    scale = largest.float().clamp(min=TINY).reshape(1) / MAX_FLOAT8
    for part, target in zip(parts, torch.split(rounded, QUANTIZED_AT_ONCE), strict=True):
        target.copy_((part / scale).clamp(-MAX_FLOAT8, MAX_FLOAT8))
    return rounded, scale


def quantize_to_nibbles(
    weight: torch.Tensor,  # [out, in] float, `in` a multiple of 256
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns packed weights, scales, errors and spreads of an Int4ScreenedWeight.

    The weights are integers from -8 to 7 times a scale: the one of SCALE_SHARES that gives each output the
    least error.

    Errors of weights and of inputs are taken to be independent, those of inputs to be evenly spread and,
    beside those of weights, as large in each output. Some rows are converted at a time, as in `to_float8`.
    """
    num_outputs, num_inputs = weight.shape
    packed = torch.empty(num_outputs, num_inputs // 2, dtype=torch.int8, device=weight.device)
    scales, errors = (torch.empty(num_outputs, dtype=torch.float32, device=weight.device) for _ in range(2))
    squares = torch.zeros((), dtype=torch.float32, device=weight.device)
    for first in range(0, num_outputs, QUANTIZED_AT_ONCE):
        which = slice(first, first + QUANTIZED_AT_ONCE)
        some = weight[which].float()
        whole = some.abs().amax(1, keepdim=True).clamp(min=TINY) / MAX_NIBBLE
        tried = torch.cat([whole * share for share in SCALE_SHARES], 1)
        tried_errors = [(_nibbles(some, s) * s - some).square().mean(1) for s in torch.split(tried, 1, 1)]
        least, best = torch.stack(tried_errors, 1).min(1)
        scale = tried.gather(1, best[:, None])
        integers = _nibbles(some, scale)
        packed[which], scales[which], errors[which] = pack_nibbles(integers), scale[:, 0], least.sqrt()
        squares += (integers * scale).square().sum()
    # The mean square of an evenly spread rounding error is the square of a step divided by 12.
    of_inputs = squares / 12 / num_outputs / errors.square().mean().clamp(min=TINY)
    return packed, scales, errors, DEVIATIONS**2 * torch.stack((torch.ones_like(of_inputs), of_inputs))


def _nibbles(
    weight: torch.Tensor,  # [out, in] float32
    scale: torch.Tensor,  # [out, 1] float32
) -> torch.Tensor:  # [out, in] float32
    return (weight / scale).round().clamp(MIN_NIBBLE, MAX_NIBBLE)
