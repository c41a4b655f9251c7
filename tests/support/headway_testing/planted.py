"""Planted faults: of rounding that follows the number of rows, where the engine's layers call the kernels,
and of checkpoints.

A fault of rounding computes what the kernel computes, in another order of sums, so that results differ in
their last bits only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import headway.kernels
from headway.engine.execution.device_rows import DeviceRows
from headway.engine.scheduling.plan import Plan
from headway.engine.state.pool import StatePool
from headway.kernels import Activation, DenseWeight, Epilogue, QueryBatch, ScoreRule, Weight

FEW_ROWS = 8
MAX_WINDOW = 9  # of a decode round

Operation = Callable[..., Any]


def plant(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[[Operation], Operation]) -> None:
    """Replaces an operation of `headway.kernels` in each module of the engine that has imported it."""
    original = getattr(headway.kernels, name)
    faulty = fault(original)
    users = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("headway.engine") and getattr(module, name, None) is original
    ]
    assert users, f"no module of the engine imports {name}"
    for module in users:
        monkeypatch.setattr(module, name, faulty)


def splits_products_of_few_rows(original: Operation) -> Operation:
    """Sums a product of few rows in two halves of its inputs, where nothing is fused with it."""

    def linear(x: Activation, weight: Weight, epilogue: Epilogue = Epilogue(), **kwargs: Any) -> Activation:  # noqa: B008
        is_plain = epilogue._replace(bias=None) == Epilogue() and x.deferred is None and not kwargs
        if not (is_plain and isinstance(weight, DenseWeight) and len(x.values) <= FEW_ROWS):
            return original(x, weight, epilogue, **kwargs)  # type: ignore[no-any-return]
        inputs, weights = _wide(x.values), _wide(weight.values)
        middle = inputs.shape[1] // 2
        product = inputs[:, :middle] @ weights[:, :middle].T + inputs[:, middle:] @ weights[:, middle:].T
        if epilogue.bias is not None:
            product += epilogue.bias
        return Activation(product.to(x.values.dtype))

    return linear


def sums_norms_of_many_rows_otherwise(original: Operation) -> Operation:
    """Sums the squares of even and of odd places apart, for more than a few rows. For `rms_norm`."""

    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, unit_offset: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        out = kwargs.get("out")
        if len(x) <= FEW_ROWS or kwargs.get("step") is not None:
            return original(x, weight, epsilon, unit_offset=unit_offset, **kwargs)  # type: ignore[no-any-return]
        normed = _normed(x, weight, epsilon, unit_offset=unit_offset)
        return normed if out is None else out.copy_(normed)

    return rms_norm


def sums_added_norms_of_many_rows_otherwise(original: Operation) -> Operation:
    """Does the same for `add_rms_norm`."""

    def add_rms_norm(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        unit_offset: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        result: torch.Tensor = original(x, residual, weight, epsilon, unit_offset=unit_offset, **kwargs)
        if len(x) <= FEW_ROWS or kwargs.get("step") is not None:
            return result
        return _normed(residual, weight, epsilon, unit_offset=unit_offset)

    return add_rms_norm


def _normed(
    x: torch.Tensor,  # [rows, hidden]
    weight: torch.Tensor,  # [hidden]
    epsilon: float,
    *,
    unit_offset: bool,
) -> torch.Tensor:
    """Returns [rows, hidden], rounded where the kernel rounds."""
    wide = _wide(x)
    squares = wide.square()
    mean = (squares[:, ::2].sum(1, keepdim=True) + squares[:, 1::2].sum(1, keepdim=True)) / x.shape[1]
    wide = wide * torch.rsqrt(mean + epsilon)
    return (wide * (1 + _wide(weight))).to(x.dtype) if unit_offset else weight * wide.to(x.dtype)


def splits_keys_of_many_rows(original: Operation) -> Operation:
    """Runs attention over two parts of the keys, which are merged, where a round has more than a few
    queries."""

    def attention(
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: QueryBatch,
        rule: ScoreRule,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result: torch.Tensor = original(query, key_cache, value_cache, batch, rule, out=out)
        window = batch.lengths
        if isinstance(window, int) and window <= MAX_WINDOW and batch.num_tokens > FEW_ROWS:
            table = batch.block_table.clamp(min=0)
            keys, values = (_gathered(cache, table) for cache in (key_cache, value_cache))
            queries = query[batch.tokens].view(len(table), window, *query.shape[1:])
            merged = _in_two_parts(queries, keys, values, batch.start_positions, rule)
            result[batch.tokens] = merged.flatten(0, 1).to(result.dtype)
        return result

    return attention


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in the dtype of sums: float64 for float64, else float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _gathered(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Returns [rows, keys, kv_heads, head_dim] in a wide type, with zeros for what memory holds besides
    numbers."""
    return _wide(cache[table].flatten(1, 2)).nan_to_num()


def _in_two_parts(
    queries: torch.Tensor,  # [rows, window, q_heads, head_dim]
    keys: torch.Tensor,  # [rows, keys, kv_heads, head_dim] of a wide type
    values: torch.Tensor,  # likewise
    starts: torch.Tensor,  # [rows] int64
    rule: ScoreRule,
) -> torch.Tensor:
    """Returns [rows, window, q_heads, head_dim]."""
    rows, window, q_heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    grouped = _wide(queries).view(rows, window, kv_heads, q_heads // kv_heads, head_dim)
    scores = torch.einsum("rwhgd,rkhd->rhgwk", grouped, keys) * rule.scale
    places = torch.arange(keys.shape[1], device=keys.device)
    ends = starts[:, None] + torch.arange(window, device=keys.device)
    is_visible = (places <= ends[..., None]) & (places >= rule.first_position)
    if rule.window > 0:
        is_visible &= places > ends[..., None] - rule.window
    scores = scores.masked_fill(~is_visible[:, None, None], float("-inf"))
    is_first = places < (ends[..., None] + 1) // 2
    parts = []
    for is_part in (is_first, ~is_first):
        own = scores.masked_fill(~is_part[:, None, None], float("-inf"))
        top = own.amax(-1, keepdim=True).clamp(min=-1e30)
        weights = (own - top).exp()
        sums = torch.einsum("rhgwk,rkhd->rhgwd", weights, values)
        parts.append((top, weights.sum(-1, keepdim=True), sums))
    (top, total, sums), (other_top, other_total, other_sums) = parts
    largest = torch.maximum(top, other_top)
    own, other = (top - largest).exp(), (other_top - largest).exp()
    merged = (sums * own + other_sums * other) / (total * own + other_total * other).clamp(min=1e-30)
    return merged.permute(0, 3, 1, 2, 4).flatten(2, 3)


def forgets_checkpoints(patch: pytest.MonkeyPatch) -> None:
    """A row that goes on from a cached prefix begins with a state of zeros."""
    start = StatePool.start_rows
    patch.setattr(StatePool, "start_rows", lambda pool, ids, c: start(pool, ids, torch.full_like(c, -1)))


def saves_checkpoints_too_early(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint holds the state before its chunk."""
    update, save = DeviceRows.update, DeviceRows.save

    def update_and_save(table: DeviceRows, plan: Plan) -> Any:
        faults = update(table, plan)
        save(table, plan.saves)
        return faults

    patch.setattr(DeviceRows, "update", update_and_save)
    patch.setattr(DeviceRows, "save", lambda *_: None)
