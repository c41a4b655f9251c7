"""The worker's side of worker_pool.py: a process that answers jobs in children of its own, one for each lane.

Jobs come from clients, and a job may crash its child. The parent runs no job: it holds what the children
share, and replaces a child within milliseconds. A lane is a socket. A job is JOB and its payload, an answer
is ANSWER and its payload.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

JOB = struct.Struct("<dI")  # limit of processor time in seconds, number of bytes
# The exit code of a child that the job has ended, or 0; seconds of processor time; bytes.
ANSWER = struct.Struct("<idI")
Answer = Callable[[bytes], bytes]

MEMORY_BYTES = 2**30  # in addition to the memory of the libraries
MAX_GROWTH_BYTES = 64 * 2**20  # a child that retains more memory of its jobs is replaced
LAST_NICENESS = 5  # added for the lane of long jobs
_IS_REPLACED = 3
_IDLE, _WORKING, _WRITING = range(3)


def main(make: Callable[[bytes], Answer], *, niceness: int = 0) -> None:
    """Serves the lanes whose file descriptors are on the command line. make: gets the first payload and
    returns the function that answers jobs."""
    os.nice(niceness)
    lanes = [int(argument) for argument in sys.argv[1:]]
    with open(lanes[0], "rb", buffering=0, closefd=False) as source:
        _, length = JOB.unpack(_exactly(source, JOB.size))
        answer = make(_exactly(source, length))
    _limit_memory()
    gc.collect()
    gc.freeze()  # the children share it
    os.write(lanes[0], ANSWER.pack(0, 0.0, 0))
    _keep_children(lanes, answer)


def _keep_children(lanes: Sequence[int], answer: Answer) -> None:
    """Returns when the other side has closed the lanes."""
    states = mmap.mmap(-1, len(lanes))
    children = {_fork(lanes, lane, states, answer): lane for lane in range(len(lanes))}
    while children:
        pid, status = os.wait()
        lane, code = children.pop(pid), os.waitstatus_to_exitcode(status)
        if code == 0:
            continue
        if states[lane] == _WRITING:
            sys.exit("a part of an answer is sent")
        if states[lane] == _WORKING:
            os.write(lanes[lane], ANSWER.pack(code, 0.0, 0))
        states[lane] = _IDLE
        children[_fork(lanes, lane, states, answer)] = lane


def _fork(lanes: Sequence[int], lane: int, states: mmap.mmap, answer: Answer) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if len(lanes) > 1 and lane == len(lanes) - 1:
            os.nice(LAST_NICENESS)
        os._exit(_work(lanes[lane], lane, states, answer))
    except BaseException:  # noqa: BLE001 - whatever a job raises ends the child, and never runs the parent's code
        os._exit(1)


def _work(descriptor: int, lane: int, states: mmap.mmap, answer: Answer) -> int:
    """Answers jobs until the lane is closed. A timer's signal ends the process if a job takes too much
    processor time."""
    most_bytes = _resident_bytes() + MAX_GROWTH_BYTES
    with open(descriptor, "r+b", buffering=0, closefd=False) as stream:
        while head := stream.read(JOB.size):
            seconds, length = JOB.unpack(head + _exactly(stream, JOB.size - len(head)))
            payload = _exactly(stream, length)
            states[lane] = _WORKING
            before = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            result = answer(payload)
            signal.setitimer(signal.ITIMER_PROF, 0)
            states[lane] = _WRITING
            _write(stream, ANSWER.pack(0, time.process_time() - before, len(result)) + result)
            states[lane] = _IDLE
            if _resident_bytes() > most_bytes:
                return _IS_REPLACED
    return 0


def _exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = stream.read(num_bytes - len(data))
        if not part:
            os._exit(0)  # the other side has closed the lane
        data += part
    return bytes(data)


def _write(stream: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[stream.write(left) :]


def _resident_bytes() -> int:
    """Returns the resident memory; 0 where the system is not Linux."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def _limit_memory() -> None:
    """Limits the address space on Linux; elsewhere the size in use is not known."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        in_use_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
