"""Kernels compiled side by side, by threads, before anything launches them.

Triton compiles a kernel when it is first launched, one after the other: a start with an empty cache waits for some 100.
While `compile_aside` holds, launches of kernels that are not compiled do nothing but ask for them. Knows no operation.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

try:
    import triton
    from triton import AsyncCompileMode
except ImportError:
    triton, AsyncCompileMode = None, object

# Each takes some hundred megabytes, and much of a kernel's way holds Python's lock.
_MOST_THREADS, _THREAD_BYTES = 16, 512 << 20

logger = logging.getLogger(__name__)


class _Unlaunched:
    """In the place of a kernel until it is compiled: launches do nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None: ...
    def run(self, *args: Any) -> None: ...


class Aside(AsyncCompileMode):  # type: ignore[misc]
    """What Triton asks while the mode holds. Mutable; used by one thread beside those of the executor."""

    def __init__(
        self, executor: Executor, load: Callable[[Any], object], progress: Callable[[], object]
    ) -> None:
        super().__init__(executor, ignore_errors=True)
        self._load, self._progress = load, progress
        self._takers: dict[Future[Any], list[Callable[[Any], None]]] = {}
        self._compiled: list[str] = []  # by the threads

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """Triton's: compile_fn gives the kernel, finalize_fn puts it where launches look for it, and tells that it was
        compiled to who wants to know (`jit_post_compile_hook`), here when it was only asked for, too."""
        super().submit(key, compile_fn, lambda kernel: None)
        future = self.future_kernels[key].future
        self._takers.setdefault(future, []).append(finalize_fn)
        unlaunched = _Unlaunched()
        finalize_fn(unlaunched)
        return unlaunched

    def __exit__(self, *error: object) -> None:
        """Waits, unless the process is to end, and puts in its place all that was asked for. What failed is compiled again
        by whoever launches it, who is told why it cannot be."""
        loaded: dict[Future[Any], Future[Any]] = {}
        try:
            if error[1] is None or isinstance(error[1], Exception):
                self._wait(self._takers)
                loaded = {compiled: self.executor.submit(self._loaded, compiled) for compiled in self._takers}
                self._wait(loaded.values())
        finally:
            self.raw_futures.clear()  # none to wait for
            super().__exit__(*error)
            for compiled, takers in self._takers.items():
                kernel = _result_of(loaded[compiled]) if compiled in loaded else None
                for take in takers:
                    take(kernel)

    @property
    def num_compiled(self) -> int:
        """So many kernels no cache had, as far as that is known."""
        return len(self._compiled)

    def has_compiled(self) -> bool:
        """Whether any kernel asked for so far was in no cache. Waits until that is known."""
        for _ in as_completed(tuple(self._takers)):
            self._progress()
            if self.num_compiled > 0:
                return True
        return False

    def count(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's compilation listener."""
        if not cache_hit:
            self._compiled.append(src.name)

    def _wait(self, futures: Iterable[Future[Any]]) -> None:
        for _ in as_completed(tuple(futures)):
            self._progress()

    def _loaded(self, compiled: Future[Any]) -> Any:
        kernel = compiled.result()
        self._load(kernel)
        return kernel


def _result_of(future: Future[Any]) -> Any:
    """None: it failed, or has not come to its end."""
    if not future.done() or future.cancelled():
        return None
    if (failure := future.exception()) is None:
        return future.result()
    logger.debug("not made side by side", exc_info=failure)
    return None


@contextmanager
def _parsed_one_at_a_time() -> Iterator[None]:
    """CPython 3.11 counts the depth of a tree that it builds for all threads together: a collection of garbage in the midst
    of one may let another thread build, too, and both end in a SystemError."""
    reader = triton.runtime.jit.JITCallable
    parse, lock = reader.parse, threading.Lock()

    def parse_alone(function: Any) -> Any:
        with lock:
            return parse(function)

    reader.parse = parse_alone
    try:
        yield
    finally:
        reader.parse = parse


@contextmanager
def compile_aside(
    load: Callable[[Any], object] = operator.attrgetter("run"),
    progress: Callable[[], object] = lambda: None,
    *,
    memory_bytes: int = _MOST_THREADS * _THREAD_BYTES,
) -> Iterator[Aside]:
    """What is asked for meanwhile can be launched at its end, and is loaded.

    For launches whose effects nobody wants, such as those of a CUDA graph that is thrown away; no other thread may launch
    any. load: called with each kernel, by the threads; by default what builds its launcher and brings it onto the first
    device. progress: called for kernels that are known to be compiled, and for each that is loaded. memory_bytes: what the
    compilers may take.
    """
    fitting = max(memory_bytes // _THREAD_BYTES, 1)
    num_threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS, fitting)
    knobs = triton.knobs.compilation
    listener = knobs.listener
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix="compile")
    aside = Aside(executor, load, progress)

    def listen(**what: Any) -> None:
        aside.count(**what)
        if listener is not None:
            listener(**what)

    with _parsed_one_at_a_time():
        knobs.listener = listen
        try:
            with aside:
                yield aside
        finally:
            knobs.listener = listener
            executor.shutdown(cancel_futures=True)
