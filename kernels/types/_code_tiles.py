"""The order in memory of the codes of a quantised weight, in which threads of Hopper's tensor cores need
them.

A tile has 64 outputs and the inputs of a chunk: 32 inputs of 8 bits or 64 of 4 bits. Thread t of the 128 that
multiply it holds outputs 16 (t // 32) + 8 r + t % 32 // 4 and inputs 16 s + 8 h + 2 (t % 4) + e of the chunk,
for r, h and e in 0 and 1 and each s. These are 16 adjacent bytes. Codes of 8 bits are ordered by s, h, e, r;
codes of 4 bits, the low half of a byte first, by s, e, h, r. In a paired weight output i of the first half
and output i of the second half are eight apart: see `pair_of`.
"""

from __future__ import annotations

import torch

THREADS, BYTES = 128, 16
OUTPUTS = 64
CHUNKS = {8: 32, 4: 64}  # inputs of a chunk, by the bits of a code
_PAIRED = 8


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns codes, [outputs, inputs] uint8, in the order above, [outputs / 64, inputs / chunk, 128, 16]
    uint8. Outputs are a multiple of 64, inputs one of the chunk."""
    outputs, inputs = codes.shape
    chunk = CHUNKS[bits]
    parts = codes.view(
        outputs // OUTPUTS, 4, 2, 8, inputs // chunk, chunk // 16, 2, 4, 2
    )  # n w r g c s h q e
    if bits == 8:
        return parts.permute(0, 4, 1, 3, 7, 5, 6, 8, 2).reshape(-1, inputs // chunk, THREADS, BYTES)
    words = parts.permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(-1, inputs // chunk, THREADS, BYTES, 2)
    return words[..., 0] | words[..., 1] << 4


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes of `pack_codes` in their own order, [outputs, inputs] uint8."""
    tiles, chunks = packed.shape[:2]
    if bits == 8:
        parts = packed.view(tiles, chunks, 4, 8, 4, 2, 2, 2, 2)  # n c w g q s h e r
        parts = parts.permute(0, 2, 8, 3, 1, 5, 6, 4, 7)
    else:
        nibbles = torch.stack((packed & 15, packed >> 4), -1)
        parts = nibbles.view(tiles, chunks, 4, 8, 4, 4, 2, 2, 2)  # n c w g q s e h r
        parts = parts.permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    return parts.reshape(tiles * OUTPUTS, chunks * CHUNKS[bits])


def paired_outputs(outputs: int, device: torch.device) -> torch.Tensor:
    """Returns the output at each index of a paired weight, [outputs] int64. `outputs` is a multiple of 64."""
    halves = torch.arange(outputs, device=device).view(2, -1, _PAIRED)
    return halves.transpose(0, 1).flatten()
