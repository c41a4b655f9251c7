"""What an operation returns is memory of its own: who writes to it changes no input but those that the
operation writes in place."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch
from headway_testing.delta_nets import spans_of
from headway_testing.round_rows import random_rows

from headway.kernels import LogitsProcessorState, RowState, ScoreRule, pack_nibbles, reference
from headway.kernels.types._deferred_norm import DeferredNorm

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
VOCAB, WIDTH, EPSILON = 40, 64, 1e-6
# Return an input by contract, as their docstrings say: the names of these.
RETURNED_INPUTS = {"verify_speculative_tokens": {"input_tokens"}}
# No step has fewer.
LEAST_ROWS = {"add_linear": 1, "qkv_rope_append": 1}

Arguments = dict[str, object]
Case = Callable[[torch.dtype, int, torch.device], Arguments]  # dtype of floats, rows


def floats(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device, dtype)


def processors_of(rows: int, device: torch.device, *, is_used: bool) -> LogitsProcessorState:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    used = zeros(rows, dtype=torch.bool)
    used[: rows // 2 + 1] = is_used
    penalties = torch.tensor([1.0, 0.0, 0.0], device=device).repeat(rows, 1)
    return LogitsProcessorState(
        used, penalties, zeros(rows, VOCAB, dtype=torch.int32), zeros(rows, VOCAB, dtype=torch.bool),
        zeros(rows, VOCAB, dtype=torch.float32), zeros(rows, 2) - 1, zeros(rows), zeros(rows, 2, 3) - 1, zeros(rows, 2) - 1,
        zeros(rows) - 1, zeros(rows), zeros(rows) - 1,
    )  # fmt: skip


def process(is_used: bool) -> Case:
    return lambda dtype, rows, device: {
        "logits": floats(dtype, device, rows, 2, VOCAB),
        "window_tokens": torch.ones((rows, 1), dtype=torch.int64, device=device),
        "positions": torch.arange(rows, device=device),
        "processors": processors_of(rows, device, is_used=is_used),
    }


def drawn(temperature: float, top_p: float) -> Case:
    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        def full(value: float) -> torch.Tensor:
            return torch.full((rows,), value, device=device)

        counts = torch.arange(rows, device=device)
        filters = {"top_k": counts * 0, "top_p": full(top_p), "min_p": full(0.0)}
        logits = floats(dtype, device, rows, 2, VOCAB)
        return {
            "logits": logits,
            "positions": counts,
            "temperatures": full(temperature),
            "seeds": counts + 1,
        } | filters

    return case


def product(*names: str, **flags: object) -> Case:
    """names: of the optional operands that are given."""

    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        optional: dict[str, object] = {
            "bias": floats(dtype, device, 2 * WIDTH),
            "norm": DeferredNorm(torch.ones(rows, 1, device=device), EPSILON),
            "residual": floats(dtype, device, rows, 2 * WIDTH),
            "norm_weight": floats(dtype, device, 2 * WIDTH),
            "epsilon": EPSILON,
        }
        given = {name: optional[name] for name in names}
        x, weight = floats(dtype, device, rows, WIDTH), floats(dtype, device, 2 * WIDTH, WIDTH)
        return {"x": x, "weight": weight} | given | flags

    return case


def rotated(has_bias: bool) -> Case:
    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        caches = {name: floats(dtype, device, 4, 4, 1, WIDTH) for name in ("key_cache", "value_cache")}
        places = torch.arange(rows, device=device)
        bias = floats(dtype, device, 3 * WIDTH) if has_bias else None
        weight, table = floats(dtype, device, 3 * WIDTH, WIDTH), floats(torch.float32, device, 32, WIDTH)
        where = {"positions": places, "cos_sin": table, "slot_mapping": places}
        return (
            {"x": floats(dtype, device, rows, WIDTH), "weight": weight, "bias": bias, "norm": None}
            | where
            | caches
        )

    return case


def normed(name: str, **flags: object) -> Case:
    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        inputs: dict[str, object] = {"x": floats(dtype, device, rows, WIDTH)}
        if name == "embed_rms_norm":
            ids = torch.arange(rows, device=device)
            inputs = {"token_ids": ids, "embedding": floats(dtype, device, VOCAB, WIDTH)}
        if name == "add_rms_norm":
            inputs["residual"] = floats(dtype, device, rows, WIDTH)
        return inputs | {"weight": floats(dtype, device, WIDTH), "epsilon": EPSILON} | flags

    return case


def attended(name: str, first_position: int = 0) -> Case:
    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        places, rule = torch.arange(rows, device=device), ScoreRule(0.1, first_position=first_position)
        tables = {"block_table": places[:, None] % 4, "start_positions": places * 0, "rule": rule}
        caches = {cache: floats(dtype, device, 4, 16, 1, WIDTH) for cache in ("key_cache", "value_cache")}
        if name == "varlen_attention":
            spans = {"first_tokens": places * 2, "lengths": places * 0 + 2}
            return {"query": floats(dtype, device, 2 * rows, 2, WIDTH)} | caches | tables | spans
        return {"query": floats(dtype, device, rows, 2, 2, WIDTH)} | caches | tables

    return case


def convolved(name: str) -> Case:
    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        ids, entries = torch.arange(rows, device=device), rows + 1
        inputs = {"x": floats(dtype, device, 2 * rows, WIDTH), "weight": floats(dtype, device, WIDTH, 1, 4)}
        inputs |= {"states": floats(dtype, device, entries, WIDTH, 3), "state_ids": ids}
        if name == "convolve_windows":
            return inputs | {"windows": floats(dtype, device, entries, 2, WIDTH, 3)}
        spans = [(row, 2 * row, 2, row % 2 == 0) for row in range(rows)] or [(0, 0, 0, False)]
        return inputs | {"spans": spans_of(spans, device)}

    return case


def gated(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
    x, gate = floats(dtype, device, 2, rows, 3, WIDTH)
    return {"x": x, "gate": gate, "weight": floats(dtype, device, WIDTH), "epsilon": EPSILON}


def quantized(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
    weight, one = floats(dtype, device, 32, 256).to(torch.float8_e4m3fn), torch.ones(1, device=device)
    return {"x": floats(dtype, device, rows, 256), "weight": weight, "scale": one, "step": one}


def screened(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
    inputs_of_one = 256  # of which nibbles are packed
    integers = torch.ones(VOCAB, inputs_of_one, dtype=torch.int8, device=device)
    ones = {name: torch.ones(VOCAB, device=device) for name in ("scales", "errors")}
    weight, spreads = floats(dtype, device, VOCAB, inputs_of_one), torch.ones(2, device=device)
    inputs = {
        "x": floats(dtype, device, rows, inputs_of_one),
        "weight": weight,
        "packed": pack_nibbles(integers),
    }
    return inputs | ones | {"spreads": spreads}


def state_of(rows: int, device: torch.device) -> RowState:
    return random_rows(rows, 4, 2, 3, device)


def rewound(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
    state = state_of(rows, device)
    return {
        "accepted_counts": torch.full((rows,), 2, device=device), "prefill_status": state.prefill_status, "last_kv_block_offset": state.last_block_offsets,
        "kv_length_offsets": state.kv_lengths, "kv_block_counts": state.block_counts, "last_kv_block_id": state.last_block_ids,
        "kv_block_ids": state.kv_block_ids, "num_speculative_tokens": 2, "block_size_tokens": 4,
    }  # fmt: skip


def verified(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
    state = state_of(rows, device)
    drafts = torch.ones((rows, 2), dtype=torch.int64, device=device)
    window = reference.prepare_verify_inputs(state, drafts, 4)
    return {"rows": state, "window": window, "sampled": window.token_ids + 1, "block_size_tokens": 4}


def opened(width: int) -> Case:
    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        state = state_of(rows, device)
        counts = None if width == 1 else state.pending_counts.clamp(max=width)
        tokens = state.pending_tokens[:, :width]
        return {"rows": state, "token_ids": tokens, "counts": counts, "ahead": 0, "block_size_tokens": 4}

    return case


def prepared(depth: int) -> Case:
    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        drafts = torch.ones((rows, depth), dtype=torch.int64, device=device)
        return {"rows": state_of(rows, device), "drafts": drafts, "block_size_tokens": 4}

    return case


def proposed(depth: int) -> Case:
    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        cache = torch.ones((900, 4), dtype=torch.int32, device=device)
        sizes = {"num_speculative_tokens": depth, "max_ngram": 2}
        return {"rows": state_of(rows, device), "token_cache": cache} | sizes

    return case


def padded(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
    counts = torch.arange(rows + 1, device=device)
    return {
        "cu_num_draft_tokens": counts[1:],
        "valid_sampled_counts": counts[1:] * 0 + 1,
        "query_start_loc": 2 * counts,
    }


def next_of(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
    tokens = torch.arange(rows, device=device)
    discarded = torch.zeros(rows, dtype=torch.bool, device=device)
    return {
        "sampled_token_ids": tokens[:, None],
        "discard_mask": discarded,
        "backup_token_ids": tokens,
        "vocab_size": VOCAB,
    }


def made_room(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
    counts = torch.arange(rows + 1, device=device)
    tokens, starts = (
        torch.arange(2 * rows, device=device),
        {"query_start_loc": 2 * counts, "query_end_loc": 2 * counts[:-1]},
    )
    numbers = {"padding_token_id": 0, "parallel_token_id": 1, "num_padding_slots": 2, "shift": True}
    return (
        {"target_token_ids": tokens, "target_positions": tokens, "next_token_ids": counts[:-1]}
        | starts
        | numbers
    )


def extended(n: int) -> Case:
    def case(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
        counts = torch.arange(rows + 1, device=device)
        numbers = {"num_tokens": rows, "max_query_len": 1, "max_seq_len": rows, "n": n}
        return {"query_start_loc": counts, "seq_lens": counts[1:]} | numbers

    return case


def packed(dtype: torch.dtype, rows: int, device: torch.device) -> Arguments:
    tokens = torch.arange(3 * rows, device=device)
    numbers = {"num_decode_requests": rows, "num_prefill_requests": 0, "num_speculative_tokens": 2}
    return {"input_tokens": tokens, "output_tokens": tokens + 1} | numbers


CASES: dict[str, list[Case]] = {
    "add_linear": [product("residual", "norm_weight", "epsilon")],
    "add_rms_norm": [normed("add_rms_norm")],
    "batch_invariant_linear": [product(), product("bias")],
    "convolve_chunks": [convolved("convolve_chunks")],
    "convolve_windows": [convolved("convolve_windows")],
    "embed_rms_norm": [normed("embed_rms_norm")],
    "expand_drafter_inputs": [made_room],
    "extend_queries": [extended(0), extended(2)],
    "gated_linear": [product(), product("bias"), product("norm")],
    "gated_rms_norm": [gated],
    "gumbel_noise": [
        lambda dtype, rows, device: {
            "seeds": torch.arange(rows, device=device),
            "positions": torch.arange(rows, device=device),
            "vocab_size": VOCAB,
        }
    ],
    "open_drafts": [opened(1), opened(2)],
    "paged_attention": [attended("paged_attention"), attended("paged_attention", first_position=1)],
    "prefill_attention": [attended("prefill_attention")],
    "prepare_drafter_inputs_padded": [padded],
    "prepare_next_tokens_padded": [next_of],
    "prepare_verify_inputs": [prepared(0), prepared(2)],
    "process_logits": [process(is_used=False), process(is_used=True)],
    "propose_ngram": [proposed(1), proposed(3)],
    "qkv_rope_append": [rotated(has_bias=False), rotated(has_bias=True)],
    "quantized_linear": [quantized],
    "rewind_kv_cache": [rewound],
    "rms_norm": [normed("rms_norm"), normed("rms_norm", unit_offset=True)],
    "sample": [drawn(0.0, 1.0), drawn(1.0, 1.0), drawn(0.7, 0.9)],
    "screened_linear": [screened],
    "gated_mul": [lambda dtype, rows, device: {"gate_up": floats(dtype, device, rows, 2 * WIDTH)}],
    "skinny_linear": [product(), product("bias"), product("residual"), product("norm")],
    "stream_read": [lambda dtype, rows, device: {"data": torch.arange(rows + 1, dtype=torch.int32, device=device)}],
    "varlen_attention": [attended("varlen_attention")],
    "verify_and_rewind": [verified],
    "verify_speculative_tokens": [packed],
}  # fmt: skip


def tensors_of(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of arguments or results, with a name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name), field.name)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors_of(part, key)
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part, name)


def check(
    operation: Callable[..., object],
    name: str,
    case: Case,
    dtype: torch.dtype,
    rows: int,
    device: torch.device,
) -> None:
    arguments = case(dtype, max(rows, LEAST_ROWS.get(name, 0)), device)
    result = operation(**arguments)
    given = [one for one in tensors_of(arguments) if one[0] not in RETURNED_INPUTS.get(name, ())]
    kept = {tensor.untyped_storage().data_ptr(): which for which, tensor in given if tensor.numel()}
    returned = list(tensors_of(result))
    assert returned, "the operation returns tensors"
    if name in RETURNED_INPUTS:
        returned = returned[: -len(RETURNED_INPUTS[name])]
    for _, tensor in returned:
        shared = kept.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        assert shared is None, f"a result of {name} is memory of its argument {shared}"


OPERATIONS = [
    pytest.param(name, case, dtype, id=f"{name}-{number}-{str(dtype).removeprefix('torch.')}")
    for name, cases in CASES.items()
    for number, case in enumerate(cases)
    for dtype in FLOATS
]


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize(("name", "case", "dtype"), OPERATIONS)
def test_no_result_of_a_twin_is_memory_of_an_argument(
    name: str, case: Case, dtype: torch.dtype, rows: int
) -> None:
    check(getattr(reference, name), name, case, dtype, rows, torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_no_result_of_a_kernel_is_memory_of_an_argument(name: str, rows: int, device: torch.device) -> None:
    module = getattr(reference, name).__module__.replace(".reference.", ".")
    operation = getattr(importlib.import_module(module), name)
    for case in CASES[name]:
        for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
            check(operation, name, case, dtype, rows, device)


def test_every_twin_that_returns_tensors_is_tried() -> None:
    returning = {
        name
        for name in reference.__all__
        if inspect.signature(getattr(reference, name)).return_annotation not in ("None", None)
    }
    assert returning == set(CASES)
