"""Measures how much memory there is and decides how many KV blocks are taken from it. Knows sizes, not
models."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.state.pool import NUM_SPARE_ENTRIES

CPU_KV_CACHE_BYTES = 1 << 30
CPU_KV_CACHE_SHARE = 0.25
CPU_MAX_KV_CACHE_SHARE = 0.9
# GPU memory that stays free beside the most that steps take, in bytes and as a share of what weights leave:
# for graphs that are captured while requests are served, and for gaps between tensors.
CUDA_SPARE_BYTES, CUDA_SPARE_SHARE = 256 << 20, 0.02
# A checkpoint is as large as a row's state, and few are made for each prompt: four a row keep those of recent
# chats.
MAX_CHECKPOINTS_SHARE, MAX_CHECKPOINTS_A_ROW = 0.1, 4
# Options of glibc's mallopt (malloc.h). Blocks up to this number of bytes come from the heap (32 MiB is the
# largest allowed value). The free end of the heap is returned to the system only beyond the second number.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BLOCK_BYTES, _KEPT_BYTES = 32 << 20, 256 << 20
_RETURNED_BLOCK_BYTES = 128 << 10  # glibc's own at start

Result = TypeVar("Result")


def format_bytes(size: float) -> str:
    """1536 -> "1.5 KiB"."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.{0 if units[0] == 'bytes' else 1}f} {units[0]}"


def is_out_of_memory(error: RuntimeError) -> bool:
    """Returns whether the error says that a device has too little memory. Besides PyTorch's allocator, CUDA
    raises such errors when it instantiates a graph or loads a kernel, and cuBLAS for its workspace."""
    links: list[BaseException] = [error]
    while (earlier := links[-1].__cause__ or links[-1].__context__) is not None:
        links.append(earlier)  # a capture that fails for lack of memory may raise another error
    return any(
        isinstance(link, torch.OutOfMemoryError)
        or "out of memory" in str(link)
        or "ALLOC_FAILED" in str(link)
        for link in links
    )


def available_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Returns the bytes that can be allocated now, on the CPU within the limits of the control groups of this
    process.

    root: the folder of /proc and /sys.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # returns the memory of freed tensors, which PyTorch keeps
        return torch.cuda.mem_get_info(device)[0]
    return min([_machine_bytes(root / "proc/meminfo"), *_group_bytes(root)])


