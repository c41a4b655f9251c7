"""Triton itself compiles here, in worker processes, for a device that is not there; nothing is launched."""

import importlib
import io
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from headway.kernels import compile_in_workers, log_compilations
from headway.kernels.runtime._precompile import Precompiler
from headway.kernels.runtime._precompile_worker import (
    Answer,
    OfflineDriver,
    Specialization,
    answer_requests,
    compile_specialization,
)

KERNELS = Path(__file__).parents[1]
SOURCE = """
import os
import signal
import triton
import triton.language as tl

@triton.jit
def doubled(x_ptr, out_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr + places, 2 * tl.load(x_ptr + places))

@triton.jit
def summed(x_ptr, out_ptr, SIZES: tl.constexpr):
    places = tl.arange(0, SIZES[0] * SIZES[1])
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + places), 0))

@triton.jit
def wrong(out_ptr):
    tl.store(out_ptr, not_defined_anywhere)

class Folder:
    @staticmethod
    @triton.jit
    def tripled(x_ptr, out_ptr):
        tl.store(out_ptr, 3 * tl.load(x_ptr))

if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and os.environ.get("MADE_UP_FAULT") == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and os.environ.get("MADE_UP_FAULT") == "hangs":
    signal.pause()
"""
GRID = (1,)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class LaunchDriver(OfflineDriver):
    """Takes the place of CUDA's driver in the process that launches; counts what it is to do."""

    def __init__(self, target: tuple[str, int, int]) -> None:
        super().__init__(target)
        self.num_launched = 0
        self.utils = self  # of load_binary and get_device_properties

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 16}

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        def launch(*args: Any) -> None:
            self.num_launched += 1

        return launch

    def load_binary(self, *args: Any) -> tuple[str, str, int, int, int]:
        """(module, function, registers, spills, threads at most)."""
        return "module", "function", 0, 0, 1024


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchDriver:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one worker: each imports PyTorch and Triton
    driver = LaunchDriver(("cuda", 90, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of kernels, which worker processes import by its name."""
    (tmp_path / "made_up_kernels.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("made_up_kernels")
    del sys.modules["made_up_kernels"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that this process compiles."""
    names: list[str] = []
    listener = lambda *, src, cache_hit, **_: None if cache_hit else names.append(src.name)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    return names


def launch_all(module: ModuleType) -> None:
    """Seven specialisations."""
    for dtype in FLOATS:
        x = torch.ones(16, dtype=dtype)
        module.doubled[GRID](x, torch.zeros_like(x), BLOCK=16)
    x, out = torch.ones(16), torch.zeros(16)
    module.summed[GRID](x, out, SIZES=(4, 2))
    module.summed[GRID](x, out, SIZES=(4, 4))
    module.Folder.tripled[GRID](x, out)


@pytest.mark.slow
def test_what_this_process_compiles_itself_is_logged_at_debug(
    made_up: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not what workers compile, whose kernels it finds in the cache."""
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    caplog.set_level(logging.DEBUG)
    log_compilations()
    x = torch.ones(16)
    with compile_in_workers():
        for dtype in FLOATS:
            made_up.doubled[GRID](x.to(dtype), x.to(dtype), BLOCK=16)
    launch_all(made_up)
    told = [record.getMessage() for record in caplog.records if "in this process" in record.getMessage()]
    names = ["doubled", "summed", "summed", "tripled"]
    assert [line.split()[1].rpartition(".")[2] for line in told] == names, "the first is compiled here, too"


def test_launches_only_record_and_find_what_workers_compiled_afterwards(
    made_up: ModuleType, driver: LaunchDriver, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    hook, calls = triton.knobs.runtime.jit_cache_hook, []
    with compile_in_workers(lambda: calls.append(1)) as precompiler:
        assert not precompiler.has_missing
        for _ in range(3):
            launch_all(made_up)
        assert precompiler.has_missing
    assert (precompiler.num_compiled, precompiler.num_workers) == (7, 2)
    assert compiled == ["doubled"], "the first one that is missing is compiled by the process itself"
    assert driver.num_launched == 0
    assert calls, "progress is told while workers are waited for"
    assert triton.knobs.runtime.jit_cache_hook is hook
    launch_all(made_up)
    assert driver.num_launched == 7
    assert compiled == ["doubled"]


def test_kernels_in_the_cache_start_no_worker_and_are_not_launched(
    made_up: ModuleType, driver: LaunchDriver, compiled: list[str]
) -> None:
    launch_all(made_up)
    assert len(compiled) == driver.num_launched == 7
    for kernel in (made_up.doubled, made_up.summed, made_up.Folder.tripled):
        kernel.device_caches.clear()  # as in a new process
    with compile_in_workers() as precompiler:
        launch_all(made_up)
    assert not precompiler.has_missing
    assert (precompiler.num_compiled, precompiler.num_workers) == (0, 0)
    assert len(compiled) == driver.num_launched == 7


def test_loaded_kernels_are_launched_as_ever(made_up: ModuleType, driver: LaunchDriver) -> None:
    launch_all(made_up)
    with compile_in_workers() as precompiler:
        launch_all(made_up)
    assert driver.num_launched == 14
    assert not precompiler.has_missing


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_told_once_and_by_whoever_launches_it(
    made_up: ModuleType, driver: LaunchDriver, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with compile_in_workers() as precompiler:
        for _ in range(2):
            launch_all(made_up)
            made_up.wrong[GRID](torch.zeros(1))
    assert precompiler.num_compiled == 7
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "1 of 8 kernels were not compiled" in warning.getMessage()
    assert "not_defined_anywhere" in warning.getMessage()
    with pytest.raises(triton.CompilationError, match="not_defined_anywhere"):
        made_up.wrong[GRID](torch.zeros(1))


def test_a_kernel_that_no_module_has_is_compiled_when_it_is_launched(
    made_up: ModuleType, driver: LaunchDriver, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    kernel = made_up.Folder.tripled
    del made_up.Folder.tripled
    with compile_in_workers() as precompiler:
        kernel[GRID](torch.ones(1), torch.zeros(1))
    assert not precompiler.has_missing
    assert "1 of 1 kernels were not compiled" in caplog.text
    kernel[GRID](torch.ones(1), torch.zeros(1))
    assert (compiled, driver.num_launched) == (["tripled"], 1)


@pytest.mark.slow
def test_workers_that_die_end_nothing(
    made_up: ModuleType,
    driver: LaunchDriver,
    compiled: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MADE_UP_FAULT", "dies")
    with compile_in_workers() as precompiler:
        launch_all(made_up)
    assert precompiler.num_compiled == 1, "by the process itself"
    assert "6 of 7 kernels were not compiled by worker processes; each is compiled when" in caplog.text
    launch_all(made_up)
    assert (len(compiled), driver.num_launched) == (7, 7)


def test_workers_that_cannot_be_started_end_nothing(
    made_up: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with compile_in_workers() as precompiler:
        launch_all(made_up)
    assert precompiler.num_compiled == 1
    assert "6 of 7 kernels were not compiled" in caplog.text


@pytest.mark.slow
def test_what_is_recorded_is_compiled_though_the_launches_end_by_an_error(
    made_up: ModuleType, compiled: list[str]
) -> None:
    hook = triton.knobs.runtime.jit_cache_hook

    def fail() -> None:
        with compile_in_workers():
            launch_all(made_up)
            raise ValueError("of somebody else")

    with pytest.raises(ValueError, match="of somebody else"):
        fail()
    assert triton.knobs.runtime.jit_cache_hook is hook
    launch_all(made_up)
    assert compiled == ["doubled"]


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_workers(made_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP_FAULT", "hangs")
    used: list[Precompiler] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    def end() -> None:
        with compile_in_workers(interrupt) as precompiler:
            used.append(precompiler)
            launch_all(made_up)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        end()
    assert time.monotonic() - started < 60
    processes = used[0]._processes
    assert processes
    assert all(process.returncode is not None for process in processes)
    assert triton.knobs.runtime.jit_cache_hook is None


@pytest.mark.parametrize(("memory_bytes", "num_workers"), [(0, 1), (3 << 29, 3), (1 << 40, 7)])
def test_there_are_at_most_as_many_workers_as_memory_and_kernels_ask_for(
    memory_bytes: int, num_workers: int, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(64)})
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with compile_in_workers(memory_bytes=memory_bytes) as precompiler:
        launch_all(made_up)
        made_up.doubled[GRID](torch.ones(16, dtype=torch.int32), torch.zeros(16), BLOCK=16)
    assert precompiler.num_workers == num_workers


def doubled(dtype: str) -> Specialization:
    return Specialization(
        module="made_up_kernels",
        name="doubled",
        target=("cuda", 80, 32),
        signature={"x_ptr": dtype, "out_ptr": dtype, "BLOCK": "constexpr"},
        constants={(2,): 16},
        attributes={},
        options={"num_warps": 1},
    )


@pytest.mark.usefixtures("made_up")
def test_a_worker_answers_every_request_and_ends_with_its_input(compiled: list[str]) -> None:
    bad = doubled("*fp32")._replace(name="no_such_kernel")
    asked = [doubled("*fp32"), bad, doubled("*fp32"), doubled("*i64")]
    answers = io.BytesIO()
    answer_requests(io.BufferedReader(io.BytesIO(b"".join(map(pickle.dumps, asked)))), answers)  # type: ignore[arg-type]
    answers.seek(0)
    first, failed, again, other = (pickle.load(answers) for _ in asked)
    assert (first, again, other) == (Answer(True), Answer(False), Answer(True))
    assert "no_such_kernel: AttributeError" in failed.error
    assert compiled == ["doubled", "doubled"], "a listener that was there before is told"
    assert not compile_specialization(doubled("*i64"))


# Descriptors of bulk copies, low-precision weights, numbers that are constants, and pointers of all types.
SEVERAL = ["_hopper_linear", "quantized_linear", "rope_append", "store_pending_states"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [["90", *SEVERAL], *(pytest.param([capability], marks=pytest.mark.long) for capability in ("80", "90", "100"))],
    ids=["several", "80", "90", "100"],
)  # fmt: skip
def test_launches_of_every_kernel_find_what_workers_compiled(choice: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(KERNELS / "launch_from_cache.py"), *choice]
    ended = subprocess.run(
        command,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path / "kernels")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
