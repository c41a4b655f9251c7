"""Keeps the checkout's own folders from shadowing installed packages, and poisons uninitialised memory."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

# Test workers share the cores, so that idle threads spin only briefly, as those of an engine do. torch and
# NumPy read these variables when they are loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
import torch
from headway_testing.grids import INTERPRETED, TWINS, thin_products
from headway_testing.tools import skipped_for_missing_tools

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _ROOT]
os.environ["PYTHONSAFEPATH"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# What a shell starts in the background ignores Ctrl-C, and so does all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-tools", action="store_true", help="a test skipped for a missing program fails the run"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempts imported modules and collected tests from garbage collection: a pass over these million objects
    takes half a second, both here and whenever a test makes many objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs before pytest's own choice by marker, which reads the marks that this sets."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    thin_products(items, INTERPRETED if is_interpreted else TWINS)


def _skipped(config: pytest.Config) -> list[str]:
    """Tests skipped for a missing program; none in a worker of pytest-xdist, which writes no summary."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return skipped_for_missing_tools(reporter.stats.get("skipped", [])) if reporter else []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--require-tools") and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was skipped for want of a program, by name, and how many."""
    if skipped := _skipped(config):
        terminalreporter.section("skipped because a program is missing")
        for line in skipped:
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            f"skipped: {len(skipped)}; `tests/install_tools.sh test` says what to install"
        )


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        if tensor.dtype in (torch.int32, torch.int64):
            return tensor.fill_(torch.iinfo(tensor.dtype).max // 3)
        return tensor

    return empty


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty returns NaN or huge integers, so that reading before writing shows."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two test workers share two cores."""
    torch.set_num_threads(1)
