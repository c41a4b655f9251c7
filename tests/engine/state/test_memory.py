"""How many KV blocks are taken, what is refused, and what counts as available."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.paged import load_pair

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.speculation.mtp import mtp_state
from headway.engine.state.memory import (
    available_bytes,
    format_bytes,
    held_model_len,
    num_checkpoints,
    num_kv_blocks,
)
from headway.engine.state.pool import StatePool
from headway.engine.state.specs import RowSpec, block_bytes

GIB = 1 << 30


MIB = 1 << 20


def blocks(*, available: int, context: int = 2048, **flags: object) -> int:
    """For blocks of 16 tokens and 1 MiB: 2,048 tokens are 128 blocks. The context is that of
    --max-model-len."""
    fixed = {"model_path": "m", "device": "cpu", "max_running": 64, "max_model_len": context}
    config = EngineConfig(**(fixed | flags))  # type: ignore[arg-type]
    return num_kv_blocks(config, max_model_len=context, block_bytes=MIB, available=available)


@pytest.mark.parametrize(
    ("flags", "available", "wanted"),
    [
        ({}, 64 * GIB, 1024),
        ({}, 2 * GIB, 512),
        ({}, 200 * MIB, 129),
        ({"max_running": 2}, 64 * GIB, 257),
        ({"max_running": 1}, 64 * GIB, 129),
        ({"kv_cache_memory_bytes": 300 * MIB + 5}, 64 * GIB, 300),
        ({"kv_cache_memory_bytes": 129 * MIB}, 64 * GIB, 129),
        ({"block_size": 32, "max_running": 8}, 64 * GIB, 513),
        ({"device": "cuda"}, 10 * GIB, 8193),
        ({"device": "cuda"}, 4 * GIB, 4096),
    ],
    ids=[
        "a-gibibyte", "a-quarter", "one-request", "few-rows", "one-row", "as-set", "just-enough",
        "large-blocks", "cuda-rows", "cuda-all",
    ],
)  # fmt: skip
def test_blocks_taken(flags: dict[str, object], available: int, wanted: int) -> None:
    assert blocks(available=available, **flags) == wanted


@pytest.mark.parametrize(
    ("flags", "available", "parts"),
    [
        ({}, 100 * MIB, ["2048 tokens", "129.0 MiB", "100.0 MiB are available", "--max-model-len to 1424"]),
        ({}, MIB, ["129.0 MiB", "smaller model"]),
        (
            {"kv_cache_memory_bytes": 10 * MIB},
            GIB,
            [
                "is 10485760 (10.0 MiB)",
                "--max-model-len to 144 or raise --kv-cache-memory to 135266304",
            ],
        ),
        (
            {"kv_cache_memory_bytes": 2 * GIB},
            GIB,
            ["is 2147483648 (2.0 GiB)", "1.0 GiB are available", "at most 966367641"],
        ),
    ],
    ids=["too-long", "hopeless", "set-too-low", "set-too-high"],
)
def test_what_cannot_be_met_says_what_would(
    flags: dict[str, object], available: int, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        blocks(available=available, **flags)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("max_model_len", "flags"), [(1424, {}), (144, {"kv_cache_memory_bytes": 10 * MIB})], ids=["all", "set"]
)
def test_the_remedy_that_is_named_works_and_one_token_more_does_not(
    max_model_len: int, flags: dict[str, object]
) -> None:
    assert blocks(available=100 * MIB, context=max_model_len, **flags) > max_model_len // 16
    with pytest.raises(ConfigError):
        blocks(available=100 * MIB, context=max_model_len + 1, **flags)


@pytest.mark.parametrize(
    ("flags", "available", "length"),
    [
        ({}, GIB, 2048),
        ({}, 100 * MIB, 1424),
        ({"max_running": 1}, 100 * MIB, 1424),
        ({"kv_cache_memory_bytes": 10 * MIB}, GIB, 144),
        ({"kv_cache_memory_bytes": 128 * MIB}, GIB, 2032),
        ({"kv_cache_memory_bytes": 129 * MIB}, GIB, 2048),
        ({"block_size": 32}, 100 * MIB, 2048),
        ({"device": "cuda"}, 130 * MIB, 2048),
        ({"device": "cuda", "max_running": 4}, 117 * MIB, 1856),
    ],
    ids=["all", "cut", "one-row", "as-set", "one-block-less", "just-enough", "large-blocks", "cuda", "cuda-few-rows"],
)  # fmt: skip
def test_a_context_that_nobody_has_set_is_cut_to_what_one_request_can_have(
    flags: dict[str, object], available: int, length: int
) -> None:
    """The longest that would be served if it were set: that many tokens fit, and one more does not."""
    num_blocks = blocks(available=available, **{"max_model_len": None, **flags})
    size = int(str(flags.get("block_size", 16)))
    assert held_model_len(2048, num_blocks=num_blocks, block_size=size) == length
    assert blocks(available=available, context=length, **flags) == num_blocks
    if length < 2048:
        with pytest.raises(ConfigError):
            blocks(available=available, context=length + 1, **flags)


def test_a_context_that_nobody_has_set_is_refused_where_not_one_block_fits() -> None:
    with pytest.raises(ConfigError, match=r"129\.0 MiB of KV cache; 2\.0 MiB are available"):
        blocks(available=2 * MIB, max_model_len=None)


@pytest.mark.parametrize(
    ("has_draft_head", "wanted"), [(False, 6144), (True, 8192 + 96)], ids=["plain", "mtp"]
)
def test_a_block_holds_keys_values_and_a_state_for_the_head(
    has_draft_head: bool, wanted: int, tmp_path: Path
) -> None:
    """2 x 3 or, with the head's, 4 layers x 16 tokens x 2 heads x 16 x 2 bytes; 48 x 2 bytes."""
    models = load_pair(random_mimo(tmp_path), dtype="bfloat16", with_draft_head=has_draft_head)
    layers, head = models.target.state(), models.draft
    draft_layers, kept = ((), ()) if head is None else (head.state(1), mtp_state(head, 1))
    pool = StatePool(
        layers, kept, draft_layers=draft_layers, num_blocks=5, block_size=16, device=torch.device("cpu")
    )
    assert pool.block_bytes() == block_bytes((*layers, *draft_layers, kept), 16) == wanted
    assert sum(tensor.nbytes for tensor in pool.by_block()) == 5 * wanted


