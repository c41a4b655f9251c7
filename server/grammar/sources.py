"""Turns a client's form of a text into the source of a grammar that the engine can enforce. It imports
little, and no asyncio."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping

import msgspec

from headway.engine import RequestError, is_gbnf, json_schema_source, lark_of_gbnf, lark_source, regex_source
from headway.server.formats.lark import slashes
from headway.server.grammar.frames import TextForm, ToolCalls
from headway.server.grammar.tool_grammars import tool_grammar_of
from headway.server.json_schema import LENGTHS, PAGE, ascii_classes, enforceable, keyword_places, patterns_in

MAX_SOURCE_CHARACTERS = {
    "json_object": 0, "json_schema": 262_144, "regex": 8_192, "choice": 262_144, "lark": 262_144,
    "tools": 524_288,
}  # fmt: skip
MAX_ERROR_CHARACTERS = 400
MAX_SHOWN_PLACES = 3

Check = Callable[[str], None]
Schema = dict[str, object]

# The library's complaints about a schema that it can enforce only in part: a text in the complaint, the
# keywords to leave out if the request is not strict, and the remedy in the error if it is.
_LOSSES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("oneOf", ("oneOf",), "its members are not told apart by types, constants or required properties; use anyOf, or give each member a constant of its own"),
    ("patternProperty", ("patternProperties",), "a name may match two of its patterns; write patterns of which no name matches two"),
    ("min/maxProperties", ("minProperties", "maxProperties"), "it needs all properties to be required; require them, or leave it out"),
    ("multipleOf", ("multipleOf",), "its decimals are not held exactly; use a divisor of fewer digits, or leave it out"),
    ("determine if regex is empty", LENGTHS, "beside a pattern or a format it takes too long; leave it out"),
    ("determine if regex is empty", ("pattern",), "beside a length or a format it takes too long; use one of them"),
    ("circular references", ("$ref",), "it leads back to itself beside other keywords; put these into the definition"),
)  # fmt: skip
_EMPTY = ("Unsatisfiable schema", "NoExtensionBias", "allows no text")
# Matches the parts of a Lark grammar that must be examined; strings, regular expressions and comments are
# skipped.
_LARK = re.compile(
    r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?P<json>%json\s*)(?=\{)'
    r"|\b(?P<option>stop|max_tokens|temperature)\s*="
)


def check_size(form: TextForm) -> None:
    """Raises RequestError for a form that is too long."""
    limit = MAX_SOURCE_CHARACTERS[form.kind]
    if len(form.value) > limit:
        message = (
            f"{form.param} has {len(form.value)} characters of {form.kind}, the limit is {limit}; shorten it"
        )
        raise RequestError(message, param=form.param, code="invalid_grammar")


def checked_source(
    form: TextForm,
    check: Check,
    special_ids: Mapping[str, int] | None = None,
    dropped: list[str] | None = None,
) -> str:
    """Returns the source of a form that compiles. Raises RequestError that names the field at fault.

    check: from make_grammar_check. It may take long, or end the process, for a hostile form. special_ids: the
    ids of special tokens by name, in which calls are written. dropped: receives the paths of schema keywords
    that are not enforced.
    """
    dropped = [] if dropped is None else dropped
    try:
        if form.kind == "tools":
            return lark_source(_checked_calls(form, special_ids or {}, check, dropped))
        if form.kind in ("json_object", "json_schema"):
            return _schema_source(_form_schema(form, check, dropped))
        source = _source(form)
        check(source)
    except RequestError as error:
        raise error if error.param is not None else _refusal(form, str(error)) from error
    except RecursionError:
        raise _refusal(form, "it is nested too deeply") from None
    return source


def _source(form: TextForm) -> str:
    if form.kind == "regex":
        return regex_source(ascii_classes(form.value))
    if form.kind == "choice":
        texts = msgspec.json.decode(form.value, type=list[str])
        return lark_source("start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts)))
    if is_gbnf(form.value):
        return lark_source(lark_of_gbnf(form.value))
    if form.value.lstrip().startswith("{"):  # the library takes JSON for a list of grammars
        message = f"{form.param} is JSON, it must be a Lark grammar"
        raise RequestError(message, param=form.param, code="invalid_grammar")
    return lark_source(_checked_lark(form.value, form.param))


def _schema_source(schema: Schema) -> str:
    return json_schema_source(msgspec.json.encode(schema).decode())


def _form_schema(form: TextForm, check: Check, dropped: list[str]) -> Schema:
    """Returns the schema of a form as it is enforced."""
    schema = {"type": "object"} if form.kind == "json_object" else _parsed(form.value, form.param)
    return _checked_schema(schema, form.param, check, None if form.strict else dropped)


def _checked_schema(schema: object, param: str, check: Check, dropped: list[str] | None) -> Schema:
    """Returns the schema as it is enforced, without keywords that cannot be. dropped: receives their
    paths; None refuses them."""
    without: set[str] = set()
    while True:
        left_out: list[str] | None = None if dropped is None else []
        written = enforceable(schema, param, left_out, without)
        try:
            check(_schema_source(written))
        except RequestError as error:
            flawed = _flawed_patterns(written, check) if "regex" in str(error) else ()
            loss = flawed or _loss(str(error), without)
            if loss is None or (dropped is None and not flawed):
                raise _schema_refusal(schema, param, str(error)) from error
            without.update(loss)
            continue
        if dropped is not None:
            dropped += left_out or []
        return written


def _flawed_patterns(schema: object, check: Check) -> tuple[str, ...]:
    """Returns the regular expressions of a schema, between slashes, that cannot be enforced even alone."""
    flawed = list[str]()
    for pattern in dict.fromkeys(patterns_in(schema)):
        try:
            check(regex_source(pattern))
        except RequestError:
            flawed.append(f"/{pattern}/")
    return tuple(flawed)


def _loss(reason: str, without: Collection[str]) -> tuple[str, ...] | None:
    """Returns the keywords to leave out next."""
    return next(
        (names for part, names, _ in _LOSSES if part in reason and not set(names) <= set(without)), None
    )


def _checked_calls(form: TextForm, special_ids: Mapping[str, int], check: Check, dropped: list[str]) -> str:
    """Returns the Lark grammar of calls, or of calls and of the text that may take their place."""
    calls = msgspec.json.decode(form.value, type=ToolCalls)
    try:
        grammar = _calls_grammar(calls, special_ids, check, left_out := list[str](), is_suspicious=False)
        check(lark_source(grammar))
    except RequestError as error:
        if error.param is not None:
            raise
        # The library does not name the tool at fault, so that each schema is tried alone.
        grammar = _calls_grammar(calls, special_ids, check, left_out := list[str](), is_suspicious=True)
        check(lark_source(grammar))
    dropped += left_out
    return grammar


def _calls_grammar(
    calls: ToolCalls, special_ids: Mapping[str, int], check: Check, dropped: list[str], *, is_suspicious: bool
) -> str:
    tools = []
    for i, tool in calls.tools:
        function = dict(tool["function"])
        if "parameters" in function:
            path, schema = f"tools[{i}].function.parameters", function["parameters"]
            held = None if function.get("strict") else dropped
            written = (
                _checked_schema(schema, path, check, held)
                if is_suspicious
                else enforceable(schema, path, held)
            )
            # The format itself defines the whitespace.
            function["parameters"] = {name: value for name, value in written.items() if name != "x-guidance"}
        tools.append((i, {**tool, "function": function}))
    grammar = tool_grammar_of(tools, calls, special_ids, dropped)
    if calls.text is None:
        return grammar
    answer = _expression(calls.text, check)
    return f"start: calls | answer\nanswer: {answer}\n{grammar.replace('start:', 'calls:', 1)}"


def _expression(form: TextForm, check: Check) -> str:
    """Returns a checked form as an expression of Lark."""
    if form.kind == "regex":
        return f"/{slashes(ascii_classes(form.value))}/"
    if form.kind == "choice":
        return " | ".join(json.dumps(text) for text in msgspec.json.decode(form.value, type=list[str]))
    return "%json " + json.dumps(_form_schema(form, check, []))


def _parsed(text: str, param: str) -> object:
    """Returns the value of JSON text, with the order of properties preserved."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise RequestError(
            f"{param} is no JSON schema: {error}", param=param, code="invalid_grammar"
        ) from None


