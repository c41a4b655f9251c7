"""Gumbel noise inside a kernel, with the random words of the twin `gumbel_noise`."""

from __future__ import annotations

from headway.kernels.runtime._triton import jit, tl


@jit
def gumbel_of_words(words: tl.tensor) -> tl.tensor:
    """words: uint32. Returns the noise -log(E) with E = -log(1 - v), where v = (word + 0.5) / 2**32 is below
    1."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    # The fast logarithm has an absolute error of 2**-22, which is too much near 1: 2 atanh(v / (2 - v)) is
    # used.
    s = v / (2 - v)
    square = s * s
    series = square * (1 / 9 + square * (1 / 11 + square * (1 / 13 + square * (1 / 15))))
    series = s * (2 + 2 * square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + series))))
    return -tl.log(tl.where(v < 0.5, series, -tl.log(1 - v)))


@jit
def noise_of_groups(seed: tl.tensor, position: tl.tensor, group: tl.tensor) -> tl.tensor:
    """Returns the noise of the ids 4 * group .. 4 * group + 3 in order, [..., 2, 2] float32."""
    group = group.to(tl.uint32)
    zero = group & 0
    low, high = zero + (position & 0xFFFFFFFF).to(tl.uint32), zero + (position >> 32).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(seed, group, low, high, zero)
    return gumbel_of_words(tl.join(tl.join(word0, word2), tl.join(word1, word3)))


@jit
def noise_of_ids(seed: tl.tensor, position: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Returns the noise of each vocabulary id, float32."""
    group = (ids // 4).to(tl.uint32)
    zero = group & 0
    low, high = zero + (position & 0xFFFFFFFF).to(tl.uint32), zero + (position >> 32).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(seed, group, low, high, zero)
    even = tl.where(ids % 4 == 0, word0, word2)
    odd = tl.where(ids % 4 == 1, word1, word3)
    return gumbel_of_words(tl.where(ids % 2 == 0, even, odd))
