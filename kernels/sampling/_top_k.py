"""Samples with top-k, and then top-p and min-p, without sorting.

The inputs are the logits of one position and the highest logit of each run of RUN tokens, which shows the
runs that can contain kept tokens. Thresholds are searched among the tokens gathered from these runs, or among
the whole vocabulary if they are more than FEW.
"""

from __future__ import annotations

from headway.kernels.runtime._triton import jit, tl
from headway.kernels.sampling._gumbel import noise_of_ids


@jit
def key_of(value: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Returns int32 keys in the order of the float32 values, whose last SHIFT bits are zeros. Both zeros have
    the same key."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@jit
def _bound_of_runs(
    key: tl.tensor,  # [runs] int32: the key of each run's highest logit
    low: tl.tensor,
    high: tl.tensor,
    top_k: tl.tensor,
) -> tl.tensor:
    """Returns a key between low and high that top_k runs or more reach, and not many more if keys allow
    it."""
    is_near = low > high
    while (low < high) & (is_near == 0):
        middle = (low | high) - ((low ^ high) >> 1)
        found = tl.sum((key >= middle).to(tl.float32), 0)
        is_enough = found >= top_k
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
        is_near = is_enough & (found <= 1.25 * top_k)
    return low


@jit
def list_runs(list_ptr: tl.tensor, is_listed: tl.tensor, RUNS: tl.constexpr) -> tl.tensor:
    """Writes the indices of the listed runs in order; returns their number."""
    slot = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.store(list_ptr + slot, tl.arange(0, RUNS), mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32), 0)


@jit
def _gather(
    logits_ptr: tl.tensor,
    key: tl.tensor,  # [runs] int32
    least: tl.tensor,
    vocab_size: tl.tensor,
    list_ptr: tl.tensor,
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    SHIFT: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    LISTED: tl.constexpr,
    FEW: tl.constexpr,
) -> tl.tensor:
    """Returns the number of tokens with keys of at least `least`; writes the first FEW of them in order."""
    listed = list_runs(list_ptr, key >= least, RUNS)
    size = tl.full((), 0, tl.int32)
    for first in range(0, listed, LISTED):
        place = first + tl.arange(0, LISTED)
        run = tl.load(list_ptr + place, mask=place < listed, other=0)
        token = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
        is_inside = (place < listed)[:, None] & (token < vocab_size)
        value = tl.load(logits_ptr + token, mask=is_inside, other=-float("inf")).to(tl.float32)
        is_found = key_of(value, SHIFT) >= least
        found = is_found.to(tl.int32)
        in_run = tl.sum(found, 1)
        slot = size + (tl.cumsum(in_run, 0) - in_run)[:, None] + tl.cumsum(found, 1) - 1
        tl.store(value_ptr + slot, value, mask=is_found & (slot < FEW))
        tl.store(id_ptr + slot, token, mask=is_found & (slot < FEW))
        size += tl.sum(in_run, 0)
    tl.debug_barrier()
    return size


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
    """Returns the number of tokens with keys of at least `least`, or their probability mass."""
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(value_ptr + index, mask=index < size, other=-float("inf")).to(tl.float32)
        is_found = key_of(value, SHIFT) >= least
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
    """Returns the smallest key, from `low` on, above which there are fewer tokens, or less mass, than
    `limit`."""
    high = key_of(highest, SHIFT)
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
    seed: tl.tensor,
    position: tl.tensor,
    SHIFT: tl.constexpr,
    PAIRED: tl.constexpr,
) -> tl.tensor:
    """Returns what `_best_kept` returns, for up to PAIRED tokens, by comparing each token with each."""
    index = tl.arange(0, PAIRED)
    value = tl.load(value_ptr + index, mask=index < size, other=-float("inf"))
    token = tl.load(id_ptr + index, mask=index < size, other=2**31 - 1)
    scaled = tl.div_rn(value - highest, temperature)
    mass = tl.exp(scaled)
    other_value = tl.load(value_ptr + index, mask=index < size, other=-float("inf"))
    other_mass = tl.exp(tl.div_rn(other_value - highest, temperature))
    is_above = key_of(other_value, SHIFT)[:, None] > key_of(value, SHIFT)[None, :]
    is_kept = (index < size) & (tl.sum(is_above.to(tl.int32), 0) < top_k)
    if top_p < 1:
        total = tl.sum(tl.where(is_kept, mass, 0.0), 0)
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
    seed: tl.tensor,
    position: tl.tensor,
    HAS_IDS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns the token with the best noisy score among those that the filters keep, which all have keys of
    at least `low`."""
    limit = top_k.to(tl.float32)
    least = _least_kept_key(value_ptr, size, highest, temperature, low, limit, False, SHIFT, BLOCK)
    if top_p < 1:
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
        is_kept = (key_of(value, SHIFT) >= least) & (tl.exp(scaled) >= min_p)
        score = tl.where(is_kept, scaled + noise_of_ids(seed, position, token), -float("inf"))
        block_score = tl.max(score, 0)
        if block_score > best_score:
            best_token = tl.min(tl.where(score == block_score, token, 2**31 - 1), 0)
            best_score = block_score
    return best_token


@jit
def pick_kept(
    logits_ptr: tl.tensor,
    top_ptr: tl.tensor,
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
    RUNS: tl.constexpr,
    SHIFT: tl.constexpr,
    RUN: tl.constexpr,
    LISTED: tl.constexpr,
    FEW: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns the token sampled at one position. For k runs the smallest of their highest logits is at most
    the k-th largest logit, so that all tokens that top-k keeps are in runs whose highest logit reaches that
    bound. Masked tokens (-inf) are never gathered."""
    run = tl.arange(0, RUNS)
    key = key_of(tl.load(top_ptr + run, mask=run < runs, other=-float("inf")), SHIFT)
    lowest = key_of(tl.full((), -float("inf"), tl.float32), SHIFT) + 1
    low = _bound_of_runs(key, lowest, key_of(highest, SHIFT), top_k.to(tl.float32))
    size = _gather(
        logits_ptr, key, low, vocab_size, list_ptr, value_ptr, id_ptr, SHIFT, RUNS, RUN, LISTED, FEW
    )
    token = tl.full((), 0, tl.int32)
    if size > FEW:
        token = _best_kept(
            logits_ptr, id_ptr, vocab_size, highest, temperature, lowest, top_k, top_p, min_p, seed, position,
            False, SHIFT, 2 * BLOCK,
        )  # fmt: skip
    elif size > PAIRED:
        token = _best_kept(
            value_ptr, id_ptr, size, highest, temperature, low, top_k, top_p, min_p, seed, position,
            True, SHIFT, BLOCK,
        )  # fmt: skip
    elif size > 0:
        token = _best_of_pairs(
            value_ptr, id_ptr, size, highest, temperature, top_k, top_p, min_p, seed, position, SHIFT, PAIRED
        )
    return token
