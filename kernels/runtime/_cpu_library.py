"""Compiles C sources for x86 CPUs into Triton's cache when they are first needed. They are called through
ctypes and use PyTorch's threads. Knows no operation.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

try:
    from triton.runtime.cache import get_cache_manager
except ImportError:
    get_cache_manager = None

_HEADER = Path(__file__).with_name("cpu_library.h")
_THREAD_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
# Multiplications and additions are rounded separately, unless the source fuses them explicitly.
_FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c")
_VNNI_FLAGS = ("-mavx512vl", "-mavx512vnni")
logger = logging.getLogger(__name__)


def cpu_library(source: Path) -> ctypes.CDLL | None:
    """Returns the library compiled from the source, which includes cpu_library.h. Returns None and logs the
    reason if the processor, the system or a missing compiler prevents that."""
    capability = torch.backends.cpu.get_cpu_capability()
    if get_cache_manager is None or capability not in ("AVX2", "AVX512"):
        logger.warning("%s needs Linux and an x86 CPU with AVX2", source.name)
        return None
    has_vnni = capability == "AVX512" and torch.cpu._is_vnni_supported()
    try:
        library = _loaded(source, (*_FLAGS, *(_VNNI_FLAGS if has_vnni else ())))
        loaded = ctypes.CDLL(None)
        functions = (ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in _THREAD_FUNCTIONS)
        library.use_threads(*functions)
    except (OSError, AttributeError, RuntimeError) as error:
        logger.warning(
            "%s cannot be compiled or loaded, which needs gcc or clang, OpenMP in PyTorch and a folder for Triton's cache: %s",
            source.name,
            error,
        )
        return None
    logger.info("%s uses %s", source.name, "AVX-512 VNNI" if has_vnni else "AVX2")
    return library


def _loaded(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Returns the shared library, from the cache or newly compiled. Raises OSError, and RuntimeError if there
    is no folder for the cache."""
    texts = source.read_bytes() + _HEADER.read_bytes() + " ".join(flags).encode()
    kept, name = get_cache_manager(hashlib.sha256(texts).hexdigest()), f"{source.stem}.so"
    found: str | None = kept.get_file(name)
    if found is not None:
        with suppress(OSError):  # a truncated file is compiled again
            return ctypes.CDLL(found)
    compiler = next((path for path in map(shutil.which, ("gcc", "clang")) if path is not None), None)
    if compiler is None:
        raise FileNotFoundError("neither is in PATH")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, name)
        command = [compiler, *flags, "-I", str(_HEADER.parent), "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"{compiler} ended with status {done.returncode}: {done.stderr.strip()}")
        return ctypes.CDLL(kept.put(made.read_bytes(), name))
