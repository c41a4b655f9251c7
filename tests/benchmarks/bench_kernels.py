"""How near each operation comes to what the GPU can do, against ceilings measured in the same run.

Every operation is checked on fresh random data and a poisoned output against float64 or its twin, then timed
as a CUDA graph of launches over rotated buffers that together exceed the L2 cache (small operations of a
layer: over one buffer, as they find it in a model). Times include the gaps between launches. Prints a
Markdown table.

    make bench-kernels
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from headway import kernels
from headway.kernels import reference
from headway.kernels.linear.gated_linear import gated_linear
from headway.kernels.linear.skinny_linear import skinny_linear
from headway.kernels.runtime._triton import jit, tl

Launch = Callable[[], object]
ROTATED_BYTES = 600_000_000
GRAPH_MICROSECONDS = 3000
HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 4096, 32, 8, 128, 11008, 151_680
WEIGHTS = {
    "qkv": ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "lm_head": (VOCABULARY, HIDDEN),
    "qkv, hidden 1024": (4096, 1024),
    "o, hidden 1024": (1024, 2048),
    "gate_up, hidden 1024": (6144, 1024),
    "down, hidden 1024": (1024, 3072),
    "lm_head, hidden 1024": (VOCABULARY, 1024),
}
WINDOW, BLOCK_SIZE = 4, 16
# Of the 120 GB that 141 leave to a cache of 37 layers.
LAYER_CACHE_BYTES = 3_200_000_000
CONTEXTS = [(rows, context) for rows in (1, 8, 64) for context in (1024, 8192, 65536)]
# The longest of them with a sliding window, too, and a prompt.
LONG_CONTEXT, SLIDING_WINDOW = 65536, 1024
PROMPTS = [
    (1, 128, 0),
    (1, 1024, 0),
    (1, 8192, 0),
    (1, 2048, 6144),
    (4, 2048, 0),
    (1, 8192, 0, SLIDING_WINDOW),
]
CHUNKS = [(128, [0]), (128, [0] * 4), (512, [0]), (128, [3000]), (512, [8000])]
# Temperature, top-k, top-p; whether a few tokens hold most of the mass, as in text, or thousands.
SAMPLERS = {
    "greedy": (0.0, 0, 1.0, True),
    "temperature": (1.0, 0, 1.0, True),
    "top-k, top-p": (1.0, 50, 0.9, True),
    "top-k, top-p, flat": (1.0, 50, 0.9, False),
    "top-p": (1.0, 0, 0.9, True),
    "top-p, flat": (1.0, 0, 0.9, False),
}
# Fewer read their weights for longer than they multiply.
ROWS_BOUND_BY_PRODUCTS = 256
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table; `work` in bytes or floating-point operations, as the ceiling counts."""

    operation: str
    case: str
    microseconds: float
    work: float
    ceiling: str
    error: float
    peer_microseconds: float | None = None


@jit
def _read_kernel(data_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    first = tl.program_id(0).to(tl.int64) * BLOCK
    seen = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, size, tl.num_programs(0) * BLOCK):
        seen ^= tl.load(data_ptr + start + tl.arange(0, BLOCK))
    tl.store(out_ptr + first + tl.arange(0, BLOCK), seen)


def microseconds(launches: Sequence[Launch], estimate: float) -> float:
    """Of one launch: the median over replays of a graph that goes through the launches over and over."""
    count = max(len(launches), min(96, int(GRAPH_MICROSECONDS / estimate)))
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in itertools.islice(itertools.cycle(launches), count):
            launch()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / count)
    return statistics.median(times)


def measured_ceilings() -> dict[str, float]:
    """Bytes or floating-point operations a second."""
    size, block = 1 << 30, 4096
    data = torch.randint(0, 100, (size,), dtype=torch.int32, device="cuda")
    programs = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs * block, dtype=torch.int32, device="cuda")
    read = microseconds([lambda: _read_kernel[(programs,)](data, out, size, BLOCK=block, num_warps=8)], 1000)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = microseconds([lambda: a @ b], 1500)
    return {"read": 4e6 * size / read, "matmul": 2e6 * 8192**3 / product}