def _checked_lark(grammar: str, param: str) -> str:
    """Returns the grammar with its JSON schemas as they are enforced. Raises RequestError for options that
    the engine lacks."""
    parts: list[str] = []
    at = 0
    while (match := _LARK.search(grammar, at)) is not None:
        parts.append(grammar[at : match.end()])
        at = match.end()
        if match["option"]:
            message = f"{param} has the option {match['option']}=, which is not served; use lazy or suffix=, and the request's fields"
            raise RequestError(message, param=param, code="invalid_grammar")
        if match["json"]:
            schema, at = _inline_schema(grammar, at, param)
            parts.append(schema)
    return "".join([*parts, grammar[at:]])


def _inline_schema(grammar: str, at: int, param: str) -> tuple[str, int]:
    """Returns the JSON schema at this index as it is enforced, and its end."""
    try:
        end = json.JSONDecoder(parse_int=str).raw_decode(grammar, at)[1]
        schema = msgspec.json.decode(grammar[at:end])  # refuses numbers and texts that json reads
    except (ValueError, RecursionError) as error:
        message = f"{param} has a %json that is no JSON: {error}"
        raise RequestError(message, param=param, code="invalid_grammar") from None
    return json.dumps(enforceable(schema, param)), end


def _refusal(form: TextForm, message: str) -> RequestError:
    """Returns the error for a form that the client wrote, with the library's reason. The grammar of tools
    is written here, so that the library's reason would not help."""
    if form.kind == "tools":
        text = f"{form.param}: these tools together are too large or too intricate to be enforced; send fewer, or simpler parameters"
        return RequestError(text, param=form.param, code="invalid_grammar")
    stripped = message.removeprefix("the grammar cannot be enforced: ").replace("<non-verbose/>", "")
    reason = " ".join(stripped.split())
    if reason == "NoExtensionBias":
        reason = "it allows no text"
    text = f"{form.param} cannot be enforced: {reason[:MAX_ERROR_CHARACTERS]}"
    return RequestError(text, param=form.param, code="invalid_grammar")


def _schema_refusal(schema: object, param: str, reason: str) -> RequestError:
    """Returns the error for a schema: the keyword of the library's complaint, its places, and what to do
    instead."""
    names, why = next(((names, why) for part, names, why in _LOSSES if part in reason), ((), ""))
    places = {name: keyword_places(schema, name) for name in names}
    told = next(((name, found) for name, found in places.items() if found), None)
    if told is not None:
        text = f"{param}: {told[0]} at {', '.join(told[1][:MAX_SHOWN_PLACES])} cannot be enforced: {why}. See {PAGE}"
    elif any(part in reason for part in _EMPTY):
        text = f"{param}: the schema at # allows no value that can be written; check its bounds, lengths, patterns and types"
    else:
        text = f"{param}: the schema at # is too large or too intricate to be enforced; use fewer properties, shorter lists and simpler patterns"
    return RequestError(text, param=param, code="invalid_grammar")
