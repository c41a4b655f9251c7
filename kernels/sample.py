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

_CHUNK, _WARPS = 4096, 8
# Filtered rows look among the tokens whose logits lie within _REACH temperatures of the highest, at most
# _SLOTS a chunk; a row that needs more searches its whole vocabulary.
_REACH, _SLOTS = 10.0, 256
_GATHERERS = 512


@jit
def _noise_kernel(
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    vocab_size: tl.tensor,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
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
        grid = seeds.numel(), blocks_of(vocab_size, _CHUNK)
        _noise_kernel[grid](seeds, positions, noise, vocab_size, GROUPS=_CHUNK // 4)
    return noise


@jit
def _is_filtered(top_k_ptr: tl.tensor, top_p_ptr: tl.tensor, min_p_ptr: tl.tensor) -> tl.tensor:
    return (tl.load(top_k_ptr) > 0) | (tl.load(top_p_ptr) < 1) | (tl.load(min_p_ptr) > 0)


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
    line, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = line // window
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value_ptr = logits_ptr + line * vocab_size + token
    value = tl.load(value_ptr, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    highest = tl.max(value, 0)
    temperature = tl.load(temperature_ptr + row)
    is_filtered = _is_filtered(top_k_ptr + row, top_p_ptr + row, min_p_ptr + row)
    if (temperature > 0) & (is_filtered == 0):
        position = tl.load(position_ptr + row) + line % window
        noise = noise_of_groups(tl.load(seed_ptr + row), position, chunk * (CHUNK // 4), CHUNK // 4)
        # Relative to the chunk's highest logit nothing overflows, however small the temperature; below 1e-30 the
        # noise decides nothing.
        base = tl.where(highest == -float("inf"), 0.0, highest)
        value = tl.div_rn(value - base, tl.maximum(temperature, 1e-30)) + noise
    score, place = tl.max(value, 0, return_indices=True)
    partial = line * tl.num_programs(1) + chunk
    tl.store(highest_ptr + partial, highest)
    tl.store(score_ptr + partial, score)
    tl.store(token_ptr + partial, chunk * CHUNK + place)


@jit
def _gather_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    count_ptr: tl.tensor,
    near_mass_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    window: tl.tensor,
    vocab_size: tl.tensor,
    chunks: tl.tensor,
    REACH: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Of each chunk of one line: its mass, and the tokens within REACH of the highest, as many as have slots.

    The mass of a token is exp((logit - highest) / temperature). The programs of a line share its chunks.
    """
    line = tl.program_id(0).to(tl.int64)
    row = line // window
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) & _is_filtered(top_k_ptr + row, top_p_ptr + row, min_p_ptr + row):
        temperature = tl.maximum(temperature, 1e-30)
        other = tl.arange(0, CHUNKS)
        highs = tl.load(highest_ptr + line * chunks + other, mask=other < chunks, other=-float("inf"))
        highest = tl.max(highs, 0)
        for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            value_at = logits_ptr + line * vocab_size + token
            value = tl.load(value_at, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
            mass = tl.exp(tl.div_rn(value - highest, temperature))
            is_near = value >= highest - REACH * temperature
            partial = line * chunks + chunk
            tl.store(mass_ptr + partial, tl.sum(mass, 0))
            tl.store(near_mass_ptr + partial, tl.sum(tl.where(is_near, mass, 0.0), 0))
            tl.store(count_ptr + partial, tl.sum(is_near.to(tl.int32), 0))
            slot = tl.cumsum(is_near.to(tl.int32), 0) - 1
            has_slot = is_near & (slot < SLOTS)
            tl.store(value_ptr + partial * SLOTS + slot, value, mask=has_slot)
            tl.store(id_ptr + partial * SLOTS + slot, token, mask=has_slot)


@jit
def _ordered_key(value: tl.tensor) -> tl.tensor:
    """int32 with the order of the float32 values; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _mass_from(
    value_ptr: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How many tokens have keys of `least` or more, or the mass of these."""
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(value_ptr + index, mask=index < size, other=-float("inf")).to(tl.float32)
        is_found = (index < size) & (_ordered_key(value) >= least)
        if BY_MASS:
            found += tl.where(is_found, tl.exp(tl.div_rn(value - highest, temperature)), 0.0)
        else:
            found += is_found.to(tl.float32)
    return tl.sum(found, 0)


@jit
def _least_kept_key(
    value_ptr: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    limit: tl.tensor,
    BY_MASS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The least key above which less than `limit` is found, tokens or mass; only keys from `least` on count.

    Bit by bit: the lower half of a range holds the key iff what lies above that half is less than the limit.
    """
    low = tl.full((), -(2**31), tl.int64)
    width = tl.full((), 2**31, tl.int64)
    for _ in range(BITS):
        upper = tl.maximum(low + width, least.to(tl.int64)).to(tl.int32)
        above = _mass_from(value_ptr, size, highest, temperature, upper, BY_MASS, BLOCK)
        low = tl.where(above < limit, low, low + width)
        width = width // 2
    return low.to(tl.int32)


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
    mass: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    HAS_IDS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token with the best noisy score of those that the filters keep. `mass`: that of the vocabulary."""
    least = tl.full((), -(2**31), tl.int32)
    if top_k > 0:
        least = _least_kept_key(value_ptr, size, highest, temperature, least, top_k, False, BITS, BLOCK)
    if top_p < 1:
        if top_k > 0:
            mass = _mass_from(value_ptr, size, highest, temperature, least, True, BLOCK)
        limit = tl.maximum(top_p, 1e-30) * mass
        key = _least_kept_key(value_ptr, size, highest, temperature, least, limit, True, BITS, BLOCK)
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
    count_ptr: tl.tensor,
    near_mass_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    out_ptr: tl.tensor,
    window: tl.tensor,
    vocab_size: tl.tensor,
    chunks: tl.tensor,
    REACH: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One line: the best of its chunks, or, where filters act, the best of the tokens they keep."""
    line = tl.program_id(0).to(tl.int64)
    row = line // window
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    divisor = tl.maximum(temperature, 1e-30)
    chunk = tl.arange(0, CHUNKS)
    partial, is_chunk = line * chunks + chunk, chunk < chunks
    highs = tl.load(highest_ptr + partial, mask=is_chunk, other=-float("inf"))
    highest = tl.max(highs, 0)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        position, seed = tl.load(position_ptr + row) + line % window, tl.load(seed_ptr + row)
        counts = tl.load(count_ptr + partial, mask=is_chunk, other=0)
        near_mass = tl.sum(tl.load(near_mass_ptr + partial, mask=is_chunk, other=0.0), 0)
        mass = tl.sum(tl.load(mass_ptr + partial, mask=is_chunk, other=0.0), 0)
        # Whether every token that the first filter keeps is among those gathered.
        is_enough = tl.max(counts, 0) <= SLOTS
        if top_k > 0:
            is_enough &= tl.sum(counts, 0) >= top_k
        elif top_p < 1:
            is_enough &= near_mass >= top_p * mass
        else:
            is_enough &= tl.exp(-REACH + min_p * 0) < min_p
        if is_enough:
            value_ptr += line * chunks * SLOTS
            id_ptr += line * chunks * SLOTS
            size = _pack(value_ptr, id_ptr, count_ptr + line * chunks, chunks, SLOTS, BLOCK)
            tl.debug_barrier()
            token = _best_kept(
                value_ptr, id_ptr, size, highest, divisor, top_k, top_p, min_p, mass, seed, position,
                True, BITS, BLOCK,
            )  # fmt: skip
        else:
            token = _best_kept(
                logits_ptr + line * vocab_size, id_ptr, vocab_size, highest, divisor, top_k, top_p, min_p, mass,
                seed, position, False, BITS, 2 * BLOCK,
            )  # fmt: skip
        tl.store(out_ptr + line, token)
    else:
        score = tl.load(score_ptr + partial, mask=is_chunk, other=-float("inf"))
        if temperature > 0:
            score += tl.div_rn(highs - highest, divisor)
        _, place = tl.max(score, 0, return_indices=True)
        tl.store(out_ptr + line, tl.load(token_ptr + line * chunks + place))


@jit
def _pack(
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    count_ptr: tl.tensor,
    chunks: tl.tensor,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Moves the gathered tokens of all chunks together, in place and in order; returns how many there are.

    A block is read before it is written, and what is written lies at or before what was read.
    """
    size = tl.full((), 0, tl.int32)
    for start in range(0, chunks * SLOTS, BLOCK):
        index = start + tl.arange(0, BLOCK)
        count = tl.load(count_ptr + index // SLOTS, mask=index < chunks * SLOTS, other=0)
        is_filled = index % SLOTS < count
        value = tl.load(value_ptr + index, mask=is_filled, other=0.0)
        token = tl.load(id_ptr + index, mask=is_filled, other=0)
        place = size + tl.cumsum(is_filled.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(value_ptr + place, value, mask=is_filled)
        tl.store(id_ptr + place, token, mask=is_filled)
        size += tl.sum(is_filled.to(tl.int32), 0)
    return size


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
    # By line and chunk: highest logit, best score, mass near the highest logit, mass; best token, near tokens.
    sums = torch.empty(4, lines, chunks, device=logits.device)
    counts = torch.empty(2, lines, chunks, dtype=torch.int32, device=logits.device)
    near = torch.empty(lines, chunks, _SLOTS, device=logits.device)
    near_ids = torch.empty(lines, chunks, _SLOTS, dtype=torch.int32, device=logits.device)
    gathered = counts[1], sums[2], sums[3], near, near_ids
    _scan_kernel[(lines, chunks)](
        logits, *parameters, sums[0], sums[1], counts[0], window, vocab_size, CHUNK=_CHUNK, num_warps=_WARPS
    )
    # Enough programs to fill a GPU, few enough to cost greedy lines nothing.
    _gather_kernel[(lines, min(chunks, max(1, _GATHERERS // lines)))](
        logits, temperatures, top_k, top_p, min_p, sums[0], *gathered, window, vocab_size, chunks,
        REACH=_REACH, SLOTS=_SLOTS, CHUNKS=power_of_two(chunks), CHUNK=_CHUNK, num_warps=_WARPS,
    )  # fmt: skip
    _pick_kernel[(lines,)](
        logits, *parameters, sums[0], sums[1], counts[0], *gathered, tokens, window, vocab_size, chunks,
        REACH=_REACH, SLOTS=_SLOTS, CHUNKS=power_of_two(chunks),
        BITS=16 if logits.dtype == torch.bfloat16 else 32, BLOCK=1024, num_warps=_WARPS,
    )  # fmt: skip
    return tokens
