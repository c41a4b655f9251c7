"""Triton itself compiles here, for a device that is not there; nothing is launched."""

import gc
import itertools
import os
import threading
import time
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from headway.kernels import compile_aside
from headway.kernels.runtime._triton import tl

GRID, BLOCK = (1,), 16


def doubled(x_ptr, out_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr + places, 2 * tl.load(x_ptr + places))


def wrong(out_ptr):
    tl.store(out_ptr, nobody_knows_this)  # noqa: F821


class NoDevice(triton.backends.driver.DriverBase):
    """Takes the place of CUDA's driver; counts what it is to do."""

    def __init__(self) -> None:
        self.num_loaded = self.num_launched = 0
        self.is_full = False
        self.utils = self  # of load_binary and get_device_properties

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 16}

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        def launch(*args: Any) -> None:
            self.num_launched += 1

        return launch

    def load_binary(self, *args: Any) -> tuple[str, str, int, int, int]:
        """(module, function, registers, spills, threads at most)."""
        if self.is_full:
            raise RuntimeError("out of memory")
        self.num_loaded += 1
        return "module", "function", 0, 0, 1024


@pytest.fixture(autouse=True)
def no_device(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> NoDevice:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = NoDevice()
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    return device


def telling(parse: Any, failures: list[Exception]) -> Any:
    """Parse, which also appends to failures what it raises."""

    def told(function: Any) -> Any:
        try:
            return parse(function)
        except Exception as error:
            failures.append(error)
            raise

    return told


def compiled_of(kernel: Any) -> list[str]:
    """By name, where launches look for them."""
    return [compiled.name for compiled in kernel.device_caches[0][0].values()]


def test_kernels_are_compiled_and_loaded_at_the_end_and_not_launched() -> None:
    kernel, loaded, progress = triton.jit(doubled), [], []
    x, out = torch.ones(BLOCK), torch.zeros(BLOCK)
    with compile_aside(loaded.append, lambda: progress.append(len(loaded))) as aside:
        for _ in range(3):
            kernel[GRID](x, out, BLOCK=BLOCK)
        kernel[GRID](x.double(), out.double(), BLOCK=BLOCK)
        assert aside.has_compiled()
    assert aside.num_compiled == 2
    assert sorted(k.name for k in loaded) == ["doubled", "doubled"]
    assert {*loaded} == {*kernel.device_caches[0][0].values()}, "launches find what was compiled"
    assert out.tolist() == [0.0] * BLOCK
    assert len(progress) >= 4, "of two kernels, compiled and loaded"


def test_what_a_cache_has_is_not_compiled_again() -> None:
    x, out = torch.ones(BLOCK), torch.zeros(BLOCK)
    counts = []
    for _ in range(2):
        kernel = triton.jit(doubled)
        with compile_aside(id) as aside:
            assert not aside.has_compiled(), "nothing was asked for"
            kernel[GRID](x, out, BLOCK=BLOCK)
            counts.append((aside.has_compiled(), aside.num_compiled))
    assert counts == [(True, 1), (False, 0)]


def test_one_source_asked_for_by_two_functions_comes_to_both() -> None:
    kernels = [triton.jit(doubled), triton.jit(doubled)]
    x, out = torch.ones(BLOCK), torch.zeros(BLOCK)
    with compile_aside(id) as aside:
        for kernel in kernels:
            kernel[GRID](x, out, BLOCK=BLOCK)
    assert aside.num_compiled == 1
    assert [compiled_of(kernel) for kernel in kernels] == [["doubled"], ["doubled"]]


def test_sources_are_read_whatever_collects_garbage_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs at a collection, here in the midst of a source that is read, lets another thread go on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    kernel, failures = triton.jit(doubled), []
    reader = triton.runtime.jit.JITCallable
    monkeypatch.setattr(reader, "parse", telling(reader.parse, failures))
    threshold, let_go = gc.get_threshold(), lambda phase, info: time.sleep(0)
    gc.callbacks.append(let_go)
    gc.set_threshold(10)
    try:
        with compile_aside(id) as aside:
            for dtype in (
                torch.float16,
                torch.bfloat16,
                torch.float32,
                torch.float64,
                torch.int32,
                torch.int64,
            ):
                x = torch.ones(BLOCK, dtype=dtype)
                kernel[GRID](x, torch.zeros_like(x), BLOCK=BLOCK)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(let_go)
    assert not failures
    assert aside.num_compiled == 6


def test_a_kernel_that_does_not_compile_says_so_whenever_it_is_launched() -> None:
    good, bad = triton.jit(doubled), triton.jit(wrong)
    x, out = torch.ones(BLOCK), torch.zeros(BLOCK)
    with compile_aside(id):
        bad[GRID](out)
        good[GRID](x, out, BLOCK=BLOCK)
    assert compiled_of(good) == ["doubled"]
    for _ in range(2):
        with pytest.raises(triton.CompilationError, match="nobody_knows_this"):
            bad[GRID](out)


def test_kernels_stand_in_their_places_after_an_error_too() -> None:
    kernel, fresh = triton.jit(doubled), triton.jit(doubled)
    x, out = torch.ones(BLOCK), torch.zeros(BLOCK)
    listener = triton.knobs.compilation.listener

    def fail() -> None:
        with compile_aside(id):
            kernel[GRID](x, out, BLOCK=BLOCK)
            raise ValueError("of somebody else")

    with pytest.raises(ValueError, match="of somebody else"):
        fail()
    assert compiled_of(kernel) == ["doubled"]
    assert triton.knobs.compilation.listener is listener
    with compile_aside(id) as aside:
        fresh[GRID](x, out, BLOCK=BLOCK)
    assert compiled_of(fresh) == ["doubled"], "the mode before has ended"
    assert aside.num_compiled == 0


@pytest.mark.parametrize(("memory_bytes", "num_threads"), [(0, 1), (3 << 29, 3), (1 << 40, 16)])
def test_compilers_are_as_many_as_memory_holds(
    memory_bytes: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(64)})
    with compile_aside(id, memory_bytes=memory_bytes) as aside:
        assert aside.executor._max_workers == num_threads


