"""Samples tokens by Gumbel-max with noise that depends on (seed, position, vocabulary id) alone.

One pass over the vocabulary finds the best score of each chunk. For rows with filters it finds the highest
logit of each run of _RUN tokens instead; `pick_kept` continues from these with top-k, `pick_by_rejection`
without. Nothing is sorted. The pass also finds positions with NaN or +inf: it treats NaN as +inf, so that the
highest logit of such a position is +inf.

A line is one position of one row, and a place is its index in the window.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.sampling.sample import gumbel_noise as gumbel_noise_twin
from headway.kernels.reference.sampling.sample import sample as sample_twin
from headway.kernels.runtime._device import multiprocessors, overlap
from headway.kernels.runtime._triton import (
    blocks_of,
    check_dense,
    jit,
    jit_once_for,
    power_of_two,
    takes_triton,
    tl,
)
from headway.kernels.sampling._gumbel import noise_of_groups
from headway.kernels.sampling._top_k import pick_kept
from headway.kernels.sampling._top_p import mass_of, near_mass, pick_by_rejection

_CHUNK, _RUN = 2048, 64
# Tokens whose noise is generated at a time; runs, and gathered tokens, processed at a time; the most tokens
# to compare with each other, and to gather; runs to draw from at a time, and to sum at a time.
_PIECE, _RUNS, _BLOCK, _PAIRED, _FEW, _UNIT, _TESTED = 512, 32, 1024, 128, 8192, 16, 64
_SCAN_WARPS, _PICK_WARPS, _SCANS_PER_MULTIPROCESSOR, _PICKS_PER_MULTIPROCESSOR = 4, 8, 24, 2
# If one warp holds all terms of a sum, each of its threads adds them, and fused products would round
# differently in each thread. Threads that disagree about a bound could diverge before a barrier, which is a
# deadlock.
_PICK_OPTIONS = {"enable_fp_fusion": False}
_ROW_POINTERS = (
    "only_ptr", "position_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr"
)  # fmt: skip
_PARTIAL_POINTERS = ("highest_ptr", "score_ptr", "top_ptr", "near_ptr")


@jit
def _noise_kernel(
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    vocab_size: tl.tensor,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    noise = noise_of_groups(tl.load(seed_ptr + row), tl.load(position_ptr + row), group)
    noise = tl.reshape(noise, (4 * GROUPS,))
    token = tl.program_id(1) * (4 * GROUPS) + tl.arange(0, 4 * GROUPS)
    tl.store(noise_ptr + row * vocab_size + token, noise, mask=token < vocab_size)


def gumbel_noise(
    seeds: torch.Tensor,  # [rows] int64
    positions: torch.Tensor,  # [rows] int64
    vocab_size: int,
) -> torch.Tensor:
    """Returns the noise, [rows, vocab] float32: word id % 4 of Philox with key seed and counter (id // 4,
    position, 0), transformed to a Gumbel distribution."""
    if not takes_triton(seeds):
        return gumbel_noise_twin(seeds, positions, vocab_size)
    check_dense(seeds, positions)
    noise = torch.empty(seeds.numel(), vocab_size, device=seeds.device)
    if noise.numel() > 0:
        grid = seeds.numel(), blocks_of(vocab_size, _CHUNK)
        _noise_kernel[grid](seeds, positions, noise, vocab_size, GROUPS=_CHUNK // 4)
    return noise


@jit
def _scores(
    value: tl.tensor,  # [size] float32
    highest: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Returns the noisy scores of the tokens from `first` on, relative to `highest`, so that nothing
    overflows at small temperatures."""
    noise = noise_of_groups(seed, position, first // 4 + tl.arange(0, SIZE // 4))
    base = tl.where(highest == -float("inf"), 0.0, highest)
    return tl.div_rn(value - base, temperature) + tl.reshape(noise, (SIZE,))


@jit_once_for("has_only", "window", "chunks", *_ROW_POINTERS, *_PARTIAL_POINTERS, "broken_ptr")
def _scan_kernel(
    logits_ptr: tl.tensor,
    only_ptr: tl.tensor,
    position_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    score_ptr: tl.tensor,
    top_ptr: tl.tensor,
    near_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    broken_ptr: tl.tensor,
    has_only: tl.tensor,
    window: tl.tensor,
    vocab_size: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    PIECE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Computes for each vocabulary chunk of one position the maximum logit and the noisy maximum, or
    statistics for top-k and top-p.

    The statistics are the highest logit of each run and, without top-k, the mass near it and the mass of the
    chunk, which replaces the noisy maximum. Masses are sums of exp((logit - the chunk's highest) /
    temperature). The maximum is +inf if a logit is NaN, which the maximum of floats would ignore;
    `_pick_kernel` then marks the line as broken.
    """
    line = tl.program_id(0).to(tl.int64)
    row = line // window
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    if tl.load(only_ptr + row, mask=has_only != 0, other=True) == 0:
        return
    if tl.program_id(1) == 0:
        tl.store(arrived_ptr + line, 0)
        tl.store(broken_ptr + line, False)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    is_filtered = (top_k > 0) | (top_p < 1) | (tl.load(min_p_ptr + row) > 0)
    is_random = temperature > 0
    # At temperatures below 1e-30 the noise has no effect.
    temperature = tl.maximum(temperature, 1e-30)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row) + line % window
    run = tl.arange(0, CHUNK // RUN)
    place = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    step = tl.num_programs(1)
    logits_ptr += line * vocab_size
    token = tl.program_id(1) * CHUNK + place
    following = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf"))
    for chunk in range(tl.program_id(1), chunks, step):
        value = following.to(tl.float32)
        value = tl.where(value < float("inf"), value, float("inf"))
        token = (chunk + step) * CHUNK + place
        following = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf"))
        partial = line * chunks + chunk
        tops = tl.max(value, 1)
        highest = tl.max(tops, 0)
        tl.store(highest_ptr + partial, highest)
        if is_random:
            if is_filtered:
                run_at = partial * (CHUNK // RUN) + run
                tl.store(top_ptr + run_at, tops)
                if (top_k <= 0) & (top_p < 1):
                    base = tl.where(highest == -float("inf"), 0.0, highest)
                    mass = mass_of(value, base, temperature)
                    tl.store(near_ptr + run_at, near_mass(value, tops, mass, temperature))
                    tl.store(score_ptr + partial, tl.sum(tl.sum(mass, 1), 0))
            else:
                best = tl.full((PIECE,), -float("inf"), tl.float32)
                for first in range(chunk * CHUNK, (chunk + 1) * CHUNK, PIECE):
                    near = first + tl.arange(0, PIECE)
                    piece = tl.load(logits_ptr + near, mask=near < vocab_size, other=-float("inf"))
                    scores = _scores(piece.to(tl.float32), highest, temperature, seed, position, first, PIECE)
                    best = tl.maximum(best, scores)
                tl.store(score_ptr + partial, tl.max(best, 0))
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@jit_once_for("has_only", "window", "chunks", *_ROW_POINTERS, *_PARTIAL_POINTERS, "out_ptr", "broken_ptr")
def _pick_kernel(
    logits_ptr: tl.tensor,
    only_ptr: tl.tensor,
    position_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    score_ptr: tl.tensor,
    top_ptr: tl.tensor,
    near_ptr: tl.tensor,
    list_ptr: tl.tensor,
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    out_ptr: tl.tensor,
    broken_ptr: tl.tensor,
    has_only: tl.tensor,
    window: tl.tensor,
    vocab_size: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHIFT: tl.constexpr,
    RUN: tl.constexpr,
    LISTED: tl.constexpr,
    FEW: tl.constexpr,
    PAIRED: tl.constexpr,
    UNIT: tl.constexpr,
    TESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Samples one line: the best token of its best chunk, or with filters the best of the tokens that they
    keep. With filters but without top-k all programs of a line work, else only the first. A line whose
    highest logit is +inf has no probabilities: it is marked as broken and gets token 0."""
    line = tl.program_id(0).to(tl.int64)
    row = line // window
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    if tl.load(only_ptr + row, mask=has_only != 0, other=True) == 0:
        return
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    position, seed = tl.load(position_ptr + row) + line % window, tl.load(seed_ptr + row)
    is_random = temperature > 0
    is_filtered = is_random & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    is_shared = is_filtered & (top_k <= 0)
    if (tl.program_id(1) > 0) & (is_shared == 0):
        return
    temperature = tl.maximum(temperature, 1e-30)
    chunk = tl.arange(0, CHUNKS)
    highest_ptr += line * chunks
    score_ptr += line * chunks
    highs = tl.load(highest_ptr + chunk, mask=chunk < chunks, other=-float("inf"))
    highest = tl.max(highs, 0)
    if highest == float("inf"):
        tl.store(broken_ptr + line, True)
        tl.store(out_ptr + line, 0)
        return
    logits_ptr += line * vocab_size
    runs = chunks * (CHUNK // RUN)
    first_run = line * runs
    if is_shared:
        token, is_known = pick_by_rejection(
            logits_ptr, highest_ptr, score_ptr, top_ptr + first_run, near_ptr + first_run, list_ptr + first_run,
            value_ptr + line * FEW, id_ptr + line * FEW, arrived_ptr + line, highest, temperature, top_p, min_p, seed, position,
            vocab_size, chunks, CHUNK, CHUNKS, SHIFT, RUN, TESTED, UNIT,
        )  # fmt: skip
        tl.store(out_ptr + line, token, mask=is_known)
    elif is_filtered:
        kept = pick_kept(
            logits_ptr, top_ptr + first_run, list_ptr + first_run, value_ptr + line * FEW, id_ptr + line * FEW,
            highest, temperature, top_k, top_p, min_p, seed, position, vocab_size, runs,
            CHUNKS * (CHUNK // RUN), SHIFT, RUN, LISTED, FEW, PAIRED, BLOCK,
        )  # fmt: skip
        tl.store(out_ptr + line, tl.minimum(kept, vocab_size - 1))
    else:
        scores = highs
        if is_random:
            scores = tl.load(score_ptr + chunk, mask=chunk < chunks, other=-float("inf"))
            scores += tl.div_rn(highs - tl.where(highest == -float("inf"), 0.0, highest), temperature)
        _, best = tl.max(scores, 0, return_indices=True)
        token = best * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
        if is_random:
            value = _scores(value, tl.max(value, 0), temperature, seed, position, best * CHUNK, CHUNK)
        _, picked = tl.max(value, 0, return_indices=True)
        # If all tokens are masked, the result has no meaning, but it is a valid id.
        tl.store(out_ptr + line, tl.minimum(best * CHUNK + picked, vocab_size - 1))
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


# Trailing bits of a logit's float32 form that are zeros.
_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def sample(
    logits: torch.Tensor,  # [rows, window, vocab] float
    positions: torch.Tensor,  # [rows] int64: absolute position of the token sampled at window place 0
    temperatures: torch.Tensor,  # [rows] float32, 0: greedy
    top_k: torch.Tensor,  # [rows] int64, 0: off
    top_p: torch.Tensor,  # [rows] float32, 1: off
    min_p: torch.Tensor,  # [rows] float32, 0: off
    seeds: torch.Tensor,  # [rows] int64
    *,
    out: torch.Tensor | None = None,
    broken: torch.Tensor | None = None,
    only: torch.Tensor
    | None = None,  # [rows] bool: the rows that are picked for; `out` and `broken` keep the others
) -> torch.Tensor:
    """Returns [rows, window] int64: argmax(logits / T + noise) over the tokens that the filters keep.

    broken: [rows, window] bool, written: whether a logit is NaN or +inf, so that there are no probabilities;
    the token of such a position has no meaning, but it is a valid id. -inf is a masked token. A token depends
    on its own logits alone and on their dtype, which decides the order in which probabilities are added. The
    twin computes float64 logits, which only tests of exactness use, on every device.
    """
    parameters = positions, temperatures, top_k, top_p, min_p, seeds
    if not takes_triton(logits) or logits.dtype == torch.float64:
        return sample_twin(logits, *parameters, out=out, broken=broken, only=only)
    check_dense(logits, *parameters)
    rows, window, vocab_size = logits.shape
    lines, chunks = rows * window, blocks_of(vocab_size, _CHUNK)
    tokens = torch.empty(rows, window, dtype=torch.int64, device=logits.device) if out is None else out
    if broken is None:
        broken = torch.empty(rows, window, dtype=torch.bool, device=logits.device)
    some = broken if only is None else only
    check_dense(tokens, broken, some)
    if lines == 0:
        return tokens
    # bests: the highest logit, and the best score or the mass, of each line and chunk. runs: the highest
    # logit and the mass near it of each line and run. listed: the list of runs. values, ids: gathered tokens,
    # or the best score of each unit and its token. arrived: the number of programs of a line that have
    # arrived.
    bests = torch.empty(2, lines, chunks, device=logits.device)
    runs = torch.empty(2, lines, chunks * (_CHUNK // _RUN), device=logits.device)
    listed = torch.empty_like(runs[0], dtype=torch.int32)
    values = torch.empty(lines, _FEW, device=logits.device)
    ids = torch.empty_like(values, dtype=torch.int32)
    arrived = torch.empty(lines, dtype=torch.int32, device=logits.device)
    overlaps, launch = overlap(logits.device)
    scans = blocks_of(_SCANS_PER_MULTIPROCESSOR * multiprocessors(logits.device), lines)
    _scan_kernel[(lines, min(scans, chunks))](
        logits, some, *parameters, *bests, *runs, arrived, broken, int(only is not None), window, vocab_size, chunks,
        CHUNK=_CHUNK, RUN=_RUN, PIECE=_PIECE, OVERLAPS=overlaps, num_warps=_SCAN_WARPS, **launch,
    )  # fmt: skip
    picks = max(_PICKS_PER_MULTIPROCESSOR * multiprocessors(logits.device) // lines, 1)
    _pick_kernel[(lines, min(picks, chunks))](
        logits, some, *parameters, *bests, *runs, listed, values, ids, arrived, tokens, broken, int(only is not None), window,
        vocab_size, chunks,
        CHUNK=_CHUNK, CHUNKS=power_of_two(chunks), SHIFT=_SHIFTS[logits.dtype], RUN=_RUN, LISTED=_RUNS,
        FEW=_FEW, PAIRED=_PAIRED, BLOCK=_BLOCK, UNIT=_UNIT, TESTED=_TESTED, OVERLAPS=overlaps, num_warps=_PICK_WARPS,
        **_PICK_OPTIONS, **launch,
    )  # fmt: skip
    return tokens
