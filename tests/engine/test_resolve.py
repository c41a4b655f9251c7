"""A configuration is resolved for a model and a device of which nothing exists: what is open is decided, and
what is counted fits."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from headway_testing.outline import outline

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.resolve import resolve
from headway.kernels import ScoreRule
from headway.kernels.attention import paged_attention as paged_attention_module

DEVICES: list[dict[str, Any]] = [
    {"has_float8": True},
    {"device": "cpu", "dtype": torch.float32},
    {"has_draft_head": False},
]


@pytest.mark.parametrize("measures", DEVICES, ids=str)
def test_nothing_is_left_to_be_decided(measures: dict[str, Any]) -> None:
    """None means of mixed_above_tokens that no round shares its pass, of max_extra_rows that none is refused,
    of threads that they are torch's, of drafter_path and drafter_taps that the drafter has no folder."""
    resolved = resolve(EngineConfig(model_path=""), outline(**measures))
    values = msgspec.structs.asdict(resolved.config)
    assert "auto" not in values.values()
    assert resolved.config.device == measures.get("device", "cuda")
    open_ones = {key for key, value in values.items() if value is None}
    is_cpu = resolved.config.device == "cpu"
    chosen = {"mixed_above_tokens"} if is_cpu else {"threads", "max_extra_rows"}
    chosen |= {
        "drafter_path",
        "drafter_taps",
        "kv_cache_memory_bytes",
        "prefill_chunk",
        "relaxed_thinking",
        "synthetic_acceptance",
    }
    assert open_ones == chosen


@pytest.mark.parametrize("measures", DEVICES, ids=str)
def test_what_is_resolved_stays_as_it_is(measures: dict[str, Any]) -> None:
    shape = outline(**measures)
    resolved = resolve(EngineConfig(model_path=""), shape)
    assert resolve(resolved.config, shape) == resolved


@pytest.mark.parametrize("gib", [2, 7, 110])
@pytest.mark.parametrize("measures", DEVICES, ids=str)
def test_all_that_is_counted_fits(measures: dict[str, Any], gib: float) -> None:
    available = int(gib * 2**30)
    resolved = resolve(EngineConfig(model_path=""), outline(available=available, **measures))
    taken = resolved.draft_bytes + resolved.rows_bytes + resolved.steps_bytes
    assert taken + resolved.num_blocks * resolved.block_bytes <= available
    assert (resolved.steps_bytes > 0) == (resolved.config.device == "cuda")
    assert resolved.num_blocks * resolved.config.block_size > resolved.max_model_len


@pytest.mark.parametrize("gib", [24, 80, 140])
def test_the_cache_takes_what_steps_leave_of_a_gpu(gib: int) -> None:
    """All but 2 GiB of measured steps, 2 % and 256 MiB, whatever was estimated."""
    shape = outline(available=gib << 30, num_layers=36)
    resolved = resolve(EngineConfig(model_path=""), shape, steps_bytes=2 << 30)
    cache = resolved.num_blocks * resolved.block_bytes
    left = shape.available - resolved.draft_bytes
    kept = left - resolved.rows_bytes - cache
    assert 0 <= kept - (2 << 30) - (256 << 20) - left // 50 < 2 * resolved.block_bytes
    estimated = resolve(EngineConfig(model_path=""), shape)
    assert abs(estimated.num_blocks - resolved.num_blocks) * resolved.block_bytes < 1 << 30


def test_a_cpu_measures_no_steps() -> None:
    shape, config = outline(device="cpu", dtype=torch.float32), EngineConfig(model_path="")
    assert resolve(config, shape, steps_bytes=1 << 40) == resolve(config, shape)


def test_a_cache_that_leaves_steps_too_little_is_refused_with_the_most_that_it_can_have() -> None:
    shape = outline(available=24 << 30, num_layers=36)
    most = resolve(EngineConfig(model_path=""), shape)
    config = EngineConfig(model_path="", kv_cache_memory_bytes=24 << 30)
    with pytest.raises(
        ConfigError, match=r"are available on cuda beside what steps take; set at most"
    ) as error:
        resolve(config, shape)
    limit = int(str(error.value).rsplit(" ", 1)[1])
    assert (
        resolve(msgspec.structs.replace(config, kv_cache_memory_bytes=limit), shape).num_blocks
        == most.num_blocks
    )
    with pytest.raises(ConfigError):
        resolve(msgspec.structs.replace(config, kv_cache_memory_bytes=limit + 1), shape)


