"""Logits to tokens by Gumbel-max with noise that depends on (seed, position, vocabulary id) alone.

One pass over the vocabulary, in chunks, for greedy and plain temperature; filtered rows then gather the few
tokens that can pass and search the filters' thresholds among them. Nothing is sorted.
"""

from __future__ import annotations

import torch

from headway.kernels._noise import noise_of_groups, noise_of_ids
from headway.kernels._triton import blocks_of, check_dense, jit, power_of_two, takes_triton, tl
from headway.kernels.reference.sample import gumbel_noise as gumbel_noise_twin
from headway.kernels.reference.sample import sample as sample_twin

_CHUNK = 4096
_CANDIDATES = 4096


@jit
def _noise_kernel(
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    vocab_size: tl.tensor,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * GROUPS
    noise = noise_of_groups(tl.load(seed_ptr + row), tl.load(position_ptr + row), first, GROUPS)
    token = first * 4 + tl.arange(0, 4 * GROUPS)
    tl.store(noise_ptr + row * vocab_size + token, noise, mask=token < vocab_size)


def gumbel_noise(
    seeds: torch.Tensor,  # [rows] int64
    positions: torch.Tensor,  # [rows] int64
    vocab_size: int,
) -> torch.Tensor:
    """[rows, vocab] float32. Philox key = seed, counter = (id // 4, position, 0), word id % 4."""
    if not takes_triton(seeds):
        return gumbel_noise_twin(seeds, positions, vocab_size)
    check_dense(seeds, positions)
    noise = torch.empty(seeds.numel(), vocab_size, device=seeds.device)
    if noise.numel() > 0:
        grid = blocks_of(vocab_size, _CHUNK), seeds.numel()
        _noise_kernel[grid](seeds, positions, noise, vocab_size, GROUPS=_CHUNK // 4)
    return noise


@jit
def _scan_kernel(
    logits_ptr: tl.tensor,
    position_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    window: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Of one chunk of one line (a row's place): the highest logit, and the best token where nothing filters."""
    chunk, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = line // window
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value_ptr = logits_ptr + line * vocab_size + token
    value = tl.load(value_ptr, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    highest = tl.max(value, 0)
    temperature = tl.load(temperature_ptr + row)
    is_filtered = (
        (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1) | (tl.load(min_p_ptr + row) > 0)
    )
    if (temperature > 0) & (is_filtered == 0):
        position = tl.load(position_ptr + row) + line % window
        noise = noise_of_groups(tl.load(seed_ptr + row), position, chunk * (CHUNK // 4), CHUNK // 4)
        # Relative to the chunk's highest logit nothing overflows, however small the temperature; below 1e-30 the
        # noise decides nothing.
        base = tl.where(highest == -float("inf"), 0.0, highest)
        value = tl.div_rn(value - base, tl.maximum(temperature, 1e-30)) + noise
    score, place = tl.max(value, 0, return_indices=True)
    partial = line * tl.num_programs(0) + chunk
    tl.store(highest_ptr + partial, highest)
    tl.store(score_ptr + partial, score)
    tl.store(token_ptr + partial, chunk * CHUNK + place)


@jit
def _ordered_key(value: tl.tensor) -> tl.tensor:
    """int32 with the order of the float32 values; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _least_kept_key(
    value_ptr: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    limit: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The least key above which less than `limit` is found: tokens, or mass relative to the highest token's.

    Sixteen keys are tried at once, digit by digit of four bits. Only keys from `least` on count.
    """
    low = tl.full((), -(2**31), tl.int64)
    for digit in range(8):
        width = 1 << (28 - 4 * digit)
        last = (low + (tl.arange(0, 16) + 1).to(tl.int64) * width - 1).to(tl.int32)
        above = tl.zeros((16,), tl.float32)
        for start in range(0, size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            value = tl.load(value_ptr + index, mask=index < size, other=-float("inf")).to(tl.float32)
            key = _ordered_key(value)
            weight = tl.where((index < size) & (key >= least), 1.0, 0.0)
            if BY_MASS:
                weight *= tl.exp(tl.div_rn(value - highest, temperature))
            above += tl.sum(tl.where(key[:, None] > last[None, :], weight[:, None], 0.0), 0)
        low += tl.sum((above >= limit).to(tl.int64), 0) * width
    return low.to(tl.int32)


@jit
def _mass(
    value_ptr: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    lowest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """(tokens at or above `lowest`, their mass, the mass of all), mass relative to the highest token's."""
    count = tl.zeros((BLOCK,), tl.int32)
    part, whole = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(value_ptr + index, mask=index < size, other=-float("inf")).to(tl.float32)
        weight = tl.exp(tl.div_rn(value - highest, temperature))
        is_high = (value >= lowest) & (index < size)
        count += is_high.to(tl.int32)
        part += tl.where(is_high, weight, 0.0)
        whole += weight
    return tl.sum(count, 0), tl.sum(part, 0), tl.sum(whole, 0)


@jit
def _best_kept(
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    total: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token with the best noisy score of those that the filters keep. `total`: the mass of all tokens."""
    least = tl.full((), -(2**31), tl.int32)
    if top_k > 0:
        least = _least_kept_key(value_ptr, size, highest, temperature, least, top_k, False, BLOCK)
    if top_p < 1:
        if top_k > 0:
            total = 0.0
            for start in range(0, size, BLOCK):
                index = start + tl.arange(0, BLOCK)
                value = tl.load(value_ptr + index, mask=index < size, other=-float("inf")).to(tl.float32)
                weight = tl.exp(tl.div_rn(value - highest, temperature))
                total += tl.sum(tl.where(_ordered_key(value) >= least, weight, 0.0), 0)
        limit = tl.maximum(top_p, 1e-30) * total
        key = _least_kept_key(value_ptr, size, highest, temperature, least, limit, True, BLOCK)
        least = tl.maximum(least, key)
    best_score, best_token = -float("inf"), tl.full((), 0, tl.int32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(value_ptr + index, mask=index < size, other=-float("inf")).to(tl.float32)
        token = index
        if HAS_IDS:
            token = tl.load(id_ptr + index, mask=index < size, other=0)
        scaled = tl.div_rn(value - highest, temperature)
        is_kept = (index < size) & (_ordered_key(value) >= least) & (tl.exp(scaled) >= min_p)
        score = tl.where(is_kept, scaled + noise_of_ids(seed, position, token), -float("inf"))
        block_score, place = tl.max(score, 0, return_indices=True)
        block_token = tl.sum(tl.where(tl.arange(0, BLOCK) == place, token, 0), 0)
        best_token = tl.where(block_score > best_score, block_token, best_token)
        best_score = tl.maximum(block_score, best_score)
    return best_token


@jit
def _pick_kernel(
    logits_ptr: tl.tensor,
    position_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    out_ptr: tl.tensor,
    window: tl.tensor,
    vocab_size: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One line: the best of its chunks, or, where filters act, the best of the tokens they keep."""
    line = tl.program_id(0).to(tl.int64)
    row = line // window
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    chunk = tl.arange(0, CHUNKS)
    partial = line * chunks + chunk
    highs = tl.load(highest_ptr + partial, mask=chunk < chunks, other=-float("inf"))
    highest = tl.max(highs, 0)
    divisor = tl.maximum(temperature, 1e-30)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        position = tl.load(position_ptr + row) + line % window
        seed = tl.load(seed_ptr + row)
        line_ptr = logits_ptr + line * vocab_size
        # Reach down from the highest logit until every token that a filter may keep is in reach.
        reach, reaches = 2.0, temperature < 0
        lowest, total = highest, tl.full((), 0.0, tl.float32)
        count = tl.full((), 0, tl.int32)
        while (reaches == 0) & (reach < 1e6):
            reach *= 4
            lowest = tl.where(reach < 1e6, highest - reach * divisor, -float("inf"))
            count, part, total = _mass(line_ptr, vocab_size, highest, divisor, lowest, BLOCK)
            reaches = (top_k <= 0) | (count >= top_k)
            reaches &= (top_k > 0) | (top_p >= 1) | (part >= top_p * total)
            reaches &= (top_k > 0) | (top_p < 1) | (tl.exp(-reach) < min_p)
        if count <= CANDIDATES:
            value_ptr += line * CANDIDATES
            id_ptr += line * CANDIDATES
            size = 0
            for start in range(0, vocab_size, BLOCK):
                index = start + tl.arange(0, BLOCK)
                value = tl.load(line_ptr + index, mask=index < vocab_size, other=-float("inf")).to(tl.float32)
                is_high = (value >= lowest) & (index < vocab_size)
                place = size + tl.cumsum(is_high.to(tl.int32), 0) - 1
                tl.store(value_ptr + place, value, mask=is_high)
                tl.store(id_ptr + place, index, mask=is_high)
                size += tl.sum(is_high.to(tl.int32), 0)
            tl.debug_barrier()
            token = _best_kept(
                value_ptr, id_ptr, size, highest, divisor, top_k, top_p, min_p, total, seed, position,
                True, BLOCK,
            )  # fmt: skip
        else:
            token = _best_kept(
                line_ptr, id_ptr, vocab_size, highest, divisor, top_k, top_p, min_p, total, seed, position,
                False, BLOCK,
            )  # fmt: skip
        tl.store(out_ptr + line, token)
    else:
        score = tl.load(score_ptr + partial, mask=chunk < chunks, other=-float("inf"))
        if temperature > 0:
            score += tl.div_rn(highs - highest, divisor)
        _, place = tl.max(score, 0, return_indices=True)
        tl.store(out_ptr + line, tl.load(token_ptr + line * chunks + place))


def sample(
    logits: torch.Tensor,  # [rows, window, vocab] float
    positions: torch.Tensor,  # [rows] int64: absolute position of the token picked at window place 0
    temperatures: torch.Tensor,  # [rows] float32, 0: greedy
    top_k: torch.Tensor,  # [rows] int64, 0: off
    top_p: torch.Tensor,  # [rows] float32, 1: off
    min_p: torch.Tensor,  # [rows] float32, 0: off
    seeds: torch.Tensor,  # [rows] int64
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, window] int64: argmax(logits / T + noise) over the tokens that the filters keep.

    float64 logits, which only tests of exactness have, take the twin everywhere.
    """
    parameters = positions, temperatures, top_k, top_p, min_p, seeds
    if not takes_triton(logits) or logits.dtype == torch.float64:
        return sample_twin(logits, *parameters, out=out)
    check_dense(logits, *parameters)
    rows, window, vocab_size = logits.shape
    lines, chunks = rows * window, blocks_of(vocab_size, _CHUNK)
    tokens = torch.empty(rows, window, dtype=torch.int64, device=logits.device) if out is None else out
    if lines == 0:
        return tokens
    best = torch.empty(2, lines, chunks, device=logits.device)
    best_tokens = torch.empty(lines, chunks, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(lines, _CANDIDATES, device=logits.device)
    candidate_ids = torch.empty(lines, _CANDIDATES, dtype=torch.int32, device=logits.device)
    partial = best[0], best[1], best_tokens
    _scan_kernel[(chunks, lines)](logits, *parameters, *partial, window, vocab_size, CHUNK=_CHUNK)
    _pick_kernel[(lines,)](
        logits, *parameters, *partial, candidates, candidate_ids, tokens, window, vocab_size, chunks,
        CHUNKS=power_of_two(chunks), CANDIDATES=_CANDIDATES, BLOCK=512, num_warps=8,
    )  # fmt: skip
    return tokens
