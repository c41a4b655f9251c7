"""C sources that are compiled when they are needed: once, and with a word where they cannot be."""

from __future__ import annotations

import ctypes
import logging
import shutil
from pathlib import Path

import pytest
import torch

from headway.kernels import has_integer_products
from headway.kernels.linear import _integer_cpu_linear
from headway.kernels.runtime import _cpu_library

SOURCE = Path(_integer_cpu_linear.__file__).with_name("integer_cpu_linear.c")


@pytest.mark.skipif(not has_integer_products(), reason="needs Linux, an x86 CPU with AVX2 and a compiler")
def test_a_source_is_compiled_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "answer.c"

    def answer() -> int:
        library = _cpu_library.cpu_library(source)
        assert isinstance(library, ctypes.CDLL)
        found: int = library.answer()
        return found

    text = '#include "cpu_library.h"\nint answer(void) { (void)run, (void)thread_number, (void)number_of_threads; return 42; }\n'
    source.write_text(text)
    assert answer() == 42
    with monkeypatch.context() as patch:
        patch.setattr(_cpu_library.shutil, "which", lambda name: None)
        assert answer() == 42
    source.write_text(text.replace("42", "43"))
    assert answer() == 43
    cut_off = shutil.copytree(tmp_path / "cache", tmp_path / "cut off")
    kept = list(cut_off.rglob("answer.so"))
    for file in kept:
        file.write_bytes(b"")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cut_off))
    assert answer() == 43
    assert any(file.read_bytes()[:4] == b"\x7fELF" for file in kept)


@pytest.mark.parametrize(
    ("capability", "programs", "told"),
    [("DEFAULT", {}, "an x86 CPU with AVX2"), ("AVX2", {}, "gcc or clang"), ("AVX2", {"gcc": "false"}, "status 1")],
    ids=["processor", "no-compiler", "broken-compiler"],
)  # fmt: skip
def test_what_is_missing_is_logged(
    capability: str,
    programs: dict[str, str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = {name: shutil.which(program) for name, program in programs.items()}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(_cpu_library.shutil, "which", found.get)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert _cpu_library.cpu_library(SOURCE) is None
    assert told in caplog.text
