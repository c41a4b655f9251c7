"""Philox 4x32-10, the counter-based generator of Salmon et al. (SC11), in int64 arithmetic.

Knows counters and keys, not the use of the random words.
"""

from __future__ import annotations

import torch

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox_4x32(
    even: torch.Tensor, odd: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns words 0, 2 and words 1, 3 of the output for the counter words 0, 2 (`even`) and 1, 3 (`odd`).

    even, odd: [2, rows, n] int64 in [0, 2**32); key: [2, rows, 1] int64 in [0, 2**32).

    A round multiplies both even words by their constants: the high halves, crossed over and mixed with the
    odd words and the key, are the new even words; the low halves, crossed over, the new odd words.
    """
    multipliers = torch.tensor(_MULTIPLIERS, device=key.device).view(2, 1, 1)
    steps = torch.tensor(_KEY_STEPS, device=key.device).view(2, 1, 1)
    for _ in range(_ROUNDS):
        # Products wrap modulo 2**64, so that their halves are exact. Only the even words must stay below
        # 2**32.
        product = (even * multipliers).flip(0)
        even = ((product >> 32) ^ odd).bitwise_xor_(key).bitwise_and_(_LOW)
        odd = product
        key = (key + steps) & _LOW
    return even, odd & _LOW