def test_a_context_that_is_not_set_is_cut_and_one_that_is_set_is_refused() -> None:
    small, config = (
        outline(available=420_000_000, has_draft_head=False),
        EngineConfig(model_path="", max_running=4),
    )
    length = resolve(config, small).max_model_len
    assert 0 < length < small.spec.max_position_embeddings
    with pytest.raises(ConfigError, match=f"lower --max-model-len to {length}"):
        resolve(msgspec.structs.replace(config, max_model_len=length + 16), small)


def test_before_the_weights_are_loaded_their_formats_take_no_memory() -> None:
    """A model that will not fit is told by what its weights take, not by what its drafts take."""
    early = replace(outline(has_float8=True, available=600_000_000), counts_weights=False)
    config = EngineConfig(model_path="", max_running=4)
    assert resolve(config, early).draft_bytes > early.available
    with pytest.raises(ConfigError):
        resolve(config, replace(early, counts_weights=True))


def test_a_head_that_may_be_missing_cuts_no_context_before_the_weights_are_loaded() -> None:
    """config.json announces it, and only the weights tell whether it is there."""
    measures = {"device": "cpu", "dtype": torch.float32, "available": 4_000_000_000}
    announced, headless = (
        replace(outline(has_draft_head=has_head, **measures), counts_weights=False)
        for has_head in (True, False)
    )
    tight = EngineConfig(model_path="", depth=3, drafter="mtp", kv_cache_memory_bytes=200_000_000)
    assert (
        resolve(tight, announced).max_model_len
        == resolve(msgspec.structs.replace(tight, drafter="ngram"), headless).max_model_len
        > resolve(tight, outline(has_draft_head=True, **measures)).max_model_len
    )


def test_an_inspection_goes_on_after_a_check_that_fails() -> None:
    config = EngineConfig(model_path="", deterministic=True, fast_math=True, kv_cache_memory_bytes=1)
    errors: list[str] = []

    class Noted(AbstractContextManager[None]):
        def __exit__(self, kind: object, error: object, trace: object) -> bool:
            errors.extend([str(error)] if isinstance(error, ConfigError) else [])
            return isinstance(error, ConfigError)

    resolved = resolve(config, outline(), Noted)
    assert [error.split()[0] for error in errors] == ["--deterministic", "one"]
    assert (resolved.num_blocks, resolved.max_model_len) == (0, 32_768)
    with suppress(ConfigError):
        resolve(config, outline())
        pytest.fail("the first error ends a start")


@pytest.mark.parametrize(("length", "expected"), [(32_768, 272_629_760), (262_144, 2_181_038_080)])
def test_the_partial_results_of_attention_are_counted_as_they_are_taken(
    length: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 rows of 4 queries x 32 heads x (128 + 2) float32 for each 2,048 places of their block tables,
    once in each of two memory pools."""
    taken: list[int] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **_: taken.append(sum(t.nbytes for t in args[7:10]))

    class Combine:
        def __getitem__(self, grid: object) -> Any:
            return lambda *_, **__: None

    monkeypatch.setattr(paged_attention_module, "takes_triton", lambda _: True)
    monkeypatch.setattr(paged_attention_module, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(paged_attention_module, "overlap", lambda _: (False, {}))
    monkeypatch.setattr(paged_attention_module, "_partial_kernel", Kernel())
    monkeypatch.setattr(paged_attention_module, "_combine_kernel", Combine())
    with torch.device("meta"):
        query, cache = (torch.empty(*s, dtype=torch.bfloat16) for s in ((256, 4, 32, 128), (9, 16, 8, 128)))
        table = torch.empty(256, length // 16, dtype=torch.int32)
        starts = torch.empty(256, dtype=torch.int64)
    paged_attention_module.paged_attention(query, cache, cache, table, starts, ScoreRule(0.1))
    shape = outline()
    assert taken == [shape.attention_scratch_bytes(256, 4, length)] == [expected]
    sizes = {"num_rows": 256, "depth": 3, "most_prompt_tokens": 1024}
    estimates = [shape.estimated_steps_bytes(**sizes, max_model_len=n) for n in (length, 2048)]
    assert estimates[0] - estimates[1] == 2 * (expected - shape.attention_scratch_bytes(256, 4, 2048))
