"""Grammars of requests: checked before the engine sees them, in a process of their own (grammar_worker.py), so that a fault is a 400.

The engine compiles a source that passed once more, with a matcher for each choice.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from typing import Protocol

import msgspec

from headway.engine import EngineInfo, Grammar, RequestError, TokenTable
from headway.server.errors import RETRY_AFTER, ApiError
from headway.server.grammar_frames import LENGTH, Checked, Kind, TargetVocabulary, TextForm, frame
from headway.server.grammar_sources import check_size
from headway.server.protocol.parameters import GenerationFields
from headway.server.protocol.text_forms import text_form

__all__ = ["Grammars", "TextForm", "check_company", "grammar_of", "no_grammars"]

WORKER_COMMAND = (sys.executable, "-P", "-m", "headway.server.grammar_worker")
START_SECONDS = 60.0
CHECK_SECONDS = 1.9  # on the clock; the worker's own limit is one of processor time
LIMITS = "a second of processor time, 1 GiB of memory or 1 MiB of stack"  # of the worker
MAX_CACHED = 512
MAX_CACHED_CHARACTERS = 16 * 2**20


class GrammarObserver(Protocol):
    """What is told of grammars: outcome is compiled, cached or refused, seconds the time that the check took; and the names of
    keywords that a request's schema has and its grammar has not."""

    def observe_grammar(self, kind: Kind, outcome: str, seconds: float | None = None) -> None: ...

    def count_dropped_keyword(self, keyword: str) -> None: ...


class Grammars:
    """Checks forms one at a time. Mutable: owns the worker, which it starts when needed, and what was found."""

    def __init__(
        self, table: TokenTable | None, vocab_size: int, observer: GrammarObserver | None = None
    ) -> None:
        """table: None for a model whose texts no token ends, which has no grammars. vocab_size: the width of its logits."""
        self._target = None if table is None else TargetVocabulary(table, vocab_size)
        self._observer = observer
        self._worker: Process | None = None
        self._turn = asyncio.Lock()
        self._cache = _Cache()

    async def compile(self, form: TextForm, ignored: list[str] | None = None) -> str:
        """Returns the form's source, which the engine can enforce. Raises a 400 with the form's field.

        ignored: gets the paths of keywords that are not enforced.
        """
        checked = await self._checked(form)
        for path in checked.dropped:
            if self._observer is not None:
                self._observer.count_dropped_keyword(path.rpartition(".")[2])
        if ignored is not None:
            ignored += checked.dropped
        return _source_of(form, checked)

    async def _checked(self, form: TextForm) -> Checked:
        if self._target is None:
            message = f"{form.param} needs a token that ends a text, and the model's files name none"
            raise RequestError(message, param=form.param, code="unsupported_parameter")
        check_size(form)
        known = self._cache.get(form)
        if known is None:
            async with self._turn:
                known = self._cache.get(form)  # of a request that was before this one
                if known is None:
                    return await self._check(form, self._target)
        self._observe(form.kind, "refused" if known.source is None else "cached")
        return known

    async def warm_up(self) -> None:
        """Starts the worker before the first request needs it."""
        if self._target is not None:
            with suppress(ApiError):
                async with self._turn:
                    await self._ready(self._target)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with suppress(ProcessLookupError):
                worker.kill()
            await worker.communicate()  # to the end of its pipes, which are closed with it

    async def _check(self, form: TextForm, target: TargetVocabulary) -> Checked:
        worker = await self._ready(target)
        start = time.monotonic()
        try:
            checked = await self._answer(worker, form)
            self._cache.put(form, checked)
        except TimeoutError:  # the machine may have been too busy: it is not remembered
            limit = f"{CHECK_SECONDS} s"
            checked = Checked(
                error=f"{form.param} takes more than {limit} to check; simplify it, or try again"
            )
        outcome = "refused" if checked.source is None else "compiled"
        self._observe(form.kind, outcome, time.monotonic() - start)
        return checked

    async def _answer(self, worker: Process, form: TextForm) -> Checked:
        """A worker that gives no answer is given up: a late one would be taken for the next form's."""
        is_answered = False
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                checked = await _exchange(worker, form)
            is_answered = True
            return checked
        except (asyncio.IncompleteReadError, ConnectionError):
            return Checked(error=f"{form.param} takes more than {LIMITS} to check; simplify it")
        finally:
            if not is_answered:
                await self.close()

    async def _ready(self, target: TargetVocabulary) -> Process:
        """A worker that does not come up is no fault of the form."""
        try:
            return await self._started(target)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise ApiError(
                f"the process that checks grammars does not start ({type(error).__name__}); try again",
                status=503,
                code="grammar_unavailable",
                headers=RETRY_AFTER,
            ) from error

    async def _started(self, target: TargetVocabulary) -> Process:
        """A worker that has its vocabulary: that time is not the form's."""
        if self._worker is not None and self._worker.returncode is None:
            return self._worker
        self._worker = worker = await asyncio.create_subprocess_exec(
            *WORKER_COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )
        async with asyncio.timeout(START_SECONDS):
            await _exchange(worker, target)
        return worker

    def _observe(self, kind: Kind, outcome: str, seconds: float | None = None) -> None:
        if self._observer is not None:
            self._observer.observe_grammar(kind, outcome, seconds)


