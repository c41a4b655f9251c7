"""Weights as codes and scales, in the tensors of compressed-tensors 0.20.

Readers of the folder compute a code times its scale, in float32 and rounded once to the weight's dtype. The
scales have that dtype, too, and codes are chosen for the stored scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

BLOCK, GROUP = 128, 128
LARGEST_FLOAT8, WORD_BITS = 448.0, 32
TINY = 2.0**-100  # weights that are all zero have this scale, not 0
# Shares of the scale that represents a group's greatest weight. The one with the least squared error is used:
# clipping the greatest weight may cost less than rounding all others by a longer step.
SHARES = tuple(1.0 - step / 40 for step in range(17))

LM_HEAD = "lm_head.weight"  # the path of its parameter
ROWS_AT_ONCE = 4096  # quantised at a time, whole blocks
# The values of a weight for which all shares are tried at a time: so few that a CPU's caches hold them, and
# so many that a GPU is busy.
NUMBERS_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 20}
# These weights are small and lose much by rounding: the projection of a draft head's two inputs, the gates of
# delta nets, and the router of experts.
KEPT_PATHS = (".input.weight", ".delta.a.weight", ".delta.b.weight", ".router.weight", ".shared_gate.weight")

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Format:
    """The format in which a weight is written. parts: makes its tensors, keyed by what follows the layer's
    name. fits: whether a weight of this shape can be written. scheme: a group of config.json's
    quantization_config. code_bits: the bits of a code, where kernels read the kind."""

    form: str
    scheme: Mapping[str, object]
    parts: Callable[[torch.Tensor], Parts]
    fits: Callable[[torch.Size], bool]
    code_bits: int | None


def float8_blocks(weight: torch.Tensor) -> Parts:  # [out, in]
    """Returns float8_e4m3fn codes and a scale for each block of 128 x 128 outputs and inputs."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    scale = _stored(blocks.abs().amax((1, 3)) / LARGEST_FLOAT8, weight.dtype)
    by_element = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:outputs, :inputs]
    codes = (weight.float() / by_element).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scale}


def integers(weight: torch.Tensor, bits: int, group: int) -> Parts:  # [out, in]
    """Returns integers of that number of bits packed into words along the inputs, and a scale for each group
    of inputs, which divides them."""
    outputs, inputs = weight.shape
    largest = (1 << (bits - 1)) - 1
    groups = weight.float().view(-1, group)
    pieces = torch.split(groups, max(1, NUMBERS_AT_ONCE[weight.device.type] // group))
    scale = torch.cat([_scales(piece, largest, weight.dtype) for piece in pieces])
    codes = _codes(groups, scale, largest).to(torch.int32) + (largest + 1)
    return {
        "weight_packed": packed(codes.view(outputs, inputs), bits),
        "weight_scale": scale.view(outputs, -1),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def _scales(groups: torch.Tensor, largest: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, group] float32 -> [n]. Returns the best scale of each group among those that SHARES give. They are
    tried at once, because an expert's matrix is so small that launches would take most of the time."""
    whole = groups.abs().amax(1) / largest
    scales = _stored(_shares(groups.device) * whole, dtype)  # [shares, n]
    errors = (_codes(groups, scales, largest) * scales.float()[..., None] - groups).square().sum(2)
    return scales.gather(0, errors.argmin(0, keepdim=True))[0]


@cache
def _shares(device: torch.device) -> torch.Tensor:
    return torch.tensor(SHARES, device=device)[:, None]


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] int32, 0 or more -> [n, ceil(m * bits / 32)] int32. Returns the codes packed into words, the
    first one in the lowest bits."""
    per_word = WORD_BITS // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    shifts = torch.arange(per_word, device=codes.device) * bits
    words = (padded.view(len(codes), -1, per_word).long() << shifts).sum(2)  # of codes that share no bit
    signed: torch.Tensor = words - (words >> (WORD_BITS - 1) << WORD_BITS)
    return signed.to(torch.int32)


def _codes(groups: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    return (groups / scale.float()[..., None]).round().clamp(-largest - 1, largest)


def _stored(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limits = torch.finfo(dtype)
    return scale.clamp(min=max(TINY, limits.tiny * limits.eps)).to(dtype)


def _weights(bits: int, kind: str, strategy: str, **others: object) -> dict[str, object]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    } | others


FORMATS: Mapping[str, Format] = {
    "fp8": Format(
        "float-quantized",
        {"weights": _weights(8, "float", "block", block_structure=[BLOCK, BLOCK])},
        float8_blocks,
        lambda shape: True,
        8,
    ),
    "int8": Format(
        "pack-quantized",
        {"weights": _weights(8, "int", "channel")},
        lambda weight: integers(weight, 8, weight.shape[1]),
        lambda shape: True,
        None,
    ),
    "int4": Format(
        "pack-quantized",
        {"weights": _weights(4, "int", "group", group_size=GROUP)},
        lambda weight: integers(weight, 4, GROUP),
        lambda shape: shape[1] % GROUP == 0,
        4,
    ),
}


def is_quantized_path(path: str, *, with_lm_head: bool) -> bool:
    """Returns whether a linear layer's weight is among those that are quantised."""
    return path.endswith(".weight") and not path.endswith(KEPT_PATHS) and (with_lm_head or path != LM_HEAD)


def scheme_of(own: Format, kept: list[str]) -> dict[str, object]:
    """Returns config.json's quantization_config. kept: the layers that stay as they are."""
    group = dict(own.scheme) | {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": own.form,
        "config_groups": {"group_0": group}, "ignore": kept, "kv_cache_scheme": None,
    }  # fmt: skip
