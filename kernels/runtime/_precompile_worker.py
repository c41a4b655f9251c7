"""Compiles recorded specialisations of kernels into Triton's cache on disk, in worker processes that use no
GPU.

A worker reads pickled `Specialization`s from stdin, answers each with one pickled `Answer` on stdout, and
ends with stdin. Knows no operation.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pickle
import sys
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import torch

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
except ImportError:
    triton = GPUTarget = ASTSource = GluonASTSource = None
    DriverBase = object

logger = logging.getLogger(__name__)


class Specialization(NamedTuple):
    """The inputs from which Triton compiles a kernel, as its `jit_cache_hook` provides them."""

    module: str
    name: str  # qualified, within the module
    target: tuple[str, int, int]  # backend, architecture, threads per warp
    signature: dict[str, Any]  # type by parameter
    constants: dict[tuple[int, ...], Any]  # by path of indices among the parameters
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


class Answer(NamedTuple):
    """The result for one specialisation. was_missing: the cache did not have the kernel. error: the reason
    why it could not be compiled, empty if it was."""

    was_missing: bool
    error: str = ""


class OfflineDriver(DriverBase):  # type: ignore[misc]
    """Names the GPU for which Triton compiles. It can load and launch nothing, and creates no CUDA
    context."""

    def __init__(self, target: tuple[str, int, int]) -> None:
        self._target = GPUTarget(*target)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is launched in a worker process")


def compile_specialization(wanted: Specialization) -> bool:
    """Compiles the kernel into Triton's cache on disk. Returns whether the cache did not have it before.
    Raises Triton's exceptions, and ImportError or AttributeError if the module does not have the kernel."""
    kernel: Any = functools.reduce(getattr, wanted.name.split("."), importlib.import_module(wanted.module))
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, wanted.signature, wanted.constants, wanted.attributes)
    hits: list[bool] = []
    listener = triton.knobs.compilation.listener

    def listen(**what: Any) -> None:
        hits.append(what["cache_hit"])
        if listener is not None:
            listener(**what)

    triton.knobs.compilation.listener = listen
    try:
        triton.compile(source, target=GPUTarget(*wanted.target), options=wanted.options)
    finally:
        triton.knobs.compilation.listener = listener
    return not all(hits)


def answer_requests(requests: BinaryIO, answers: BinaryIO) -> None:
    """Serves one parent until it closes `requests`. All specialisations are for the same GPU."""
    has_driver = False
    while requests.peek(1):  # type: ignore[attr-defined]
        wanted: Specialization = pickle.load(requests)
        if not has_driver:
            triton.runtime.driver.set_active(OfflineDriver(wanted.target))
            has_driver = True
        try:
            answer = Answer(compile_specialization(wanted))
        except Exception as error:
            logger.debug("%s could not be compiled", wanted.name, exc_info=True)
            answer = Answer(was_missing=True, error=f"{wanted.name}: {type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a compiler may print other text
    with suppress(BrokenPipeError):  # the parent has ended
        answer_requests(sys.stdin.buffer, answers)
