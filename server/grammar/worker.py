"""The process that checks grammars: `python -P -m headway.server.grammar.worker`.

Grammars come from clients, and some take the library minutes, gigabytes or more stack than there is. Such a
grammar ends only this process, which is replaced, and does not delay the streams of the API process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec

from headway.engine import RequestError, TokenTable, make_grammar_check
from headway.server.base import worker_process
from headway.server.grammar.frames import Checked, TargetVocabulary, TextForm
from headway.server.grammar.sources import checked_source

# Less than the engine's threads have, so that a grammar which passes here does not exhaust the stack there.
STACK_BYTES = 2**20
MAX_DROPPED = 64  # reported paths of one form
NICENESS = 5  # streams have priority


def make(hello: bytes) -> worker_process.Answer:
    """Returns the function that answers forms. hello: the vocabulary for which grammars are checked."""
    target = msgspec.msgpack.decode(hello, type=TargetVocabulary)
    check = make_grammar_check(target.table, target.vocab_size)
    special_ids = special_tokens(target.table)
    threading.stack_size(STACK_BYTES)

    def answer(payload: bytes) -> bytes:
        """Answers a form in a thread, whose stack is small."""
        form = msgspec.msgpack.decode(payload, type=TextForm)
        answers: list[Checked] = []
        thread = threading.Thread(target=lambda: answers.append(answer_to(form, special_ids, check)))
        thread.start()
        thread.join()
        return msgspec.msgpack.encode(answers[0])

    return answer


def special_tokens(table: TokenTable) -> dict[str, int]:
    """Returns the ids of special tokens by name, which no text of a grammar matches."""
    return {table.tokens[i].decode(errors="replace"): i for i in table.special_ids if table.tokens[i]}


def answer_to(form: TextForm, special_ids: Mapping[str, int], check: Callable[[str], None]) -> Checked:
    dropped: list[str] = []
    try:
        source = checked_source(form, check, special_ids, dropped)
        return Checked(source=source, dropped=dropped[:MAX_DROPPED])
    except RequestError as error:
        return Checked(error=str(error), param=error.param)


if __name__ == "__main__":
    worker_process.main(make, niceness=NICENESS)
