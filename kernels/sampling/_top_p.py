"""The best token of those that top-p and min-p keep, drawn until one is kept: no threshold is searched for.

The best noisy score of all names a candidate. Where the tokens above it hold top-p's share, neither it nor
what lies below is kept, and the next is drawn from those above. A token has the best score as often as its
share says, so the first stands with a probability of top-p or more. Several programs share a line; the last
to arrive tests the candidates. Knows the logits and, of each run of RUN tokens, the highest logit and a part
of the mass; of top-k it knows nothing. FlashInfer rejects likewise
(https://flashinfer.ai/2025/03/10/sampling.html), but draws from sums instead of scores.
"""

from __future__ import annotations

from headway.kernels.runtime._triton import jit, tl
from headway.kernels.sampling._gumbel import noise_of_groups
from headway.kernels.sampling._top_k import key_of, list_runs


@jit
def mass_of(value: tl.tensor, highest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((value - highest) / temperature), but for rounding."""
    return tl.exp2((value - highest) * (1.4426950408889634 / temperature))


@jit
def _near_from(tops: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """The least logit that counts as near the best of its run."""
    return tops - 4.0 * temperature


@jit
def near_mass(
    value: tl.tensor,  # [runs, RUN] float32
    tops: tl.tensor,  # [runs] float32: the highest of each run
    mass: tl.tensor,  # [runs, RUN] float32
    temperature: tl.tensor,
) -> tl.tensor:
    """[runs]: what the tokens near the best of their run hold."""
    return tl.sum(tl.where(value >= _near_from(tops, temperature)[:, None], mass, 0.0), 1)


@jit
def _key_a_little_below(
    highest: tl.tensor, temperature: tl.tensor, mass: tl.tensor, SHIFT: tl.constexpr
) -> tl.tensor:
    """Tokens that hold `mass` have this key or more."""
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
    """A key such that tokens from it on surely hold `wanted`; `low` where the runs do not say so.

    Of a run that reaches down to a key, the best token counts, or, where all near it have that key or more,
    these.
    """
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
    """([COUNT] runs from place `first` of the list on, [COUNT, RUN] tokens, float32 logits; -inf beyond the
    end)."""
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
    """(the best score, its token) among those of UNIT listed runs that have keys of `bound` or more."""
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
    """Returns the mass of the tokens with keys above `key`, all of which lie in listed runs."""
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
    """The best token with less than `limit` above it; units whose best is rejected are drawn from anew,
    further up."""
    unit = tl.arange(0, UNITS)
    # Other programs may have written these; from here on they stay in registers, the same in all threads.
    score = tl.load(score_ptr + unit, mask=unit < units, other=-float("inf"), cache_modifier=".cg")
    drawn = tl.load(token_ptr + unit, mask=unit < units, other=0, cache_modifier=".cg")
    token, is_done = tl.full((), 0, tl.int32), units == 0
    while is_done == 0:
        best = tl.max(score, 0)
        token = tl.min(tl.where((score == best) & (unit < units), drawn, vocab_size - 1), 0)
        key = key_of(tl.load(logits_ptr + token).to(tl.float32), SHIFT)
        # There is no limit without top-p, and none where logits are no numbers.
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
    """(the token picked in one line, whether this program knows it: of the line's programs the last one
    does).

    Each draws from some units of runs; what a unit gives depends on the line alone, not on who takes it.
    """
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
        # More than rounding could feign; the search may stop early, at the price of a few runs too many.
        wanted, most = 1.00001 * limit, 1.00001 * limit + 0.05 * (total - limit)
        top_mass = mass_of(tops, base, temperature)
        # Below this even the whole vocabulary would hold less than what top-p leaves out.
        least = tl.maximum((1 - top_p) * total / vocab_size, 1e-30)
        low = tl.maximum(low, _key_a_little_below(base, temperature, least, SHIFT))
        low = _sure_bound(tops, top_mass, near, temperature, low, key_of(highest, SHIFT), wanted, most, SHIFT)
    # All programs of a line write the same list.
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
