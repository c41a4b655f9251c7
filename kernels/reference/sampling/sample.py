"""Samples tokens by Gumbel-max with noise that depends on (seed, position, vocabulary id) alone (PyTorch
twin).

Knows neither drafters nor targets: both call it with the same positions and seeds, so that they agree where
their logits do.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.sampling._philox import philox_4x32

_LOW = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1 - 2.0**-24
_SERIES_BELOW = 2.0**-8
_FIRST_CANDIDATES = 64
_WORDS_AT_ONCE = 2**16
# Below this share of kept tokens their noise is generated one by one instead of in groups of four.
_FEW = 1 / 8


def gumbel_noise(
    seeds: torch.Tensor,  # [rows] int64
    positions: torch.Tensor,  # [rows] int64
    vocab_size: int,
) -> torch.Tensor:
    """Returns the noise, [rows, vocab] float32: word id % 4 of Philox with key seed and counter (id // 4,
    position, 0), transformed to a Gumbel distribution.

    With v uniform in (0, 1) the noise is -log(E), E = -log(1 - v). A small E decides which rare token may
    win, so that it is computed by its series if 1 - v would round.
    """
    groups = -(-vocab_size // 4)
    group = torch.arange(groups, device=seeds.device)
    noise = torch.empty(seeds.numel(), groups * 4, device=seeds.device)
    # Few rows are computed at a time, so that they stay in the processor's cache.
    step = max(1, _WORDS_AT_ONCE // max(vocab_size, 1))
    for first in range(0, seeds.numel(), step):
        some = slice(first, first + step)
        words02, words13 = _random_words(seeds[some, None], positions[some, None], group)
        words = torch.stack((words02.float(), words13.float()), -1).permute(1, 2, 0, 3)
        noise[some] = _gumbel(words.reshape(-1, groups * 4))
    return noise[:, :vocab_size]


def _noise_at(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the number of `gumbel_noise` for each (seed, position, vocabulary id), [n] int64 each, as [n]
    float32."""
    words02, words13 = _random_words(seeds[None], positions[None], ids >> 2)
    words = torch.stack((words02, words13), 1).view(4, -1)
    return _gumbel(words.gather(0, (ids & 3)[None])[0].float())


def _random_words(
    seeds: torch.Tensor, positions: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns words 0, 2 and words 1, 3 of each group, [2, rows, n] int64 each. The arguments broadcast to
    [rows, n] int64."""
    key = torch.stack((seeds & _LOW, (seeds >> 32) & _LOW))
    low, high = positions & _LOW, (positions >> 32) & _LOW
    even = torch.stack((groups.expand(seeds.shape[0], -1), high.expand(-1, groups.shape[-1])))
    return philox_4x32(even, torch.stack((low, torch.zeros_like(low))), key)


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    """Returns the noise. words: random 32-bit numbers as float32, which are overwritten."""
    v = words.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    series = (v * 0.25).add_(1 / 3).mul_(v).add_(0.5).mul_(v).add_(1).mul_(v)
    return torch.where(v < _SERIES_BELOW, series, (1 - v).log_().neg_()).log_().neg_()


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

    The order is temperature, top-k, top-p, min-p. Ties go to the lowest id. broken: [rows, window] bool,
    written: whether a logit is NaN or +inf, so that there are no probabilities; the token of such a position
    has no meaning, but it is a valid id. -inf is a masked token.
    """
    values = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    tokens = values.argmax(-1)
    if broken is not None:
        # argmax treats NaN as the greatest, and NaN is not less than anything.
        is_broken = ~(values.gather(-1, tokens[..., None])[..., 0] < torch.inf)
        broken.copy_(is_broken if only is None else torch.where(only[:, None], is_broken, broken))
    random_rows = (temperatures > 0).nonzero()[:, 0]
    if random_rows.numel() > 0:
        parameters = (positions, temperatures, top_k, top_p, min_p, seeds)
        if random_rows.numel() == tokens.shape[0]:
            tokens = _sample_random(values, *parameters)
        else:
            tokens[random_rows] = _sample_random(values[random_rows], *(p[random_rows] for p in parameters))
    if out is None:
        return tokens
    return out.copy_(tokens if only is None else torch.where(only[:, None], tokens, out))


def _sample_random(
    values: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
) -> torch.Tensor:
    rows, window, vocab_size = values.shape
    # Relative to the highest logit nothing overflows, however small the temperature.
    scaled = (values - values.amax(-1, keepdim=True)) / temperatures.view(rows, 1, 1)
    kept = _keep_probable(_keep_top_k(scaled, top_k), top_p, min_p)
    places = (positions[:, None] + torch.arange(window, device=positions.device)).flatten()
    flat, seeds = kept.view(rows * window, vocab_size), seeds.repeat_interleave(window)
    if kept is not scaled:
        row, token = (flat > -torch.inf).nonzero(as_tuple=True)
        if token.numel() < flat.numel() * _FEW:
            scores = flat[row, token] + _noise_at(seeds[row], places[row], token)
            return flat.index_put((row, token), scores).argmax(-1).view(rows, window)
    return (flat + gumbel_noise(seeds, places, vocab_size)).argmax(-1).view(rows, window)


def _keep_top_k(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Masks values below the k-th largest; ties with it stay."""
    largest_k = min(int(top_k.max()), scaled.shape[-1])
    if largest_k <= 0:
        return scaled
    place = (top_k.clamp(1, largest_k) - 1).view(-1, 1, 1).expand(-1, scaled.shape[1], 1)
    lowest = scaled.topk(largest_k, dim=-1).values.gather(-1, place)
    return scaled.masked_fill((scaled < lowest) & (top_k > 0).view(-1, 1, 1), -torch.inf)


def _keep_probable(scaled: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    uses_top_p, uses_min_p = bool((top_p < 1).any()), bool((min_p > 0).any())
    if not (uses_top_p or uses_min_p):
        return scaled
    probabilities = scaled.softmax(-1)
    floor = min_p.view(-1, 1, 1) * probabilities.amax(-1, keepdim=True)
    if uses_top_p:
        floor = torch.maximum(floor, _top_p_floor(probabilities, top_p))
    return scaled.masked_fill(probabilities < floor, -torch.inf)


def _top_p_floor(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Returns the smallest probability that top-p keeps, [rows, window, 1]; 0 where top-p is off. In
    descending order a token is kept if the sum of those before it is below top_p, and so are all that tie
    with the last one kept. Mostly few candidates have that mass; more are taken until they have it."""
    share = top_p.view(-1, 1, 1)
    count = min(_FIRST_CANDIDATES, probabilities.shape[-1])
    while True:
        candidates = probabilities.topk(count, dim=-1).values
        sums = candidates.cumsum(-1)
        is_enough = (sums[..., -1:] >= share) | (share >= 1)
        if count == probabilities.shape[-1] or bool(is_enough.all()):
            break
        count = min(count * 8, probabilities.shape[-1])
    last_kept = (sums[..., :-1] < share).sum(-1, keepdim=True)
    return torch.where(share < 1, candidates.gather(-1, last_kept), 0)
