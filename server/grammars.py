"""Compiles what clients say about the text of an answer, off the event loop and under limits, so that a fault is a 400.

The engine compiles a source that passed here again, with a matcher for each choice.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import msgspec

from headway.engine import (
    EngineInfo,
    Grammar,
    RequestError,
    TokenTable,
    json_schema_source,
    lark_source,
    make_grammar_check,
    regex_source,
)
from headway.server.errors import ApiError
from headway.server.json_schema import WRITING, enforceable, keyword_places
from headway.server.protocol.parameters import GenerationFields
from headway.server.protocol.structured import Kind, TextForm, text_form

MAX_SOURCE_CHARACTERS = {
    "json_object": 0, "json_schema": 262_144, "regex": 8_192, "choice": 262_144, "lark": 262_144,
}  # fmt: skip
MAX_CACHED = 512
MAX_CACHED_CHARACTERS = 16 * 2**20
NUM_THREADS = 2
MAX_ERROR_CHARACTERS = 400
MAX_SHOWN_PLACES = 3

# What the library says about keywords that it enforces in some schemas only.
_KEYWORD_OF_ERROR = {
    "oneOf": "oneOf", "patternProperty": "patternProperties", "min/maxProperties": "minProperties", "multipleOf": "multipleOf",
}  # fmt: skip
# The parts of a Lark grammar that must be looked into; strings, regular expressions and comments are stepped over.
_LARK = re.compile(
    r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?P<json>%json\s*)(?=\{)'
    r"|\b(?P<option>stop|max_tokens|temperature)\s*="
)


class GrammarObserver(Protocol):
    """What is told of grammars: outcome is compiled, cached or refused, seconds the time that compiling took."""

    def observe_grammar(self, kind: Kind, outcome: str, seconds: float | None = None) -> None: ...


class Grammars:
    """Sources that have passed, for requests to come. Mutable: used on the event loop; its threads see none of its state."""

    def __init__(
        self, table: TokenTable | None, vocab_size: int, observer: GrammarObserver | None = None
    ) -> None:
        """table: None for a model whose texts no token ends, which has no grammars. vocab_size: the width of its logits."""
        self._table = table
        self._vocab_size = vocab_size
        self._observer = observer
        self._check: asyncio.Future[Callable[[str], None]] | None = None
        self._cache = _Cache()
        self._turns = asyncio.Semaphore(NUM_THREADS)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    async def compile(self, form: TextForm) -> str:
        """Returns the form's source, which the engine can enforce. Raises ApiError 400 with the form's field."""
        if self._table is None:
            message = f"{form.param} needs a token that ends a text, and the model's files name none"
            raise ApiError(message, param=form.param, code="unsupported_parameter")
        key = (form.kind, form.value)
        async with self._turns:
            known = self._cache.get(key)
            if known is not None:
                self._observe(form.kind, "cached")
                return known
            check = await self._loaded(self._table)
            start = time.monotonic()
            try:
                loop = asyncio.get_running_loop()
                source = await loop.run_in_executor(self._threads, partial(checked_source, form, check))
            except ApiError:
                self._observe(form.kind, "refused", time.monotonic() - start)
                raise
            self._observe(form.kind, "compiled", time.monotonic() - start)
            self._cache.put(key, source)
            return source

    async def warm_up(self) -> None:
        """Builds what all grammars are compiled for, which the first request would wait for."""
        if self._table is not None:
            await self._loaded(self._table)

    async def _loaded(self, table: TokenTable) -> Callable[[str], None]:
        if self._check is None:
            loop = asyncio.get_running_loop()
            build = partial(make_grammar_check, table, self._vocab_size)
            self._check = loop.run_in_executor(self._threads, build)
        return await asyncio.shield(self._check)

    def _observe(self, kind: Kind, outcome: str, seconds: float | None = None) -> None:
        if self._observer is not None:
            self._observer.observe_grammar(kind, outcome, seconds)


class _Cache:
    """Sources by form, the latest used last. Mutable: bounded in number and in characters."""

    def __init__(self) -> None:
        self._sources: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._num_characters = 0

    def get(self, key: tuple[str, str]) -> str | None:
        if key in self._sources:
            self._sources.move_to_end(key)
        return self._sources.get(key)

    def put(self, key: tuple[str, str], source: str) -> None:
        if key in self._sources:
            return
        self._sources[key] = source
        self._num_characters += len(key[1]) + len(source)
        while len(self._sources) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
            (_, value), dropped = self._sources.popitem(last=False)
            self._num_characters -= len(value) + len(dropped)


def no_grammars() -> Grammars:
    """Returns those of a server without a model's vocabulary: every form is refused."""
    return Grammars(None, 0)


