"""Compiles kernels into Triton's cache on disk in worker processes, one per core, before they are launched.

Triton compiles each kernel at its first launch, so that a start with an empty cache waits for about 100
kernels, one after the other. Within `compile_in_workers` a launch whose kernel is not loaded only records the
specialisation that it needs (by Triton's `jit_cache_hook`). Worker processes compile the recorded ones, and
later launches find them in the cache. Knows no operation.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from headway.kernels.runtime._precompile_worker import Answer, Specialization, compile_specialization

try:
    import triton
except ImportError:
    triton = None

_MAX_WORKERS = 16
# A worker holds PyTorch, Triton and one kernel that is being compiled.
_WORKER_BYTES = 512 << 20
_POLL_SECONDS = 0.25
# `-m` would import the module a second time, under another name.
_COMMAND = ("-P", "-c", "from headway.kernels.runtime._precompile_worker import main; main()")

logger = logging.getLogger(__name__)


class Precompiler:
    """Records specialisations and hands them to worker processes.

    The process itself looks up recorded kernels in the cache until one is missing, which it compiles; a start
    that finds all kernels starts no worker. Mutable: the launching thread writes everything except the
    counts, which the worker threads increment under the lock.
    """

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._seen: set[tuple[str, str, str]] = set()
        self._requests: SimpleQueue[Specialization | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_aborted = False
        self._lock = threading.Lock()
        self._num_requested = self._num_answered = 0
        self.num_compiled = 0
        self._errors: list[str] = []

    @property
    def has_missing(self) -> bool:
        """Returns whether a kernel recorded so far was not in the cache."""
        return self.num_compiled > 0

    @property
    def num_workers(self) -> int:
        return len(self._threads)

    def record(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's `jit_cache_hook`, called for each launch of a kernel that is not loaded. Returns True, so
        that Triton neither compiles nor launches it. An error here occurs again at the real launch, which
        reports it.
        """
        key = (fn.module, fn.name, compile["key"])
        if key in self._seen:
            return True
        self._seen.add(key)
        try:
            wanted = _specialization_of(fn, compile)
            if self.has_missing:
                self._request(wanted)
            elif compile_specialization(wanted):
                self.num_compiled += 1
        except Exception as error:
            logger.debug("%s could not be recorded", fn.name, exc_info=True)
            self._errors.append(f"{fn.name}: {type(error).__name__}: {error}")
        return True

    def finish(self, progress: Callable[[], object]) -> None:
        """Waits until every recorded kernel is compiled or has failed, and logs one warning about
        failures."""
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                progress()
        unanswered = self._num_requested - self._num_answered
        if unanswered > 0 or self._errors:
            logger.warning(
                "%d of %d kernels were not compiled by worker processes; each is compiled when it is first launched (%s)",
                unanswered + len(self._errors),
                len(self._seen),
                self._errors[0] if self._errors else "the worker processes ended",
            )

    def abort(self) -> None:
        """Kills the worker processes without waiting for running compilations."""
        self._is_aborted = True
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            while thread.is_alive():
                for process in tuple(self._processes):
                    process.kill()
                thread.join(_POLL_SECONDS)

    def _request(self, wanted: Specialization) -> None:
        pickle.dumps(wanted)  # raises here if it cannot be sent
        self._requests.put(wanted)
        self._num_requested += 1
        if len(self._threads) < self._max_workers:
            thread = threading.Thread(target=self._run_worker, name="precompile", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run_worker(self) -> None:
        """Feeds one worker process until nothing is left or it dies; the other workers continue then."""
        try:
            with _started_worker() as process:
                self._processes.append(process)
                assert process.stdin is not None
                assert process.stdout is not None
                while (wanted := self._requests.get()) is not None and not self._is_aborted:
                    pickle.dump(wanted, process.stdin)
                    process.stdin.flush()
                    self._note(pickle.load(process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            logger.debug("a worker process that compiles kernels ended", exc_info=error)

    def _note(self, answer: Answer) -> None:
        with self._lock:
            self._num_answered += 1
            if answer.error:
                self._errors.append(answer.error)
            elif answer.was_missing:
                self.num_compiled += 1


@contextmanager
def compile_in_workers(
    progress: Callable[[], object] = lambda: None, *, memory_bytes: int = _MAX_WORKERS * _WORKER_BYTES
) -> Iterator[Precompiler]:
    """Within this context launches of kernels that are not loaded do nothing; at its end the kernels are in
    the cache on disk.

    It is for launches without lasting effects, such as those of a CUDA graph that is discarded. No other
    thread may launch kernels meanwhile. progress: called a few times per second while workers run.
    memory_bytes: limits the number of workers. A kernel that fails to compile or a worker that dies raises no
    exception.
    """
    fitting = max(memory_bytes // _WORKER_BYTES, 1)
    precompiler = Precompiler(min(len(os.sched_getaffinity(0)), _MAX_WORKERS, fitting))
    knobs = triton.knobs.runtime
    hook, knobs.jit_cache_hook = knobs.jit_cache_hook, precompiler.record
    try:
        yield precompiler
    except Exception:
        precompiler.finish(progress)
        raise
    else:
        precompiler.finish(progress)
    finally:
        knobs.jit_cache_hook = hook
        precompiler.abort()


def log_compilations() -> None:
    """Makes this process log at level debug every kernel that it compiles itself from now on."""
    if triton is None or not logger.isEnabledFor(logging.DEBUG):
        return

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            logger.debug("compiled %s in this process", src.name)

    triton.knobs.compilation.listener = listen


def _specialization_of(fn: Any, compile: dict[str, Any]) -> Specialization:
    """Returns the specialisation. compile: an argument of Triton's hook, of which only the serialised data
    have all options."""
    target = triton.runtime.driver.active.get_current_target()
    options = json.loads(compile["specialization_data"])["options"]
    return Specialization(
        module=fn.module,
        name=fn.name,
        target=(target.backend, target.arch, target.warp_size),
        signature=compile["signature"],
        constants=compile["constants"],
        attributes=compile["configs"][0],
        options={name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
    )


def _started_worker() -> subprocess.Popen[bytes]:
    """Starts a worker. No GPU is visible to it, so that it uses no GPU memory, and a terminal's Ctrl-C
    reaches its parent only."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TRITON_CACHE_DIR": triton.knobs.cache.dir,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, *_COMMAND],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
