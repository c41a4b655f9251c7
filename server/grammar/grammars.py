"""Grammars of requests, checked in a process of their own (worker.py) before the engine sees them, so that a
fault is a 400.

The engine compiles a source that has passed once more, with a matcher for each choice.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import Protocol

import msgspec

from headway.engine import EngineInfo, Grammar, RequestError, TokenTable
from headway.server.base.errors import ApiError
from headway.server.base.worker_pool import CLIENT, Purpose, WorkerPool
from headway.server.grammar.frames import Checked, Kind, TargetVocabulary, TextForm
from headway.server.grammar.sources import check_size
from headway.server.grammar.text_forms import text_form
from headway.server.protocol.parameters import GenerationFields

__all__ = ["Grammars", "TextForm", "check_conflicts", "grammar_of", "no_grammars"]

WORKER_COMMAND = (sys.executable, "-P", "-m", "headway.server.grammar.worker")
CHECK_SECONDS = 1.0  # processor time of a check
QUICK_SECONDS = 0.05  # most forms take a few milliseconds, for a large vocabulary, too
LIMITS = "a second of processor time, 1 GiB of memory or 1 MiB of stack"  # the limits of the worker
MAX_CACHED = 512
MAX_CACHED_CHARACTERS = 16 * 2**20


class GrammarObserver(Protocol):
    """Observes grammars. outcome: compiled, cached or refused; seconds: the processor time of the check.
    keyword: a keyword of a request's schema that its grammar lacks."""

    def observe_grammar(self, kind: Kind, outcome: str, seconds: float | None = None) -> None: ...

    def count_dropped_keyword(self, keyword: str) -> None: ...


class Grammars:
    """Mutable: owns the pool in which forms are checked, and the results."""

    def __init__(
        self, table: TokenTable | None, vocab_size: int, observer: GrammarObserver | None = None
    ) -> None:
        """table: None for a model without an end token, which supports no grammars. vocab_size: the width
        of its logits."""
        self._target = None if table is None else TargetVocabulary(table, vocab_size)
        self._observer = observer
        purpose = Purpose(
            "checks grammars",
            code="grammar_unavailable",
            seconds=CHECK_SECONDS,
            quick_seconds=QUICK_SECONDS,
            hello=self._hello,
        )
        self._pool = WorkerPool(WORKER_COMMAND, purpose)
        self._checking: dict[
            tuple[str, TextForm], asyncio.Event
        ] = {}  # checks in progress by client and form
        self._cache = _Cache()

    async def compile(self, form: TextForm, ignored: list[str] | None = None) -> str:
        """Returns the form's source, which the engine can enforce. Raises a 400 with the form's field.

        ignored: receives the paths of keywords that are not enforced.
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
            message = (
                f"{form.param} needs a token that ends a text, and the model's files name none; leave it out"
            )
            raise RequestError(message, param=form.param, code="unsupported_parameter")
        check_size(form)
        known, key = self._cache.get(form), (CLIENT.get(), form)
        while known is None and (checking := self._checking.get(key)) is not None:
            await checking.wait()
            known = self._cache.get(form)
        if known is None:
            checking = self._checking[key] = asyncio.Event()
            try:
                return await self._check(form)
            finally:
                del self._checking[key]
                checking.set()
        self._observe(form.kind, "refused" if known.source is None else "cached")
        return known

    async def warm_up(self) -> None:
        """Starts the process before the first request needs it."""
        if self._target is not None:
            with suppress(ApiError):
                await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    def _hello(self) -> bytes:
        return msgspec.msgpack.encode(self._target)

    async def _check(self, form: TextForm) -> Checked:
        outcome = await self._pool.run(msgspec.msgpack.encode(form))
        if outcome.exit_code:
            checked = Checked(error=f"{form.param} takes more than {LIMITS} to check; simplify it")
        else:
            checked = msgspec.msgpack.decode(outcome.payload, type=Checked)
        self._cache.put(form, checked)
        self._observe(form.kind, "refused" if checked.source is None else "compiled", outcome.seconds)
        return checked

    def _observe(self, kind: Kind, outcome: str, seconds: float | None = None) -> None:
        if self._observer is not None:
            self._observer.observe_grammar(kind, outcome, seconds)


def _source_of(form: TextForm, checked: Checked) -> str:
    if checked.source is None:
        raise RequestError(str(checked.error), param=checked.param or form.param, code="invalid_grammar")
    return checked.source


class _Cache:
    """The results of checks, the latest used last. Mutable: bounded in number and in characters."""

    def __init__(self) -> None:
        self._found: OrderedDict[TextForm, Checked] = OrderedDict()
        self._num_characters = 0

    def get(self, form: TextForm) -> Checked | None:
        if form in self._found:
            self._found.move_to_end(form)
        return self._found.get(form)

    def put(self, form: TextForm, checked: Checked) -> None:
        """Stores a result, unless another client's check of the same form was faster."""
        if form in self._found:
            return
        self._found[form] = checked
        self._num_characters += _num_characters(form, checked)
        while len(self._found) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
            self._num_characters -= _num_characters(*self._found.popitem(last=False))


def _num_characters(form: TextForm, checked: Checked) -> int:
    return len(form.value) + len(checked.source or "") + sum(map(len, checked.dropped))


def no_grammars() -> Grammars:
    """Returns the grammars of a server without a model's vocabulary: every form is refused."""
    return Grammars(None, 0)


async def grammar_of(
    fields: GenerationFields, grammars: Grammars, info: EngineInfo, ignored: list[str]
) -> Grammar | None:
    """Returns the grammar that the request's fields describe; None if any text is allowed. Raises a 400 that
    names the field.

    ignored: receives the paths of keywords that are not enforced.
    """
    form = text_form(fields)
    if form is None:
        return None
    check_conflicts(fields, form.param, info)
    return Grammar(await grammars.compile(form, ignored))


def check_conflicts(fields: GenerationFields, param: str, info: EngineInfo) -> None:
    """Refuses fields that conflict with the field of a grammar, and names both."""
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