async def _exchange(worker: Process, content: TextForm | TargetVocabulary) -> Checked:
    assert worker.stdin is not None, "the worker is started with pipes"
    assert worker.stdout is not None, "the worker is started with pipes"
    worker.stdin.write(frame(content))
    await worker.stdin.drain()
    (length,) = LENGTH.unpack(await worker.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await worker.stdout.readexactly(length), type=Checked)


def _source_of(form: TextForm, checked: Checked) -> str:
    if checked.source is None:
        raise RequestError(str(checked.error), param=checked.param or form.param, code="invalid_grammar")
    return checked.source


class _Cache:
    """What was found of forms, the latest used last. Mutable: bounded in number and in characters."""

    def __init__(self) -> None:
        self._found: OrderedDict[TextForm, Checked] = OrderedDict()
        self._num_characters = 0

    def get(self, form: TextForm) -> Checked | None:
        if form in self._found:
            self._found.move_to_end(form)
        return self._found.get(form)

    def put(self, form: TextForm, checked: Checked) -> None:
        """The form is not there."""
        self._found[form] = checked
        self._num_characters += len(form.value) + len(checked.source or "")
        while len(self._found) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
            oldest, dropped = self._found.popitem(last=False)
            self._num_characters -= len(oldest.value) + len(dropped.source or "")


def no_grammars() -> Grammars:
    """Returns those of a server without a model's vocabulary: every form is refused."""
    return Grammars(None, 0)


async def grammar_of(
    fields: GenerationFields, grammars: Grammars, info: EngineInfo, ignored: list[str]
) -> Grammar | None:
    """Returns what the request's fields say about its text; None for any text. Raises a 400 that names the field.

    ignored: gets the paths of keywords that are not enforced.
    """
    form = text_form(fields)
    if form is None:
        return None
    check_company(fields, form.param, info)
    return Grammar(await grammars.compile(form, ignored))


def check_company(fields: GenerationFields, param: str, info: EngineInfo) -> None:
    """Refuses what cannot hold together with the field that brings a grammar, by the names of both."""
    others = {
        "min_tokens": bool(fields.min_tokens),
        "logit_bias": bool(fields.logit_bias),
        "allowed_token_ids": bool(fields.allowed_token_ids),
        "bad_words": bool(fields.bad_words),
        "ignore_eos": bool(fields.ignore_eos),
    }
    for name, is_there in others.items():
        if is_there:
            message = f"{name} cannot be served together with {param}, which alone says which tokens may come; send one of them"
            raise ApiError(message, param=name, code="invalid_value")
    if info.synthetic_acceptance is not None:
        message = (
            f"{param} cannot be served by a server with --synthetic-acceptance, whose texts mean nothing"
        )
        raise ApiError(message, param=param, code="unsupported_parameter")
