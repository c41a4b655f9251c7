"""Samples with top-p and min-p by rejection: candidates are drawn until one is kept, so that no threshold is
searched.

The token with the best noisy score is the candidate. If the tokens above it have the mass of top-p, neither
it nor any token below it is kept, and the next candidate is drawn from those above. A token has the best
score with its own probability, so that the first candidate is kept with a probability of at least top-p.
Several programs share a position; the last to arrive tests the candidates. The inputs are the logits and, for
each run of RUN tokens, the highest logit and the mass near it. Knows nothing of top-k. FlashInfer rejects in
the same way (https://flashinfer.ai/2025/03/10/sampling.html), but draws from sums instead of scores.
"""

from __future__ import annotations

from headway.kernels.runtime._triton import jit, tl
from headway.kernels.sampling._gumbel import noise_of_groups
from headway.kernels.sampling._top_k import key_of, list_runs


@jit
def mass_of(value: tl.tensor, highest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Returns exp((value - highest) / temperature), up to rounding."""
    return tl.exp2((value - highest) * (1.4426950408889634 / temperature))


@jit
def _near_from(tops: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Returns the smallest logit that counts as near the highest of its run."""
    return tops - 4.0 * temperature


@jit
def near_mass(
    value: tl.tensor,  # [runs, RUN] float32
    tops: tl.tensor,  # [runs] float32: the highest logit of each run
    mass: tl.tensor,  # [runs, RUN] float32
    temperature: tl.tensor,
) -> tl.tensor:
    """Returns the mass of the tokens near the highest logit of their run, [runs]."""
    return tl.sum(tl.where(value >= _near_from(tops, temperature)[:, None], mass, 0.0), 1)


@jit
def _key_a_little_below(
    highest: tl.tensor, temperature: tl.tensor, mass: tl.tensor, SHIFT: tl.constexpr
) -> tl.tensor:
    """Returns a key that every token with at least `mass` reaches."""
    return key_of(highest + temperature * (tl.log(mass) - 1e-3) - 1e-5 * tl.abs(highest), SHIFT)


@jit
def _sure_bound(
    tops: tl.tensor,  # [runs] float32
    top_mass: tl.tensor,  # [runs] float32
    near: tl.tensor,  # [runs] float32
    temperature: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    wanted: tl.tensor,
    most: tl.tensor,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Returns a key such that the tokens from it on surely have the mass `wanted`; `low` if the runs do not
    show one. A run whose highest logit reaches a key counts with the mass of that logit, or with the mass
    near it if all tokens near it reach the key."""
    key, near_key = key_of(tops, SHIFT), key_of(_near_from(tops, temperature), SHIFT)
    more = tl.maximum(near - top_mass, 0.0)
    is_near = low > high
    while (low < high) & (is_near == 0):
        middle = (low | high) - ((low ^ high) >> 1)
        held = tl.where(key >= middle, top_mass, 0.0) + tl.where(near_key >= middle, more, 0.0)
        found = tl.sum(held, 0)
        is_enough = found >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
        is_near = is_enough & (found <= most)
    return low


@jit
def _values_of_runs(
    logits_ptr: tl.tensor,
    list_ptr: tl.tensor,
    first: tl.tensor,
    listed: tl.tensor,
    vocab_size: tl.tensor,
    RUN: tl.constexpr,
    COUNT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns (COUNT runs from entry `first` of the list on, [COUNT]; their tokens, [COUNT, RUN]; the logits
    of these, float32, -inf beyond the end)."""
    place = first + tl.arange(0, COUNT)
    run = tl.load(list_ptr + place, mask=place < listed, other=0)
    token = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    is_inside = (place < listed)[:, None] & (token < vocab_size)
    return run, token, tl.load(logits_ptr + token, mask=is_inside, other=-float("inf")).to(tl.float32)


@jit
def _draw(
    logits_ptr: tl.tensor,
    list_ptr: tl.tensor,
    unit: tl.tensor,
    listed: tl.tensor,
    bound: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    vocab_size: tl.tensor,
    SHIFT: tl.constexpr,
    RUN: tl.constexpr,
    UNIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (the best noisy score, its token) among the tokens of UNIT listed runs with keys of at least
    `bound`."""
    run, token, value = _values_of_runs(logits_ptr, list_ptr, unit * UNIT, listed, vocab_size, RUN, UNIT)
    group = run[:, None] * (RUN // 4) + tl.arange(0, RUN // 4)[None, :]
    noise = tl.reshape(noise_of_groups(seed, position, group), (UNIT, RUN))
    scaled = tl.div_rn(value - highest, temperature)
    is_kept = (key_of(value, SHIFT) >= bound) & (tl.exp(scaled) >= min_p)
    score = tl.where(is_kept, scaled + noise, -float("inf"))
    best = tl.max(tl.max(score, 1), 0)
    drawn = tl.min(tl.min(tl.where(is_kept & (score == best), token, 2**31 - 1), 1), 0)
    return best, tl.minimum(drawn, vocab_size - 1)


@jit
def _mass_above(
    logits_ptr: tl.tensor,
    list_ptr: tl.tensor,
    listed: tl.tensor,
    key: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    vocab_size: tl.tensor,
    SHIFT: tl.constexpr,
    RUN: tl.constexpr,
    TESTED: tl.constexpr,
) -> tl.tensor:
    """Returns the mass of the tokens with keys above `key`, all of which are in listed runs."""
    above = tl.zeros((TESTED, RUN), tl.float32)
    _, _, following = _values_of_runs(logits_ptr, list_ptr, 0, listed, vocab_size, RUN, TESTED)
    for first in range(0, listed, TESTED):
        value = following
        _, _, following = _values_of_runs(
            logits_ptr, list_ptr, first + TESTED, listed, vocab_size, RUN, TESTED
        )
        above += tl.where(key_of(value, SHIFT) > key, mass_of(value, highest, temperature), 0.0)
    return tl.sum(tl.sum(above, 1), 0)


@jit
def _first_kept(
    logits_ptr: tl.tensor,
    list_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    units: tl.tensor,
    listed: tl.tensor,
    limit: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    vocab_size: tl.tensor,
    UNITS: tl.constexpr,
    SHIFT: tl.constexpr,
    RUN: tl.constexpr,
    TESTED: tl.constexpr,
    UNIT: tl.constexpr,
) -> tl.tensor:
    """Returns the best token with less mass than `limit` above it. A unit whose candidate is rejected draws
    again, from the tokens above the rejected one."""
    unit = tl.arange(0, UNITS)
    # Other programs may have written these. From here on they are in registers, the same in all threads.
    score = tl.load(score_ptr + unit, mask=unit < units, other=-float("inf"), cache_modifier=".cg")
    drawn = tl.load(token_ptr + unit, mask=unit < units, other=0, cache_modifier=".cg")
    token, is_done = tl.full((), 0, tl.int32), units == 0
    while is_done == 0:
        best = tl.max(score, 0)
        token = tl.min(tl.where((score == best) & (unit < units), drawn, vocab_size - 1), 0)
        key = key_of(tl.load(logits_ptr + token).to(tl.float32), SHIFT)
        # There is no limit without top-p, or if logits are NaN.
        is_done = (best == -float("inf")) | ((limit < float("inf")) == 0)
        if is_done == 0:
            above = _mass_above(
                logits_ptr, list_ptr, listed, key, highest, temperature, vocab_size, SHIFT, RUN, TESTED
            )
            is_done = above < limit
        if is_done == 0:
            value = tl.load(logits_ptr + drawn, mask=unit < units, other=-float("inf")).to(tl.float32)
            is_rejected = ((unit < units) & (key_of(value, SHIFT) <= key)).to(tl.int32)
            while tl.max(is_rejected, 0) > 0:
                again = tl.argmax(is_rejected, 0)
                best_of_unit, token_of_unit = _draw(
                    logits_ptr, list_ptr, again, listed, key + 1, highest, temperature, min_p, seed, position,
                    vocab_size, SHIFT, RUN, UNIT,
                )  # fmt: skip
                score = tl.where(unit == again, best_of_unit, score)
                drawn = tl.where(unit == again, token_of_unit, drawn)
                is_rejected = tl.where(unit == again, 0, is_rejected)
    return token


@jit
def pick_by_rejection(
    logits_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    total_ptr: tl.tensor,
    top_ptr: tl.tensor,
    near_ptr: tl.tensor,
    list_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    vocab_size: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHIFT: tl.constexpr,
    RUN: tl.constexpr,
    TESTED: tl.constexpr,
    UNIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (the token sampled at one position, whether this program has it). The last program of a
    position to arrive has it. Each program draws from some units of runs. The result of a unit depends on the
    position alone, not on the program that computes it."""
    IN_CHUNK: tl.constexpr = CHUNK // RUN
    RUNS: tl.constexpr = CHUNKS * IN_CHUNK
    run = tl.arange(0, RUNS)
    is_run = run < chunks * IN_CHUNK
    tops = tl.load(top_ptr + run, mask=is_run, other=-float("inf"))
    lowest = key_of(tl.full((), -float("inf"), tl.float32), SHIFT) + 1
    base = tl.where(highest == -float("inf"), 0.0, highest)
    low, limit = lowest, float("inf")
    if min_p > 0:
        low = tl.maximum(low, _key_a_little_below(base, temperature, min_p, SHIFT))
    if top_p < 1:
        chunk = tl.arange(0, CHUNKS)
        chunk_highs = tl.load(highest_ptr + chunk, mask=chunk < chunks, other=-float("inf"))
        chunk_totals = tl.load(total_ptr + chunk, mask=chunk < chunks, other=0.0)
        total = tl.sum(chunk_totals * mass_of(chunk_highs, base, temperature), 0)
        limit = tl.maximum(top_p, 1e-30) * total
        highs = tl.load(highest_ptr + run // IN_CHUNK, mask=is_run, other=-float("inf"))
        near = tl.load(near_ptr + run, mask=is_run, other=0.0) * mass_of(highs, base, temperature)
        # The margin exceeds rounding errors. The search may stop early, which lists a few runs too many.
        wanted, most = 1.00001 * limit, 1.00001 * limit + 0.05 * (total - limit)
        top_mass = mass_of(tops, base, temperature)
        # Below this even the whole vocabulary would have less mass than top-p leaves out.
        least = tl.maximum((1 - top_p) * total / vocab_size, 1e-30)
        low = tl.maximum(low, _key_a_little_below(base, temperature, least, SHIFT))
        low = _sure_bound(tops, top_mass, near, temperature, low, key_of(highest, SHIFT), wanted, most, SHIFT)
    # All programs of a position write the same list.
    listed = list_runs(list_ptr, key_of(tops, SHIFT) >= low, RUNS)
    units = (listed + UNIT - 1) // UNIT
    for unit in range(tl.program_id(1), units, tl.num_programs(1)):
        best, drawn = _draw(
            logits_ptr, list_ptr, unit, listed, low, base, temperature, min_p, seed, position, vocab_size,
            SHIFT, RUN, UNIT,
        )  # fmt: skip
        tl.store(score_ptr + unit, best)
        tl.store(token_ptr + unit, drawn)
    programs = tl.minimum(tl.maximum(units, 1), tl.num_programs(1))
    is_last = tl.program_id(1) < programs
    if is_last:
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == programs - 1
    token = tl.full((), 0, tl.int32)
    if is_last:
        token = _first_kept(
            logits_ptr, list_ptr, score_ptr, token_ptr, units, listed, limit, base, temperature, min_p, seed, position,
            vocab_size, RUNS // UNIT, SHIFT, RUN, TESTED, UNIT,
        )  # fmt: skip
    return token, is_last