def copies(num_bytes: float) -> int:
    return int(min(max(ROTATED_BYTES // num_bytes + 1, 3), 16))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Infinite where an element was not written."""
    error = (result.double() - expected.double()).norm() / expected.double().norm()
    return float(error) if bool(result.isfinite().all()) else float("inf")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)


def linear_line(name: str, rows: int) -> Line:
    """The weights are the bytes; PyTorch's own product stands beside."""
    outputs, inputs = WEIGHTS[name]
    size = 2 * outputs * inputs
    weights = [randn(outputs, inputs).mul_(inputs**-0.5) for _ in range(copies(size))]
    x, out = randn(rows, inputs), poisoned(rows, outputs)
    skinny_linear(x, weights[0], out=out)
    error = relative_error(out, x.double() @ weights[0].double().T)
    own = microseconds([lambda w=w: skinny_linear(x, w, out=out) for w in weights], size / 4e6)
    library = microseconds([lambda w=w: F.linear(x, w) for w in weights], size / 4e6)
    return Line("skinny_linear", f"{name}, {rows} rows", own, size, "read", error, library)


def added_line(name: str, rows: int) -> Line:
    """As a layer takes it: added to the residual stream in place, by PyTorch, too."""
    outputs, inputs = WEIGHTS[name]
    size = 2 * outputs * inputs
    weights = [randn(outputs, inputs).mul_(inputs**-0.5) for _ in range(copies(size))]
    x, residual = randn(rows, inputs), randn(rows, outputs)
    expected = residual.double() + x.double() @ weights[0].double().T
    skinny_linear(x, weights[0], residual=residual, out=residual)
    error = relative_error(residual, expected)
    residual.zero_()
    launches = [lambda w=w: skinny_linear(x, w, residual=residual, out=residual) for w in weights]
    own = microseconds(launches, size / 4e6)
    library = microseconds([lambda w=w: residual.addmm_(x, w.T) for w in weights], size / 4e6)
    return Line("skinny_linear, added", f"{name}, {rows} rows", own, size, "read", error, library)


def turned_line(rows: int) -> Line:
    """As a layer takes queries, keys and values; beside it PyTorch's product and `rope_append`."""
    outputs, inputs = WEIGHTS["qkv"]
    size = 2 * outputs * inputs
    weights = [randn(outputs, inputs).mul_(inputs**-0.5) for _ in range(copies(size))]
    x, bias, positions = randn(rows, inputs), randn(outputs), torch.arange(rows, device="cuda")
    table, caches = torch.rand(rows, HEAD_DIM, device="cuda"), poisoned(2, rows, 1, KV_HEADS, HEAD_DIM)
    exact, exact_caches = [tensor.double() for tensor in (x, weights[0], bias)], caches.double()
    query = kernels.qkv_rope_append(x, weights[0], bias, None, positions, table, *caches, positions)
    expected = reference.qkv_rope_append(*exact, None, positions, table.double(), *exact_caches, positions)
    found, wanted = torch.cat([query, caches[0, :, 0]], 1), torch.cat([expected, exact_caches[0, :, 0]], 1)

    def own_launch(weight: torch.Tensor) -> None:
        kernels.qkv_rope_append(x, weight, bias, None, positions, table, *caches, positions)

    def library_launch(weight: torch.Tensor) -> None:
        heads = F.linear(x, weight, bias).view(rows, -1, HEAD_DIM)
        parts = heads.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        kernels.rope_append(*parts, positions, table, *caches, positions)

    own = microseconds([lambda w=w: own_launch(w) for w in weights], size / 4e6)
    library = microseconds([lambda w=w: library_launch(w) for w in weights], size / 4e6)
    error = relative_error(found, wanted)
    return Line("qkv_rope_append", f"{rows} rows", own, size, "read", error, library)


def gate_up_line(rows: int) -> Line:
    """Beside it PyTorch's product and the separate activation."""
    outputs, inputs = WEIGHTS["gate_up"]
    size, work = 2 * outputs * inputs, 2 * rows * outputs * inputs
    weights = [randn(outputs, inputs).mul_(inputs**-0.5) for _ in range(copies(size))]
    x, out = randn(rows, inputs), poisoned(rows, outputs // 2)
    gated_linear(x, weights[0], out=out)
    gate, up = (x.double() @ weights[0].double().T).chunk(2, 1)
    error = relative_error(out, F.silu(gate) * up)
    estimate = max(size / 4e6, work / 6e8)
    own = microseconds([lambda w=w: gated_linear(x, w, out=out) for w in weights], estimate)
    library = microseconds([lambda w=w: kernels.gated_mul(F.linear(x, w)) for w in weights], estimate)
    bound = (size, "read") if rows < ROWS_BOUND_BY_PRODUCTS else (work, "matmul")
    return Line("gated_linear", f"{rows} rows", own, *bound, error, library)


def window_lines() -> Iterator[Line]:
    """Shuffled blocks of as much cache as one layer of the model may have, or more where a case takes more:
    from 2**31 elements on, which this model's layers never have on one card, addresses are wider, and cost
    more."""
    largest = max(rows * context for rows, context in CONTEXTS) // BLOCK_SIZE + 4 * 64
    caches = randn(2, largest, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    of_a_layer = LAYER_CACHE_BYTES // (4 * BLOCK_SIZE * KV_HEADS * HEAD_DIM)
    for rows, context in CONTEXTS:
        num_blocks = max(of_a_layer, rows * (context // BLOCK_SIZE + 2))
        shuffled = torch.randperm(num_blocks, device="cuda").int()
        yield window_line(rows, context, *caches[:, :num_blocks], shuffled)
        if context == LONG_CONTEXT:
            yield window_line(rows, context, *caches[:, :num_blocks], shuffled, SLIDING_WINDOW)


def window_line(
    rows: int,
    context: int,
    keys: torch.Tensor,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM] bfloat16
    values: torch.Tensor,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM] bfloat16
    shuffled: torch.Tensor,  # [num_blocks] int32
    sliding_window: int = 0,
) -> Line:
    """The keys and values that are seen are the bytes."""
    width = context // BLOCK_SIZE + 2
    seen = min(context, sliding_window + WINDOW - 1) if sliding_window > 0 else context
    size = 4 * rows * seen * KV_HEADS * HEAD_DIM
    count = min(copies(size), len(shuffled) // (rows * width))
    tables = shuffled[: count * rows * width].view(count, rows, width)
    starts = torch.full((rows,), context - WINDOW, device="cuda")
    query, out, rule = (
        randn(rows, WINDOW, Q_HEADS, HEAD_DIM),
        poisoned(rows, WINDOW, Q_HEADS, HEAD_DIM),
        kernels.ScoreRule(HEAD_DIM**-0.5, window=sliding_window),
    )
    kernels.paged_attention(query, keys, values, tables[0], starts, rule, out=out)
    used = tables[0][-1, : width - 2].long()
    row = keys[used][None].flatten(1, 2), values[used][None].flatten(1, 2)
    error = relative_error(out[-1:], attention_in_float64(query[-1:], *row, context - WINDOW, sliding_window))
    launches = [
        lambda t=table: kernels.paged_attention(query, keys, values, t, starts, rule, out=out)
        for table in tables
    ]
    time = microseconds(launches, size / 4e6 + 8)
    return Line(
        "paged_attention", f"{rows} x {context:,} keys{of_window(sliding_window)}", time, size, "read", error
    )


def of_window(sliding_window: int) -> str:
    return f", a window of {sliding_window:,}" if sliding_window > 0 else ""


def attention_in_float64(
    query: torch.Tensor,  # [1, window, q_heads, head_dim]
    keys: torch.Tensor,  # [1, tokens, kv_heads, head_dim]
    values: torch.Tensor,  # [1, tokens, kv_heads, head_dim]
    start: int,
    sliding_window: int = 0,
) -> torch.Tensor:
    """[1, window, q_heads, head_dim], one head after the other."""
    heads = []
    position = start + torch.arange(query.shape[1], device=query.device)
    token = torch.arange(keys.shape[1], device=query.device)
    is_visible = (token <= position[:, None]) & (
        token > position[:, None] - (sliding_window or keys.shape[1] + 1)
    )
    for head in range(query.shape[2]):
        kv_head = head * keys.shape[2] // query.shape[2]
        scores = query[0, :, head].double() @ keys[0, :, kv_head].double().T * query.shape[3] ** -0.5
        weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
        heads.append(weights @ values[0, :, kv_head].double())
    return torch.stack(heads, 1)[None]


def prompt_line(rows: int, window: int, start: int, sliding_window: int = 0) -> Line:
    """The visible pairs of query and key are the work; PyTorch's fused attention, without pages, beside."""
    width = -(-(window + start) // BLOCK_SIZE)
    keys, values = randn(2, rows * width, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    table = torch.randperm(rows * width, device="cuda").view(rows, width)
    starts = torch.full((rows,), start, device="cuda")
    query, out, rule = (
        randn(rows, window, Q_HEADS, HEAD_DIM),
        poisoned(rows, window, Q_HEADS, HEAD_DIM),
        kernels.ScoreRule(HEAD_DIM**-0.5, window=sliding_window),
    )

    def launch() -> torch.Tensor:
        return kernels.prefill_attention(query, keys, values, table, starts, rule, out=out)

    launch()
    dense = [cache[table].flatten(1, 2)[:, : window + start] for cache in (keys, values)]
    last = min(window, 64)
    expected = attention_in_float64(
        query[-1:, -last:], dense[0][-1:], dense[1][-1:], start + window - last, sliding_window
    )
    error = relative_error(out[-1:, -last:], expected)
    most = sliding_window or start + window
    pairs = sum(min(position + 1, most) for position in range(start, start + window))
    work = 4 * rows * Q_HEADS * HEAD_DIM * pairs
    peer = None
    if start == sliding_window == 0:
        q, k, v = (t.transpose(1, 2) for t in (query, *dense))
        fused = [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)]
        peer = microseconds(fused, work / 4e8 + 5)
    case = f"{rows} x {window:,} after {start:,}{of_window(sliding_window)}"
    return Line(
        "prefill_attention", case, microseconds([launch], work / 4e8 + 5), work, "matmul", error, peer
    )


def chunks_line(length: int, starts: Sequence[int]) -> Line:
    """Chunks of equal length one behind the other: a step's short prefills. The error is that of the last
    one."""
    rows, width = len(starts), -(-(length + max(starts)) // BLOCK_SIZE)
    keys, values = randn(2, rows * width, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    table = torch.randperm(rows * width, device="cuda").view(rows, width)
    start = torch.tensor(starts, device="cuda")
    chunks = torch.arange(rows, device="cuda") * length, torch.full_like(start, length), start
    query, out = randn(rows * length, Q_HEADS, HEAD_DIM), poisoned(rows * length, Q_HEADS, HEAD_DIM)
    rule = kernels.ScoreRule(HEAD_DIM**-0.5)

    def launch() -> torch.Tensor:
        return kernels.varlen_attention(query, keys, values, table, *chunks, rule, out=out)

    launch()
    last, seen = slice((rows - 1) * length, None), starts[-1] + length
    dense = [cache[table[-1:]].flatten(1, 2)[:, :seen] for cache in (keys, values)]
    expected = attention_in_float64(query[None, last], dense[0], dense[1], starts[-1])
    error = relative_error(out[None, last], expected)
    work = sum(4 * Q_HEADS * HEAD_DIM * length * (before + (length + 1) / 2) for before in starts)
    case = f"{rows} x {length} after {max(starts):,}"
    return Line("varlen_attention", case, microseconds([launch], work / 2e8 + 5), work, "matmul", error)


def layer_lines(tokens: int) -> Iterator[Line]:
    """Small operations of a layer: launches, more than bytes."""
    x, residual, weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), randn(HIDDEN)
    size, case = 2 * tokens * HIDDEN, f"{tokens} tokens"
    error = relative_error(
        kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6)
    )
    time = microseconds([lambda: kernels.rms_norm(x, weight, 1e-6)], 3)
    yield Line("rms_norm", case, time, 2 * size, "read", error)
    total = residual.double() + x.double()
    result = kernels.add_rms_norm(x, residual.clone(), weight, 1e-6)
    error = relative_error(result, reference.rms_norm(total, weight.double(), 1e-6))
    time = microseconds([lambda: kernels.add_rms_norm(x, residual, weight, 1e-6)], 5)
    yield Line("add_rms_norm", case, time, 4 * size, "read", error)
    gate_up = randn(tokens, 2 * INTERMEDIATE)
    error = relative_error(kernels.gated_mul(gate_up), reference.gated_mul(gate_up.double()))
    time = microseconds([lambda: kernels.gated_mul(gate_up)], 4)
    yield Line("gated_mul", case, time, 6 * tokens * INTERMEDIATE, "read", error)
    yield rope_append_line(tokens)


def rope_append_line(tokens: int) -> Line:
    """The error is that of the keys in the cache; queries turn alike."""
    fused = randn(tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
    query, key, value = fused.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos_sin, positions = torch.rand(2 * tokens, HEAD_DIM, device="cuda"), torch.arange(tokens, device="cuda")
    caches = poisoned(2, tokens, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    slots = torch.randperm(tokens * BLOCK_SIZE, device="cuda")[:tokens]
    expected = query.double(), key.double(), value.double()
    reference.rope_append(*expected, positions, cos_sin.double(), *caches.double(), slots)

    def launch() -> None:
        kernels.rope_append(query, key, value, positions, cos_sin, *caches, slots)

    launch()
    error = relative_error(caches[0].flatten(0, 1)[slots], expected[1])
    size = 2 * tokens * HEAD_DIM * (2 * Q_HEADS + 4 * KV_HEADS)
    return Line("rope_append", f"{tokens} tokens", microseconds([launch], 4), size, "read", error)


def bookkeeping_lines(rows: int) -> Iterator[Line]:
    """Launches, hardly bytes: 4 us each is the bar. The error is the share of values that are not the
    twin's."""
    depth, blocks, case = WINDOW - 1, 4096, f"{rows} rows, depth {WINDOW - 1}"
    tokens = torch.randint(0, 3, (2, rows * WINDOW), device="cuda")
    own = kernels.verify_speculative_tokens(*tokens, rows, 0, depth)
    twin = reference.verify_speculative_tokens(*tokens.cpu(), rows, 0, depth)
    wrong = float((own[1].cpu() != twin[1]).double().mean())
    time = microseconds([lambda: kernels.verify_speculative_tokens(*tokens, rows, 0, depth, out=own[:2])], 3)
    yield Line("verify_speculative_tokens", case, time, 17 * tokens[0].numel(), "read", wrong)

    buffers = torch.empty(3, rows, dtype=torch.int64, device="cuda")
    accepted = torch.empty(rows, depth, dtype=torch.int64, device="cuda")
    index = torch.arange(tokens[0].numel(), device="cuda")
    given = (
        rows,
        tokens[1],
        index,
        own[0],
        own[1],
        tokens[0],
        buffers[0],
        buffers[1],
        accepted,
        buffers[2],
        depth,
    )
    time = microseconds([lambda: kernels.prepare_next_forward_pass(*given)], 3)
    wrong = float((buffers[2].cpu() != twin[1].view(rows, WINDOW)[:, 1:].sum(1)).double().mean())
    yield Line("prepare_next_forward_pass", case, time, 50 * tokens[0].numel(), "read", wrong)

    length, status = torch.full((rows,), WINDOW + 1, device="cuda"), torch.zeros(rows, device="cuda").long()
    granted = torch.arange(rows * blocks, device="cuda").view(rows, blocks)
    used = torch.where(torch.arange(blocks, device="cuda") == 0, granted, -1)
    ordered = length - 1, length, torch.ones_like(length), used[:, 0].clone(), used
    accepted = torch.arange(rows, device="cuda") % WINDOW
    own_rows, twin_rows = [t.clone() for t in ordered], [t.cpu() for t in ordered]
    kernels.rewind_kv_cache(accepted, status, *own_rows, depth, BLOCK_SIZE)
    reference.rewind_kv_cache(accepted.cpu(), status.cpu(), *twin_rows, depth, BLOCK_SIZE)
    wrong = max(float((a.cpu() != b).double().mean()) for a, b in zip(own_rows, twin_rows, strict=True))
    accepted.fill_(depth)
    time = microseconds([lambda: kernels.rewind_kv_cache(accepted, status, *ordered, depth, BLOCK_SIZE)], 3)
    yield Line("rewind_kv_cache, all accepted", case, time, 8 * 12 * rows, "read", wrong)


def round_lines(rows: int) -> Iterator[Line]:
    """All bookkeeping of a round in two launches: 6 us is the bar. Every other draft is right."""
    blocks, case = 4096, f"{rows} rows, depth {WINDOW - 1}"
    whole = torch.arange(rows, device="cuda")
    granted = (torch.arange(rows * blocks, device="cuda")).view(rows, blocks)
    used = torch.where(torch.arange(blocks, device="cuda") == 0, granted, -1)
    ones = torch.ones_like(whole)
    state = kernels.RowState(
        whole % 7, ones.clone(), ones * blocks * BLOCK_SIZE, ones * WINDOW, ones * 0, ones.clone(), used[:, 0].clone(),
        used, granted, ones.clone(), torch.zeros(rows, WINDOW, device="cuda").long(), ones.clone(),
    )  # fmt: skip
    twin = kernels.RowState(*(getattr(state, f.name).cpu() for f in fields(state)))
    picked = torch.randint(0, 2, (rows, WINDOW), device="cuda")
    drafts = torch.randint(0, 2, (rows, WINDOW - 1), device="cuda")
    window, out = (
        kernels.RoundWindow.empty(rows, WINDOW - 1, drafts.device),
        picked.new_empty(rows, WINDOW + 1),
    )

    def open_and_commit() -> None:
        kernels.prepare_verify_inputs(state, drafts, BLOCK_SIZE, out=window)
        kernels.verify_and_rewind(state, window, picked, BLOCK_SIZE, out=out)

    open_and_commit()
    opened = reference.prepare_verify_inputs(twin, drafts.cpu(), BLOCK_SIZE)
    wrong = float(
        (out.cpu() != reference.verify_and_rewind(twin, opened, picked.cpu(), BLOCK_SIZE)).double().mean()
    )
    pairs = ((getattr(state, f.name), getattr(twin, f.name)) for f in fields(state))
    wrong = max(wrong, *(float((own.cpu() != other).double().mean()) for own, other in pairs))
    size = 8 * rows * (12 + 9 * WINDOW)
    yield Line(
        "prepare_verify_inputs, verify_and_rewind",
        case,
        microseconds([open_and_commit], 6),
        size,
        "read",
        wrong,
    )
    time = microseconds([lambda: kernels.prepare_verify_inputs(state, drafts, BLOCK_SIZE, out=window)], 3)
    yield Line("prepare_verify_inputs", case, time, size / 2, "read", wrong)


def ngram_lines() -> Iterator[Line]:
    """Drafts by n-gram lookup in random tokens, where hardly anything is found and every tile of a row is
    read."""
    depth, max_ngram = WINDOW - 1, 4
    for rows, length in ((256, 1024), (32, 8192), (1, 1024), (1, 8192), (1, 131_072)):
        blocks = length // BLOCK_SIZE + 1
        table = torch.randperm(rows * blocks, device="cuda").view(rows, blocks)
        cache = torch.randint(0, VOCABULARY, (rows * blocks, BLOCK_SIZE), dtype=torch.int32, device="cuda")
        ones = torch.ones(rows, dtype=torch.int64, device="cuda")
        state = kernels.RowState(
            cache[:rows, 0].long(), ones * length, ones * length * 2, ones, ones, ones, ones, table, table, ones,
            ones[:, None], ones,
        )  # fmt: skip
        twin = kernels.RowState(*(getattr(state, f.name).cpu() for f in fields(state)))
        found = kernels.propose_ngram(state, cache, depth, max_ngram)
        expected = reference.propose_ngram(twin, cache.cpu(), depth, max_ngram)
        wrong = float((found.cpu() != expected).double().mean())
        lookup = functools.partial(kernels.propose_ngram, state, cache, depth, max_ngram)
        case = f"{rows} rows of {length:,} tokens"
        yield Line("propose_ngram", case, microseconds([lookup], 10), rows * length * 4.5, "read", wrong)
        tokens = torch.randint(0, 9, (rows * WINDOW,), device="cuda")
        slots = torch.arange(rows * WINDOW, device="cuda")
        store = functools.partial(kernels.store_tokens, tokens, slots, cache)
        yield Line("store_tokens", case, microseconds([store], 3), rows * WINDOW * 20, "read", 0.0)


def logits_of(rows: int, *, is_peaked: bool) -> torch.Tensor:
    """[rows, WINDOW, VOCABULARY]. Peaked: probabilities fall as rank ** -1.5, so the first token has 0.38."""
    if not is_peaked:
        return randn(rows, WINDOW, VOCABULARY)
    falling = -1.5 * torch.arange(1, VOCABULARY + 1, device="cuda").log()
    shuffled = torch.rand(rows, WINDOW, VOCABULARY, device="cuda").argsort(-1)
    return falling.bfloat16()[shuffled]


def sample_line(rows: int, name: str) -> Line:
    """The logits are the bytes. The error is the share of tokens that are not those of the twin."""
    temperature, top_k, top_p, is_peaked = SAMPLERS[name]
    count = copies(2 * rows * WINDOW * VOCABULARY)
    logits = [logits_of(rows, is_peaked=is_peaked) for _ in range(count)]
    whole, real = torch.arange(rows, device="cuda"), torch.ones(rows, device="cuda")
    rest = whole, real * temperature, whole * 0 + top_k, real * top_p, real * 0, whole + 7
    wrong = kernels.sample(logits[0], *rest) != reference.sample(logits[0], *rest)
    size = 2 * logits[0].numel()
    time = microseconds([lambda x=x: kernels.sample(x, *rest) for x in logits], size / 4e6 + 10)
    return Line("sample", f"{name}, {rows} x {WINDOW}", time, size, "read", float(wrong.double().mean()))


def table(lines: Iterable[Line], ceilings: dict[str, float]) -> bool:
    """Prints as it goes; whether every operation was right."""
    is_right = True
    print("| operation | case | us | achieved | of the ceiling | PyTorch, us | error |")
    print("|---|---|---|---|---|---|---|")
    for line in lines:
        rate = line.work / line.microseconds * 1e6
        achieved = f"{rate / 1e12:.0f} TFLOP/s" if line.ceiling == "matmul" else f"{rate / 1e9:,.0f} GB/s"
        share = f"{rate / ceilings[line.ceiling]:.1%} of {line.ceiling}"
        peer = "" if line.peer_microseconds is None else f"{line.peer_microseconds:.2f}"
        cells = (
            line.operation,
            line.case,
            f"{line.microseconds:.2f}",
            achieved,
            share,
            peer,
            f"{line.error:.1e}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
        is_right &= line.error <= TOLERANCE
    return is_right


def main() -> int:
    """The exit status is 1 when an operation is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="operations whose group's name contains this")
    only = parser.parse_args().only
    rows = 1, 4, 16, 64
    groups: dict[str, Callable[[], Iterator[Line]]] = {
        "linear": lambda: itertools.starmap(linear_line, itertools.product(WEIGHTS, rows)),
        "added": lambda: itertools.starmap(added_line, itertools.product(("o", "down"), (1, 8, 16, 33, 64))),
        "turned": lambda: map(turned_line, (1, 8, 16, 33, 64)),
        "gate_up": lambda: map(gate_up_line, (1, 8, 16, 33, 64, 65, 128, 768, 8192)),
        "window": window_lines,
        "prompt": lambda: itertools.chain(
            itertools.starmap(prompt_line, PROMPTS),
            itertools.starmap(chunks_line, CHUNKS),
        ),
        "layer": lambda: layer_lines(256),
        "bookkeeping": lambda: itertools.chain(bookkeeping_lines(256), round_lines(256)),
        "ngram": ngram_lines,
        "sample": lambda: itertools.starmap(sample_line, itertools.product((1, 128), SAMPLERS)),
    }
    ceilings = measured_ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", end=": ")
    print(f"read {ceilings['read'] / 1e9:,.0f} GB/s,", end=" ")
    print(f"bf16 matmul {ceilings['matmul'] / 1e12:.0f} TFLOP/s\n")
    lines = itertools.chain.from_iterable(make() for name, make in groups.items() if only in name)
    return 0 if table(lines, ceilings) else 1


if __name__ == "__main__":
    sys.exit(main())
