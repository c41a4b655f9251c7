"""Ten thousand random calls on a GPU: equal to the twins bit by bit, and nothing else in memory changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import pytest
import torch
from headway_testing.round_rows import RUBBISH, random_rows

from headway import kernels
from headway.kernels import RoundWindow, RowState, reference

CALLS, PARTS = 10_000, 4
GUARD_BYTES, ALIGNMENT = 96, 16
Views = dict[str, torch.Tensor]


@dataclass
class Call:
    """One call of an operation: what it gets, what it may change, and where its rows are padding."""

    inputs: Views
    run: Callable[[object, Views], object]  # with the module of the kernels or that of the twins
    written: set[str]
    padding: dict[str, torch.Tensor] = field(default_factory=dict)  # rows that must stay, by tensor
    is_exact: bool = True


class Arena:
    """All tensors of a call in one allocation, random bytes before, between and behind them."""

    def __init__(self, call: Call, generator: torch.Generator) -> None:
        self.places: dict[str, tuple[int, torch.Tensor]] = {}
        end = GUARD_BYTES
        for name, tensor in call.inputs.items():
            self.places[name] = end, tensor
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT + GUARD_BYTES
        cells = torch.randint(0, 255, (end,), dtype=torch.uint8, generator=generator)
        may_change = torch.zeros(end, dtype=torch.bool)
        for name, (start, tensor) in self.places.items():
            cells[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
            if name in call.written:
                kept = call.padding.get(name, torch.zeros(len(tensor), dtype=torch.bool))
                per_row = tensor.nbytes // max(len(tensor), 1)
                may_change[start : start + tensor.nbytes] = ~kept.repeat_interleave(per_row)
        self.before = cells.cuda()
        self.must_stay = ~may_change.cuda()

    def views(self, cells: torch.Tensor) -> Views:
        return {
            name: cells[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for name, (start, tensor) in self.places.items()
        }


def row_state(views: Views) -> RowState:
    return RowState(*(views[f.name] for f in fields(RowState)))


def columns(rows: RowState) -> Views:
    return {f.name: getattr(rows, f.name) for f in fields(RowState)}


ADVANCED = {"kv_lengths", "last_block_offsets", "block_counts", "last_block_ids", "kv_block_ids"}


def a_round(draw: random.Random, depth: int, block_size: int) -> tuple[RowState, dict[str, torch.Tensor]]:
    rows = random_rows(draw.randint(1, 40), block_size, depth, draw.randint(0, 10**9), "cpu")
    is_padding = rows.kv_lengths >= rows.limits
    return rows, {name: is_padding for name in columns(rows) if name != "prefill_status"}


def opening(draw: random.Random, depth: int, block_size: int) -> Call:
    rows, padding = a_round(draw, depth, block_size)
    num_rows = len(rows.limits)
    window = RoundWindow.empty(num_rows, depth, torch.device("cpu"))
    opened = {f.name: getattr(window, f.name) for f in fields(RoundWindow)}
    for tensor in opened.values():
        tensor.fill_(1)
    drafts = torch.randint(0, 9, (num_rows, depth))

    def run(module: object, views: Views) -> object:
        out = RoundWindow(*(views[name] for name in opened))
        return module.prepare_verify_inputs(row_state(views), views["drafts"], block_size, out=out)  # type: ignore[attr-defined]

    written = ADVANCED | set(opened) | {"prefill_status"}
    return Call(columns(rows) | opened | {"drafts": drafts}, run, written, padding)


def committing(draw: random.Random, depth: int, block_size: int) -> Call:
    rows, padding = a_round(draw, depth, block_size)
    num_rows = len(rows.limits)
    sampled = torch.randint(0, 3, (num_rows, depth + 1))
    drafts = torch.where(torch.rand(num_rows, depth) < 0.3, 7, sampled[:, :-1])
    window = reference.prepare_verify_inputs(rows, drafts, block_size)
    opened = {f.name: getattr(window, f.name) for f in fields(RoundWindow)}
    emitted = torch.full((num_rows, depth + 2), RUBBISH)

    def run(module: object, views: Views) -> object:
        out = RoundWindow(*(views[name] for name in opened))
        given = row_state(views), out, views["sampled"], block_size
        return module.verify_and_rewind(*given, broken=views["broken"], out=views["emitted"])  # type: ignore[attr-defined]

    written = ADVANCED | {"last_tokens", "pending_tokens", "pending_counts", "emitted"}
    broken = torch.rand(num_rows, depth + 1) < 0.3
    given = columns(rows) | opened | {"sampled": sampled, "broken": broken, "emitted": emitted}
    return Call(given, run, written, padding)


def rewinding(draw: random.Random, depth: int, block_size: int) -> Call:
    rows, _ = a_round(draw, depth, block_size)
    num_rows = len(rows.limits)
    reference.prepare_verify_inputs(rows, torch.zeros((num_rows, depth), dtype=torch.int64), block_size)
    active = draw.randint(0, num_rows)
    stays = (torch.arange(num_rows) >= active) | (rows.prefill_status == 1)
    inputs = columns(rows) | {
        "accepted": torch.randint(0, depth + 1, (num_rows,)),
        "active": torch.tensor([active]),
        "released": torch.full((num_rows,), RUBBISH),
        "removed": torch.ones(num_rows, dtype=torch.bool),
    }

    def run(module: object, views: Views) -> object:
        return module.rewind_kv_cache(  # type: ignore[attr-defined]
            views["accepted"],
            views["prefill_status"],
            views["last_block_offsets"],
            views["kv_lengths"],
            views["block_counts"],
            views["last_block_ids"],
            views["kv_block_ids"],
            depth,
            block_size,
            views["active"],
            out=(views["released"], views["removed"]),
        )

    return Call(inputs, run, ADVANCED | {"released", "removed"}, dict.fromkeys(ADVANCED, stays))


def verifying(draw: random.Random, depth: int, block_size: int) -> Call:
    decode, prefill = draw.randint(0, 40), draw.randint(0, 3)
    total = decode * (depth + 1) + prefill
    inputs = {
        "tokens": torch.randint(0, 2, (total,)),
        "chosen": torch.randint(0, 2, (total,)),
        "last": torch.full((decode + prefill,), RUBBISH),
        "mask": torch.zeros(total, dtype=torch.bool),
    }

    def run(module: object, views: Views) -> object:
        packed = views["tokens"], views["chosen"], decode, prefill, depth
        return module.verify_speculative_tokens(*packed, out=(views["last"], views["mask"]))  # type: ignore[attr-defined]

    return Call(inputs, run, {"last", "mask"})


def preparing(draw: random.Random, depth: int, block_size: int) -> Call:
    decode, prefill, more = draw.randint(0, 40), draw.randint(0, 3), draw.randint(0, 3)
    rows, total = decode + prefill, decode * (depth + 1) + prefill
    tokens, chosen = torch.randint(0, 2, (2, total))
    last, mask, _ = reference.verify_speculative_tokens(tokens, chosen, decode, prefill, depth)
    buffers = {name: torch.full((rows + more,), RUBBISH) for name in ("sampled", "places", "counts")}
    buffers["accepted"] = torch.full((rows + more, depth), RUBBISH)
    inputs = {"tokens": tokens, "chosen": chosen, "last": last, "mask": mask, "index": torch.arange(total)}
    beyond = {name: torch.arange(rows + more) >= rows for name in ("sampled", "places")}
    beyond |= {name: torch.arange(rows + more) >= decode for name in ("counts", "accepted")}

    def run(module: object, views: Views) -> object:
        return module.prepare_next_forward_pass(  # type: ignore[attr-defined]
            decode,
            views["chosen"],
            views["index"],
            views["last"],
            views["mask"],
            views["tokens"],
            views["sampled"],
            views["places"],
            views["accepted"],
            views["counts"],
            depth,
        )

    return Call(inputs | buffers, run, set(buffers), beyond)


def copying_states(draw: random.Random, depth: int, block_size: int) -> Call:
    layers, slots, size = draw.randint(1, 3), draw.randint(1, 12), draw.choice([1, 5, 48])
    rows = draw.randint(0, slots)
    inputs = {
        "intermediate": torch.randn(layers, slots, depth + 1, size).to(torch.bfloat16),
        "current": torch.randn(layers, slots, size).to(torch.bfloat16),
        "prefill": torch.randint(0, 2, (rows,)),
        "slots": torch.randperm(slots)[:rows],
        "accepted": torch.randint(0, depth + 1, (rows,)),
    }

    def run(module: object, views: Views) -> object:
        return module.mamba_state_selective_copy(*views.values(), layers)  # type: ignore[attr-defined]

    return Call(inputs, run, {"current"})


def attending(draw: random.Random, depth: int, block_size: int) -> Call:
    """Floating point: only what must not change is compared."""
    rows, blocks = draw.randint(1, 5), draw.randint(1, 80)
    pool = rows * blocks + 1
    caches = torch.randn(2, pool, 16, 2, 64).to(torch.bfloat16)
    query = torch.randn(rows, depth + 1, 8, 64).to(torch.bfloat16)
    inputs = {
        "query": query,
        "keys": caches[0],
        "values": caches[1],
        "table": torch.randperm(pool)[: rows * blocks].view(rows, blocks),
        "starts": torch.randint(0, max(blocks * 16 - depth, 1), (rows,)),
        "result": query.clone(),
    }

    def run(module: object, views: Views) -> object:
        *given, result = views.values()
        return kernels.paged_attention(*given, kernels.ScoreRule(0.125), out=result)

    return Call(inputs, run, {"result"}, is_exact=False)


OPERATIONS = (opening, committing, rewinding, verifying, preparing, copying_states, attending)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls_change_what_they_may_and_nothing_else(part: int) -> None:
    draw, generator = random.Random(part), torch.Generator().manual_seed(part)
    torch.manual_seed(part)
    wrong = torch.zeros(len(OPERATIONS), 2, dtype=torch.int64, device="cuda")
    for _ in range(CALLS // PARTS):
        index = draw.randrange(len(OPERATIONS))
        depth, block_size = draw.choice([(0, 16), (1, 4), (3, 4), (3, 16), (7, 16)])
        call = OPERATIONS[index](draw, depth, block_size)
        arena = Arena(call, generator)
        own = arena.before.clone()
        call.run(kernels, arena.views(own))
        wrong[index, 0] += ((own != arena.before) & arena.must_stay).any()
        if call.is_exact:
            twins = arena.before.clone()
            call.run(reference, arena.views(twins))
            wrong[index, 1] += (own != twins).any()
    found = {op.__name__: tuple(row) for op, row in zip(OPERATIONS, wrong.tolist(), strict=True)}
    assert found == dict.fromkeys(found, (0, 0)), "calls that changed too much, calls unlike the twin"