def bytes_taken_by(run: Callable[[], Result]) -> tuple[Result, int]:
    """Returns the result, and the bytes of the GPU's memory that PyTorch took for it, which it keeps. Waits
    for the GPU."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    result = run()
    return result, torch.cuda.memory_reserved() - before


def spare_bytes(available: int) -> int:
    """Returns the bytes of a GPU that stay free beside the KV cache and the memory of steps. available: the
    bytes that weights leave."""
    return CUDA_SPARE_BYTES + int(CUDA_SPARE_SHARE * available)


def wanted_model_len(config: EngineConfig, model: ModelSpec) -> int:
    """Returns --max-model-len, or else all positions that the model was made for. Raises ConfigError."""
    trained = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len:,}, the model was made for {trained:,} positions "
            f"(max_position_embeddings); use {trained:,} or less"
        )
    return config.max_model_len or trained


def held_model_len(max_model_len: int, *, num_blocks: int, block_size: int) -> int:
    """Returns the most tokens of one request in the blocks that `num_kv_blocks` returned for max_model_len:
    that number, or less if it was cut to what fits."""
    return min(max_model_len, (num_blocks - 1) * block_size)


def num_checkpoints(config: EngineConfig, *, row_bytes: int, available: int) -> int:
    """Returns the number of checkpoints: copies of row state from which prefix hits continue.

    They take at most MAX_CHECKPOINTS_SHARE of the memory that the rows' own state leaves. row_bytes: the
    bytes of one row's state.
    """
    if row_bytes == 0 or not config.prefix_caching:
        return 0
    left = max(0, available - (config.num_rows + NUM_SPARE_ENTRIES) * row_bytes)
    return min(int(MAX_CHECKPOINTS_SHARE * left) // row_bytes, MAX_CHECKPOINTS_A_ROW * config.num_rows)


def num_kv_blocks(
    config: EngineConfig, *, max_model_len: int, block_bytes: int, available: int, row_bytes: int = 0
) -> int:
    """Returns the number of blocks of the KV cache: enough for one request of full length and one block more,
    and at most for one such request in every row. Where --max-model-len is not set, the full length is cut to
    what fits.

    config.device is "cpu" or "cuda". available: the bytes of the device that loaded weights leave, on CUDA
    less those of steps. row_bytes: the bytes of one row's state; the state of all rows, its checkpoints and
    the pool's spare entries are subtracted before blocks are counted. Raises ConfigError.
    """
    copies = num_checkpoints(config, row_bytes=row_bytes, available=available)
    available = max(0, available - (config.num_rows + copies + NUM_SPARE_ENTRIES) * row_bytes)
    most = _most_bytes(config, available)
    budget = config.kv_cache_memory_bytes
    fitting = fitting_tokens(config, block_bytes=block_bytes, available=available)
    if config.max_model_len is None and fitting > 0:
        max_model_len = min(max_model_len, fitting)
    blocks_per_request = -(-max_model_len // config.block_size)
    least = (blocks_per_request + 1) * block_bytes
    if max_model_len > fitting:
        raise _too_long(config, max_model_len, least=least, fitting=fitting, available=available)
    if budget is None:
        budget = _default_budget(config, least=least, available=available)
    if budget > most:
        raise ConfigError(
            f"--kv-cache-memory is {budget} ({format_bytes(budget)}), but {format_bytes(available)} "
            f"are available on {config.device}{_beside_steps(config)}; set at most {most}"
        )
    return min(budget // block_bytes, config.num_rows * blocks_per_request + 1)


def fitting_tokens(config: EngineConfig, *, block_bytes: int, available: int) -> int:
    """Returns the longest request in tokens that the KV cache can hold within the available bytes; 0 or less
    where none fits."""
    most = _most_bytes(config, available)
    budget = config.kv_cache_memory_bytes
    return (min(most if budget is None else budget, most) // block_bytes - 1) * config.block_size


def _most_bytes(config: EngineConfig, available: int) -> int:
    return available if config.device == "cuda" else int(CPU_MAX_KV_CACHE_SHARE * available)


def _beside_steps(config: EngineConfig) -> str:
    return " beside what steps take" if config.device == "cuda" else ""


def _default_budget(config: EngineConfig, *, least: int, available: int) -> int:
    if config.device == "cuda":
        return available
    return max(least, min(CPU_KV_CACHE_BYTES, int(CPU_KV_CACHE_SHARE * available)))


def _too_long(
    config: EngineConfig, max_model_len: int, *, least: int, fitting: int, available: int
) -> ConfigError:
    remedies = [f"lower --max-model-len to {fitting}"] if fitting >= 2 else []
    if config.kv_cache_memory_bytes is not None and least <= _most_bytes(config, available):
        remedies.append(f"raise --kv-cache-memory to {least}")
    if fitting < 2 and config.device == "cuda":
        remedies.append("lower --max-running or --prefill-chunk")
    granted = config.kv_cache_memory_bytes
    limit = "" if granted is None else f", --kv-cache-memory is {granted} ({format_bytes(granted)})"
    return ConfigError(
        f"one request of {max_model_len} tokens (max_model_len) needs {format_bytes(least)} of KV cache; "
        f"{format_bytes(available)} are available on {config.device}{_beside_steps(config)}{limit}; "
        f"{' or '.join(remedies) or 'free memory or take a smaller model'}"
    )


def _machine_bytes(meminfo: Path) -> int:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_bytes(root: Path) -> Iterator[int]:
    """Yields the bytes that each control group of this process still allows; page cache that can be dropped
    counts as free."""
    for folder, limit_file, usage_file in _memory_groups(root):
        try:
            limit, usage = (folder / limit_file).read_text(), int((folder / usage_file).read_text())
            stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit.strip() != "max":
            yield max(0, int(limit) - usage + int(stats.get("inactive_file", 0)))


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields the folder and the names of its limit and usage files, for this process's control group and all
    above it, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = ("memory.max", "memory.current")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                yield folder, *names


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory for the next step. Returns False where the C library has no such
    setting.

    By default it returns large blocks to the system and maps them anew: one run of 16 streams on the CPU had
    58,000 page faults, 5 % of its time; with this setting it has 80.
    """
    return _set_malloc({_M_MMAP_THRESHOLD: _KEPT_BLOCK_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES})


def return_freed_memory() -> bool:
    """Tells glibc to return freed memory to the system, until `keep_freed_memory` is called. By default glibc
    no longer does so after a large block was freed. Returns False where the C library has no such setting."""
    return _set_malloc({_M_MMAP_THRESHOLD: _RETURNED_BLOCK_BYTES})


def _set_malloc(options: Mapping[int, int]) -> bool:
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(set_option(option, size) == 1 for option, size in options.items())
