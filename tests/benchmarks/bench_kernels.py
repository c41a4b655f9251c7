"""Times the kernels on a GPU through graph replay, each beside its floor: the bytes it must move.

    python -P tests/benchmarks/bench_kernels.py

Inputs rotate so that large ones come from memory, not from the cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from headway import kernels

REPLAYS = 20
COPIED_BYTES = 2**32
ROWS, DEPTH, BLOCK_SIZE, MAX_BLOCKS = 256, 3, 16, 512


class Case(NamedTuple):
    name: str
    calls: list[Callable[[], object]]  # the same work on different buffers
    moved_bytes: int


def seconds_of(calls: list[Callable[[], object]]) -> float:
    """Median seconds of one call within a graph of all of them, repeated to at least 20."""
    repeated = calls * -(-20 // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in repeated:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / len(repeated))
    return sorted(times)[len(times) // 2]


def read_ceiling() -> float:
    """Bytes per second of a plain sum over 4 GiB."""
    data = torch.ones(COPIED_BYTES // 4, device="cuda")
    return COPIED_BYTES / seconds_of([lambda: torch.sum(data)])


def bookkeeping() -> list[Case]:
    integers = {"dtype": torch.int64, "device": "cuda"}
    zeros = torch.zeros(ROWS, **integers)
    length = torch.randint(1, 4000, (ROWS,), **integers)
    vectors = (length % BLOCK_SIZE, length, length // BLOCK_SIZE + 1, zeros.clone())
    tables = torch.randint(0, 9999, (2, ROWS, MAX_BLOCKS), **integers)
    accepted = torch.randint(0, DEPTH + 1, (ROWS,), **integers)
    tokens = torch.randint(0, 2, (2, ROWS * (DEPTH + 1)), **integers)
    last, mask, _ = kernels.verify_speculative_tokens(*tokens, ROWS, 0, DEPTH)
    released = zeros.clone(), torch.zeros(ROWS, dtype=torch.bool, device="cuda")
    buffers = zeros.clone(), zeros.clone(), torch.zeros(ROWS, DEPTH, **integers), zeros.clone()
    offsets, lengths, counts, last_ids = vectors
    return [
        Case(
            "advance",
            [
                lambda: kernels.advance(
                    lengths, offsets, counts, last_ids, *tables, lengths + 0, zeros, DEPTH, BLOCK_SIZE
                )
            ],
            ROWS * 8 * 10,
        ),
        Case(
            "verify",
            [lambda: kernels.verify_speculative_tokens(*tokens, ROWS, 0, DEPTH, out=(last, mask))],
            ROWS * (8 * 9 + 4),
        ),
        Case(
            "prepare",
            [
                lambda: kernels.prepare_next_forward_pass(
                    ROWS, tokens[1], tokens[0], last, mask, tokens[0], *buffers, DEPTH
                )
            ],
            ROWS * (8 * 15 + 4),
        ),
        Case(
            "rewind",
            [
                lambda: kernels.rewind_kv_cache(
                    accepted, zeros, *vectors, tables[0], DEPTH, BLOCK_SIZE, out=released
                )
            ],
            ROWS * 8 * 10,
        ),
    ]


def sampling(rows: int, vocab_size: int, **filters: float) -> Case:
    window = 4
    copies = max(1, min(8, 2**28 // (rows * window * vocab_size * 2)))
    # Falls with the rank of the token as a language model's logits do; tokens in random order.
    ranks = torch.rand(copies, rows, window, vocab_size, device="cuda").argsort(-1) + 1
    logits = (-1.5 * ranks.log()).to(torch.bfloat16)

    def column(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), filters.get(name, default), dtype=dtype, device="cuda")

    parameters = (
        torch.arange(rows, device="cuda"),
        column("temperature", 0.0),
        column("top_k", 0, torch.int64),
        column("top_p", 1.0),
        column("min_p", 0.0),
        torch.arange(rows, device="cuda"),
    )
    out = torch.zeros(rows, window, dtype=torch.int64, device="cuda")
    calls = [lambda some=some: kernels.sample(some, *parameters, out=out) for some in logits]
    kind = " ".join(f"{name} {value}" for name, value in filters.items()) or "greedy"
    return Case(f"sample [{rows * window}, {vocab_size}] {kind}", calls, logits[0].numel() * 2)


def layers(tokens: int) -> list[Case]:
    hidden, heads, kv_heads, head_dim, intermediate = 4096, 32, 8, 128, 11008
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    x, residual = torch.randn(2, tokens, hidden, **kind)
    weight, gate_up = torch.randn(hidden, **kind), torch.randn(tokens, 2 * intermediate, **kind)
    query, key = torch.randn(tokens, heads, head_dim, **kind), torch.randn(tokens, kv_heads, head_dim, **kind)
    table, positions = torch.randn(4096, head_dim, device="cuda"), torch.arange(tokens, device="cuda")
    caches = torch.zeros(2, 512, BLOCK_SIZE, kv_heads, head_dim, **kind)
    calls: list[tuple[str, Callable[[], object], int]] = [
        ("rms_norm", lambda: kernels.rms_norm(x, weight, 1e-5), 2 * x.numel()),
        ("add_rms_norm", lambda: kernels.add_rms_norm(x, residual, weight, 1e-5), 4 * x.numel()),
        ("rope", lambda: kernels.rope(query, key, positions, table), 2 * (query.numel() + key.numel())),
        ("silu_mul", lambda: kernels.silu_mul(gate_up), gate_up.numel() * 3 // 2),
        ("kv_append", lambda: kernels.kv_append(key, key, *caches, positions), 4 * key.numel()),
    ]
    return [Case(f"{name} {tokens} tokens", [call], 2 * elements) for name, call, elements in calls]


def main() -> None:
    torch.manual_seed(0)
    ceiling = read_ceiling()
    print(f"{torch.cuda.get_device_name()}: reads {ceiling / 1e12:.2f} TB/s")
    cases = bookkeeping()
    filtered = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02}
    for rows in (1, 16, 128):
        cases += [sampling(rows, 151_680), sampling(rows, 151_680, temperature=0.8)]
        cases += [sampling(rows, 151_680, temperature=0.8, top_p=0.95), sampling(rows, 151_680, **filtered)]
    cases += layers(4) + layers(256)
    for case in cases:
        seconds, floor = seconds_of(case.calls), case.moved_bytes / ceiling
        print(
            f"{case.name:58} {seconds * 1e6:9.2f} us   floor {floor * 1e6:8.3f} us   {floor / seconds:5.1%}"
        )


if __name__ == "__main__":
    main()