def group(root: Path, folder: str, **files: str) -> None:
    (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / folder / name.replace("__", ".")).write_text(text + "\n")


def machine(root: Path, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:  24000 kB\nMemAvailable:   10000 kB\nCached: 5 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def test_memory_of_the_machine_is_what_it_calls_available(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n")
    assert available_bytes(torch.device("cpu"), root) == 10_000 * 1024


def test_a_limit_of_a_group_above_counts_and_dropped_pages_are_free(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/app/worker\n")
    group(root, "app/worker", memory__max="max", memory__current="900", memory__stat="anon 1")
    group(root, "app", memory__max="1000", memory__current="900", memory__stat="anon 1\ninactive_file 250")
    assert available_bytes(torch.device("cpu"), root) == 350


def test_the_first_version_of_groups_is_read_too(tmp_path: Path) -> None:
    root = machine(tmp_path, "5:cpu:/box\n4:memory:/box\n0::/\n")
    group(
        root, "memory/box",
        memory__limit_in_bytes="5000", memory__usage_in_bytes="2000", memory__stat="inactive_file 0",
    )  # fmt: skip
    assert available_bytes(torch.device("cpu"), root) == 3000


def test_a_machine_without_proc_is_measured_by_its_pages(tmp_path: Path) -> None:
    assert available_bytes(torch.device("cpu"), tmp_path) > 1 << 28


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (GIB, "1.0 GiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
    ids=str,
)
def test_sizes_read_well(size: int, text: str) -> None:
    assert format_bytes(size) == text


STEPS_OF_LARGE_BLOCKS = """
import ctypes, resource, sys
import torch
from headway.engine.state.memory import keep_freed_memory
RETURN_BEYOND, KIB = -1, 1024
assert ctypes.CDLL(None).mallopt(RETURN_BEYOND, 128 * KIB)  # where glibc starts from before it adapts
assert sys.argv[1] == "returned" or keep_freed_memory()
def step():
    blocks = [torch.ones(3 << 20) for _ in range(4)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_a_step_finds_the_memory_of_the_last_one_mapped() -> None:
    faults = {how: int(_python(STEPS_OF_LARGE_BLOCKS, how)) for how in ("returned", "kept")}
    assert faults["returned"] > 10 * faults["kept"], faults


def _python(source: str, *arguments: str) -> str:
    command = [sys.executable, "-P", "-c", source, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_state_of_all_rows_is_taken_before_blocks_are_counted() -> None:
    config = EngineConfig(model_path="m", device="cuda", max_running=64, max_model_len=2048)
    room = {
        row_bytes: num_kv_blocks(
            config, max_model_len=2048, block_bytes=MIB, available=4 * GIB, row_bytes=row_bytes
        )
        for row_bytes in (0, MIB)
    }
    assert room[0] == 4096
    # 64 rows leave 4,032 MiB; 256 checkpoints would take less than a tenth of that.
    assert num_checkpoints(config, row_bytes=MIB, available=4 * GIB) == 256
    spec, meta = RowSpec("state", (MIB,), torch.int8), torch.device("meta")
    pool = StatePool([(spec,)], num_blocks=0, num_rows=64, num_checkpoints=256, block_size=16, device=meta)
    of_rows = pool.kinds()[0][1]["state"].nbytes
    assert room[MIB] == 4096 - of_rows // MIB


@pytest.mark.parametrize(
    ("row_bytes", "prefix_caching", "expected"),
    [(16 * MIB, True, 19), (0, True, 0), (MIB, False, 0), (100 * MIB, True, 0)],
    ids=["a-tenth", "no-row-state", "no-prefix-caching", "rows-take-all"],
)
def test_checkpoints_take_a_tenth_of_what_rows_leave(
    row_bytes: int, *, prefix_caching: bool, expected: int
) -> None:
    config = EngineConfig(model_path="m", device="cuda", max_running=64, prefix_caching=prefix_caching)
    assert num_checkpoints(config, row_bytes=row_bytes, available=4 * GIB) == expected
