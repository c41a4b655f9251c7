"""The best token of those that top-k, top-p and min-p keep, without sorting.

Knows the logits of one line and, of each run of RUN tokens, the highest logit and the mass. From these follows
which runs can hold kept tokens; thresholds are searched among the tokens gathered from there, or, where these
are more than FEW, among the whole vocabulary.
"""

from __future__ import annotations

from headway.kernels._noise import noise_of_ids
from headway.kernels._triton import jit, tl


@jit
def _key(value: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """int32 with the order of the float32 values, whose last SHIFT bits are zeros; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@jit
def _runs_above(
    key: tl.tensor,  # [runs] int32: of each run's highest logit
    weight: tl.tensor,  # [runs] float32
    low: tl.tensor,
    high: tl.tensor,
    wanted: tl.tensor,
    most: tl.tensor,
) -> tl.tensor:
    """A key between low and high: the runs from it on weigh `wanted` and, where keys allow, not above `most`."""
    is_near = low > high
    while (low < high) & (is_near == 0):
        middle = (low | high) - ((low ^ high) >> 1)
        found = tl.sum(tl.where(key >= middle, weight, 0.0), 0)
        is_enough = found >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
        is_near = is_enough & (found <= most)
    return low


@jit
def _gather(
    logits_ptr: tl.tensor,
    key: tl.tensor,  # [runs] int32
    least: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    vocab_size: tl.tensor,
    list_ptr: tl.tensor,
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    SHIFT: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    LISTED: tl.constexpr,
    FEW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(how many tokens have keys of `least` or more, their mass); writes the first FEW of them, in order."""
    is_listed = (key >= least).to(tl.int32)
    tl.debug_barrier()
    tl.store(list_ptr + tl.cumsum(is_listed, 0) - 1, tl.arange(0, RUNS), mask=is_listed != 0)
    tl.debug_barrier()
    listed = tl.sum(is_listed, 0)
    size = tl.full((), 0, tl.int32)
    mass = tl.zeros((LISTED, RUN), tl.float32)
    for first in range(0, listed, LISTED):
        place = first + tl.arange(0, LISTED)
        run = tl.load(list_ptr + place, mask=place < listed, other=0)
        token = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
        is_inside = (place < listed)[:, None] & (token < vocab_size)
        value = tl.load(logits_ptr + token, mask=is_inside, other=-float("inf")).to(tl.float32)
        is_found = _key(value, SHIFT) >= least
        mass += tl.where(is_found, tl.exp(tl.div_rn(value - highest, temperature)), 0.0)
        found = is_found.to(tl.int32)
        in_run = tl.sum(found, 1)
        slot = size + (tl.cumsum(in_run, 0) - in_run)[:, None] + tl.cumsum(found, 1) - 1
        tl.store(value_ptr + slot, value, mask=is_found & (slot < FEW))
        tl.store(id_ptr + slot, token, mask=is_found & (slot < FEW))
        size += tl.sum(in_run, 0)
    tl.debug_barrier()
    return size, tl.sum(tl.sum(mass, 1), 0)


@jit
def _found_from(
    value_ptr: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    BY_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How many tokens have keys of `least` or more, or the mass of these."""
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(value_ptr + index, mask=index < size, other=-float("inf")).to(tl.float32)
        is_found = _key(value, SHIFT) >= least
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
    low: tl.tensor,
    limit: tl.tensor,
    BY_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The least key, `low` or more, above which less than `limit` is found, tokens or mass."""
    high = _key(highest, SHIFT)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        above = _found_from(value_ptr, size, highest, temperature, middle + 1, BY_MASS, SHIFT, BLOCK)
        low = tl.where(above < limit, low, middle + 1)
        high = tl.where(above < limit, middle, high)
    return low


@jit
def _best_of_pairs(
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
    SHIFT: tl.constexpr,
    PAIRED: tl.constexpr,
) -> tl.tensor:
    """As `_best_kept`, for up to PAIRED tokens: each is compared with each, nothing is searched."""
    index = tl.arange(0, PAIRED)
    value = tl.load(value_ptr + index, mask=index < size, other=-float("inf"))
    token = tl.load(id_ptr + index, mask=index < size, other=2**31 - 1)
    scaled = tl.div_rn(value - highest, temperature)
    mass = tl.exp(scaled)
    other_value = tl.load(value_ptr + index, mask=index < size, other=-float("inf"))
    other_mass = tl.exp(tl.div_rn(other_value - highest, temperature))
    is_above = _key(other_value, SHIFT)[:, None] > _key(value, SHIFT)[None, :]
    is_kept = index < size
    if top_k > 0:
        is_kept &= tl.sum(is_above.to(tl.int32), 0) < top_k
        total = tl.sum(tl.where(is_kept, mass, 0.0), 0)
    if top_p < 1:
        mass_above = tl.sum(tl.where(is_above, other_mass[:, None], 0.0), 0)
        is_kept &= mass_above < tl.maximum(top_p, 1e-30) * total
    is_kept &= mass >= min_p
    score = tl.where(is_kept, scaled + noise_of_ids(seed, position, token), -float("inf"))
    best_score = tl.max(score, 0)
    return tl.min(tl.where(is_kept & (score == best_score), token, 2**31 - 1), 0)


@jit
def _best_kept(
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    low: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    mass: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    HAS_IDS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token with the best noisy score of those that the filters keep; all have keys of `low` or more.

    mass: that of the whole vocabulary.
    """
    least = low
    if top_k > 0:
        limit = top_k.to(tl.float32)
        least = _least_kept_key(value_ptr, size, highest, temperature, least, limit, False, SHIFT, BLOCK)
    if top_p < 1:
        if top_k > 0:
            mass = _found_from(value_ptr, size, highest, temperature, least, True, SHIFT, BLOCK)
        limit = tl.maximum(top_p, 1e-30) * mass
        least = _least_kept_key(value_ptr, size, highest, temperature, least, limit, True, SHIFT, BLOCK)
    best_score, best_token = -float("inf"), tl.full((), 0, tl.int32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(value_ptr + index, mask=index < size, other=-float("inf")).to(tl.float32)
        token = index
        if HAS_IDS:
            token = tl.load(id_ptr + index, mask=index < size, other=0)
        scaled = tl.div_rn(value - highest, temperature)
        is_kept = (_key(value, SHIFT) >= least) & (tl.exp(scaled) >= min_p)
        score = tl.where(is_kept, scaled + noise_of_ids(seed, position, token), -float("inf"))
        block_score = tl.max(score, 0)
        if block_score > best_score:
            best_token = tl.min(tl.where(score == block_score, token, 2**31 - 1), 0)
            best_score = block_score
    return best_token


@jit
def pick_kept(
    logits_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    top_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    list_ptr: tl.tensor,
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    vocab_size: tl.tensor,
    runs: tl.tensor,
    CHUNK: tl.constexpr,
    RUNS: tl.constexpr,
    SHIFT: tl.constexpr,
    RUN: tl.constexpr,
    LISTED: tl.constexpr,
    FEW: tl.constexpr,
    PAIRED: tl.constexpr,
    WIDENINGS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token picked in one line.

    Of as many runs as top-k keeps tokens, the least of the highest logits is no more than the k-th largest logit:
    all that top-k keeps lies in runs whose highest logit reaches it. For top-p tokens are gathered ever further
    down until they hold the mass. Masked tokens, -inf, are never gathered.
    """
    run = tl.arange(0, RUNS)
    tops = tl.load(top_ptr + run, mask=run < runs, other=-float("inf"))
    key = _key(tops, SHIFT)
    lowest = _key(tl.full((), -float("inf"), tl.float32), SHIFT) + 1
    high = _key(highest, SHIFT)
    weight = (tops > -float("inf")).to(tl.float32)  # of a run: one, or for top-p its mass
    total, rest = 0.0, 0.0
    low = lowest
    if top_k > 0:
        low = _runs_above(key, weight, lowest, high, top_k.to(tl.float32), 1.25 * top_k.to(tl.float32))
    elif top_p < 1:
        base = tl.load(highest_ptr + run // (CHUNK // RUN), mask=run < runs, other=-float("inf"))
        weight = tl.load(mass_ptr + run, mask=run < runs, other=0.0)
        weight *= tl.exp(tl.div_rn(base - highest, temperature))
        total = tl.sum(weight, 0)
        rest = (1 - top_p) * total * 0.5
        low = _runs_above(key, weight, lowest, high, total - rest, total - 0.5 * rest)
    else:
        # A little below what min-p keeps.
        least = highest + temperature * (tl.log(min_p) - 1e-3) - 1e-5 * tl.abs(highest)
        low = tl.maximum(_key(least, SHIFT), lowest)
    least_mass = tl.where(top_k > 0, 0.0, top_p * total)
    size, widened, is_done = tl.full((), 0, tl.int32), 0, high < low
    while is_done == 0:
        size, mass = _gather(
            logits_ptr, key, low, highest, temperature, vocab_size, list_ptr, value_ptr, id_ptr,
            SHIFT, RUNS, RUN, LISTED, FEW,
        )  # fmt: skip
        is_done = (mass >= least_mass) | (size > FEW) | (low == lowest)
        if is_done == 0:
            rest *= 0.25
            widened += 1
            low = _runs_above(key, weight, lowest, high, total - rest, total - 0.5 * rest)
            low = tl.where(widened == WIDENINGS, lowest, low)
    token = tl.full((), 0, tl.int32)
    if size > FEW:
        token = _best_kept(
            logits_ptr, id_ptr, vocab_size, highest, temperature, lowest, top_k, top_p, min_p, total, seed, position,
            False, SHIFT, 2 * BLOCK,
        )  # fmt: skip
    elif size > PAIRED:
        token = _best_kept(
            value_ptr, id_ptr, size, highest, temperature, low, top_k, top_p, min_p, total, seed, position,
            True, SHIFT, BLOCK,
        )  # fmt: skip
    elif size > 0:
        token = _best_of_pairs(
            value_ptr, id_ptr, size, highest, temperature, top_k, top_p, min_p, total, seed, position, SHIFT, PAIRED
        )  # fmt: skip
    return token
