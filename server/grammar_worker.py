"""The process that checks grammars: `python -P -m headway.server.grammar_worker`.

Grammars come from clients, and some take the library minutes, gigabytes or more stack than there is. Here that ends a process
that is started again, and it takes nothing from the streams of the API process. It leaves when stdin ends.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from headway.engine import RequestError, TokenTable, make_grammar_check
from headway.server.grammar_frames import LENGTH, Checked, TargetVocabulary, TextForm, frame
from headway.server.grammar_sources import checked_source

CHECK_SECONDS = 1.0  # of processor time
MEMORY_BYTES = 2**30  # beyond what the libraries and the vocabulary take
# Less than the engine's threads have: what passes here does not run out of it there.
STACK_BYTES = 2**20
MAX_DROPPED = 64  # paths that are told of one form
NICENESS = 5  # streams go before


def main(source: BinaryIO, sink: BinaryIO) -> None:
    os.nice(NICENESS)
    target = msgspec.msgpack.decode(_read(source), type=TargetVocabulary)
    check = make_grammar_check(target.table, target.vocab_size)
    special_ids = special_tokens(target.table)
    threading.stack_size(STACK_BYTES)
    _limit_memory()
    _write(sink, Checked())
    while payload := _read(source):
        _write(sink, _in_time(msgspec.msgpack.decode(payload, type=TextForm), special_ids, check))


def special_tokens(table: TokenTable) -> dict[str, int]:
    """Returns the ids of special tokens, which no text of a grammar matches, by their names."""
    return {table.tokens[i].decode(errors="replace"): i for i in table.special_ids if table.tokens[i]}


def _in_time(form: TextForm, special_ids: Mapping[str, int], check: Callable[[str], None]) -> Checked:
    """Ends the process, by the timer's signal, where checking takes too much processor time."""
    answers: list[Checked] = []
    thread = threading.Thread(target=lambda: answers.append(answer_to(form, special_ids, check)))
    signal.setitimer(signal.ITIMER_PROF, CHECK_SECONDS)
    try:
        thread.start()
        thread.join()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return answers[0]


def answer_to(form: TextForm, special_ids: Mapping[str, int], check: Callable[[str], None]) -> Checked:
    dropped: list[str] = []
    try:
        source = checked_source(form, check, special_ids, dropped)
        return Checked(source=source, dropped=dropped[:MAX_DROPPED])
    except RequestError as error:
        return Checked(error=str(error), param=error.param)


def _read(source: BinaryIO) -> bytes:
    """Returns the content of the next frame; nothing at the end."""
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if head else b""


def _write(sink: BinaryIO, content: Checked) -> None:
    sink.write(frame(content))
    sink.flush()


def _limit_memory() -> None:
    """Linux only: elsewhere the address space in use is not known."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        in_use_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