async def grammar_of(fields: GenerationFields, grammars: Grammars, info: EngineInfo) -> Grammar | None:
    """Returns what the request's fields say about its text; None for any text. Raises ApiError."""
    form = text_form(fields)
    if form is None:
        return None
    check_company(fields, form.param, info)
    return Grammar(await grammars.compile(form))


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


def checked_source(form: TextForm, check: Callable[[str], None]) -> str:
    """Returns the source of a form that compiles. Raises ApiError with the form's field. Blocks for up to seconds."""
    limit = MAX_SOURCE_CHARACTERS[form.kind]
    if len(form.value) > limit:
        message = f"{form.param} has {len(form.value)} characters of {form.kind}, the limit is {limit}"
        raise ApiError(message, param=form.param, code="invalid_grammar")
    try:
        source = _source(form)
        check(source)
    except RequestError as error:
        raise _refusal(form, str(error)) from error
    return source


def _source(form: TextForm) -> str:
    if form.kind == "json_object":
        return _schema_source({"type": "object"}, form.param)
    if form.kind == "json_schema":
        return _schema_source(_parsed(form.value, form.param), form.param)
    if form.kind == "regex":
        return regex_source(form.value)
    if form.kind == "choice":
        texts = msgspec.json.decode(form.value, type=list[str])
        return lark_source("start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts)))
    return lark_source(_checked_lark(form.value, form.param))


def _schema_source(schema: object, param: str) -> str:
    return json_schema_source(msgspec.json.encode(enforceable(schema, param)).decode())


def _parsed(text: str, param: str) -> object:
    """Returns the value of JSON text, whose order of properties is kept."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise ApiError(f"{param} is no JSON schema: {error}", param=param, code="invalid_grammar") from None


def _checked_lark(grammar: str, param: str) -> str:
    """Returns the grammar with its JSON schemas as they can be enforced. Raises ApiError for options that the engine lacks."""
    parts: list[str] = []
    at = 0
    while (match := _LARK.search(grammar, at)) is not None:
        parts.append(grammar[at : match.end()])
        at = match.end()
        if match["option"]:
            message = f"{param} has the option {match['option']}=, which is not served; use lazy or suffix=, and the request's fields"
            raise ApiError(message, param=param, code="invalid_grammar")
        if match["json"]:
            schema, at = _inline_schema(grammar, at, param)
            parts.append(schema)
    return "".join([*parts, grammar[at:]])


def _inline_schema(grammar: str, at: int, param: str) -> tuple[str, int]:
    """Returns the JSON schema that begins there as it can be enforced, and where it ends."""
    try:
        schema, end = json.JSONDecoder().raw_decode(grammar, at)
    except (ValueError, RecursionError) as error:
        message = f"{param} has a %json that is no JSON: {error}"
        raise ApiError(message, param=param, code="invalid_grammar") from None
    is_enforceable = schema.get("x-guidance") == WRITING  # `enforceable` wrote it: a tool's
    return json.dumps(schema if is_enforceable else enforceable(schema, param)), end


def _refusal(form: TextForm, message: str) -> ApiError:
    """The library's reason, with the places of the keyword that it is about."""
    reason = " ".join(message.removeprefix("the grammar cannot be enforced: ").split())
    places: list[str] = []
    if form.kind == "json_schema":
        keyword = next((name for part, name in _KEYWORD_OF_ERROR.items() if part in reason), None)
        places = [] if keyword is None else keyword_places(_parsed(form.value, form.param), keyword)
    where = f" (at {', '.join(places[:MAX_SHOWN_PLACES])})" if places else ""
    text = f"{form.param} cannot be enforced{where}: {reason[:MAX_ERROR_CHARACTERS]}"
    return ApiError(text, param=form.param, code="invalid_grammar")