def test_who_is_to_end_does_not_wait_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    kernel, fresh, can_go_on = triton.jit(doubled), triton.jit(doubled), threading.Event()
    x, out = torch.ones(BLOCK), torch.zeros(BLOCK)

    def end() -> None:
        with compile_aside(id) as aside:
            aside.executor.submit(can_go_on.wait)
            kernel[GRID](x, out, BLOCK=BLOCK)
            threading.Timer(0.5, can_go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end()
    assert [*kernel.device_caches[0][0].values()] == [None], "who launches it compiles it"
    with compile_aside(id) as aside:
        fresh[GRID](x, out, BLOCK=BLOCK)
    assert compiled_of(fresh) == ["doubled"], "the mode before has ended"
    assert aside.num_compiled == 1


def test_nothing_holds_after_a_hook_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton calls it for each kernel that is put in its place."""
    kernel, fresh, calls = triton.jit(doubled), triton.jit(doubled), itertools.count()
    x, out = torch.ones(BLOCK), torch.zeros(BLOCK)

    def interrupt(**what: Any) -> None:
        if next(calls) == 1:  # at the end
            raise KeyboardInterrupt

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", interrupt)
    with pytest.raises(KeyboardInterrupt), compile_aside(id):
        kernel[GRID](x, out, BLOCK=BLOCK)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    with compile_aside(id):
        fresh[GRID](x, out, BLOCK=BLOCK)
    assert compiled_of(fresh) == ["doubled"]


def test_what_is_loaded_is_launched_from_then_on(no_device: NoDevice) -> None:
    kernel = triton.jit(doubled)
    x, out = torch.ones(BLOCK), torch.zeros(BLOCK)
    with compile_aside():
        kernel[GRID](x, out, BLOCK=BLOCK)
    assert (no_device.num_loaded, no_device.num_launched) == (1, 0)
    kernel[GRID](x, out, BLOCK=BLOCK)
    assert (no_device.num_loaded, no_device.num_launched) == (1, 1)


def test_what_fails_to_load_says_so_when_it_is_launched(no_device: NoDevice) -> None:
    no_device.is_full = True
    kernel = triton.jit(doubled)
    x, out = torch.ones(BLOCK), torch.zeros(BLOCK)
    with compile_aside():
        kernel[GRID](x, out, BLOCK=BLOCK)
    with pytest.raises(RuntimeError, match="out of memory"):
        kernel[GRID](x, out, BLOCK=BLOCK)
    assert no_device.num_launched == 0
