"""The processes of all ranks of a model but the first, which starts them, tells them what to do and watches
them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import torch

from headway.engine.parallel.group import ProcessGroup, RankError
from headway.engine.parallel.messages import Join, Loaded, ToRank, encoded, received_by_first
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ModelError

_COMMAND = (sys.executable, "-P", "-m", "headway.engine.rank")
_LEAVE_SECONDS, _NOTICE_SECONDS = 1.0, 1.0
_SEE_STDERR = "its last lines on stderr say why"

logger = logging.getLogger(__name__)


class Ranks:
    """Mutable: owns the processes and their pipes until `close`, and until `connect` the folder where they
    find each other."""

    def __init__(self, config: EngineConfig, available: int) -> None:
        """Starts the processes, which load their shares of the model. available: see Join. Raises OSError."""
        self._is_closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        with ExitStack() as taken:
            self._folder = TemporaryDirectory(prefix="headway-ranks-")
            taken.callback(self._folder.cleanup)
            taken.callback(self._end)
            for rank in range(1, config.tensor_parallel_size):
                self._start(Join(config, rank, available, self._folder.name))
            for rank, process in enumerate(self._processes, start=1):
                Thread(target=self._watch, args=(process,), name=f"rank {rank}", daemon=True).start()
            self._taken = taken.pop_all()

    def _start(self, first: Join) -> None:
        own, its = Pipe()
        self._pipes.append(own)
        with its:
            descriptor = its.fileno()
            self._processes.append(
                subprocess.Popen(
                    [*_COMMAND, str(descriptor)], stdin=subprocess.DEVNULL, pass_fds=[descriptor]
                )
            )
        own.send_bytes(encoded(first))

    def check(self) -> None:
        """Raises RankError if any process has ended."""
        for rank, process in enumerate(self._processes, start=1):
            status = process.poll()
            if status is not None:
                raise RankError(f"rank {rank} has ended with status {status}; {_SEE_STDERR}")

    def tell(self, message: ToRank) -> None:
        """Sends the message to all processes. Raises RankError."""
        frame = encoded(message)
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                pipe.send_bytes(frame)
            except OSError as error:
                raise RankError(f"rank {rank} takes no more messages: {error}") from error

    def wait_until_loaded(self) -> None:
        """Raises ModelError where a rank cannot load its share, and RankError where one has ended."""
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                answer = received_by_first(pipe)
            except (EOFError, OSError) as error:
                raise RankError(f"rank {rank} ended while it loaded; {_SEE_STDERR}") from error
            if not isinstance(answer, Loaded):
                raise ModelError(f"rank {rank}: {answer.message}")

    def connect(self, group: ProcessGroup, device: torch.device) -> None:
        """Connects the first rank with the others, which connect at the same time, once all have loaded.
        device: that of the first rank. Raises RankError."""
        group.connect(Path(self._folder.name), device)
        self._folder.cleanup()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Ends this process when another rank has ended, unless it notices that by itself: it may wait for
        the other one forever, in a gather on its GPU or while they connect. It blocks instead of polling:
        processor time is a sign of life, and a rank that waits for a stopped one must show none."""
        with suppress(ChildProcessError):  # another thread has read its status
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        time.sleep(_NOTICE_SECONDS)
        if not self._is_closing:
            try:
                self.check()
            except RankError as error:
                logger.error("the engine ends: %s", error)
            os._exit(1)

    def close(self) -> None:
        """Ends the processes and waits for that. May be called again."""
        self._taken.close()

    def _end(self) -> None:
        self._is_closing = True
        for pipe in self._pipes:
            pipe.close()  # a rank then ends, unless it is in the middle of a step
        for process in self._processes:
            try:
                process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
