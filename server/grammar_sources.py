"""What a client says about a text, as the source of a grammar that the engine can enforce. Imports little, and no asyncio."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

import msgspec

from headway.engine import RequestError, is_gbnf, json_schema_source, lark_of_gbnf, lark_source, regex_source
from headway.server.formats import find_format
from headway.server.formats.lark import slashes
from headway.server.grammar_frames import TextForm, ToolCalls
from headway.server.json_schema import ascii_classes, enforceable, keyword_places

MAX_SOURCE_CHARACTERS = {
    "json_object": 0, "json_schema": 262_144, "regex": 8_192, "choice": 262_144, "lark": 262_144,
    "tools": 524_288,
}  # fmt: skip
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


def check_size(form: TextForm) -> None:
    """Raises RequestError for a form that is too long to be looked at."""
    limit = MAX_SOURCE_CHARACTERS[form.kind]
    if len(form.value) > limit:
        message = f"{form.param} has {len(form.value)} characters of {form.kind}, the limit is {limit}"
        raise RequestError(message, param=form.param, code="invalid_grammar")


def checked_source(
    form: TextForm, check: Callable[[str], None], special_ids: Mapping[str, int] | None = None
) -> str:
    """Returns the source of a form that compiles. Raises RequestError that names the field at fault.

    check: from make_grammar_check. It may take long, or end the process, over a hostile form. special_ids: the ids of special
    tokens by their names, in which calls are written.
    """
    try:
        source = lark_source(_calls(form.value, special_ids or {})) if form.kind == "tools" else _source(form)
        check(source)
    except RequestError as error:
        raise error if error.param is not None else _refusal(form, str(error)) from error
    except RecursionError:
        raise _refusal(form, "it is nested too deeply") from None
    return source


def _source(form: TextForm) -> str:
    if form.kind == "json_object":
        return _schema_source({"type": "object"}, form.param)
    if form.kind == "json_schema":
        return _schema_source(_parsed(form.value, form.param), form.param)
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


def _schema_source(schema: object, param: str) -> str:
    return json_schema_source(msgspec.json.encode(enforceable(schema, param)).decode())


def _calls(value: str, special_ids: Mapping[str, int]) -> str:
    """Returns the Lark grammar of calls, or of calls and what else the text may be."""
    calls = msgspec.json.decode(value, type=ToolCalls)
    tools = []
    for i, tool in calls.tools:
        function = dict(tool["function"])
        if "parameters" in function:
            schema = enforceable(function["parameters"], f"tools[{i}].function.parameters")
            # How whitespace is written is a part of the format.
            function["parameters"] = {name: value for name, value in schema.items() if name != "x-guidance"}
        tools.append({**tool, "function": function})
    grammar = find_format(None, name=calls.output_format).tool_grammar(
        tools,
        required=calls.required or calls.text is not None,
        parallel=calls.parallel,
        special_ids=special_ids,
    )
    if calls.text is None:
        return grammar
    return (
        f"start: calls | answer\nanswer: {_expression(calls.text)}\n{grammar.replace('start:', 'calls:', 1)}"
    )


def _expression(form: TextForm) -> str:
    """Returns a form that has passed as an expression of Lark."""
    if form.kind == "regex":
        return f"/{slashes(ascii_classes(form.value))}/"
    if form.kind == "choice":
        return " | ".join(json.dumps(text) for text in msgspec.json.decode(form.value, type=list[str]))
    schema = {"type": "object"} if form.kind == "json_object" else _parsed(form.value, form.param)
    return "%json " + json.dumps(enforceable(schema, form.param))


def _parsed(text: str, param: str) -> object:
    """Returns the value of JSON text, whose order of properties is kept."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise RequestError(
            f"{param} is no JSON schema: {error}", param=param, code="invalid_grammar"
        ) from None


def _checked_lark(grammar: str, param: str) -> str:
    """Returns the grammar with its JSON schemas as they can be enforced. Raises RequestError for options that the engine lacks."""
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
    """Returns the JSON schema that begins there as it can be enforced, and where it ends."""
    try:
        schema, end = json.JSONDecoder().raw_decode(grammar, at)
    except (ValueError, RecursionError) as error:
        message = f"{param} has a %json that is no JSON: {error}"
        raise RequestError(message, param=param, code="invalid_grammar") from None
    return json.dumps(enforceable(schema, param)), end


def _refusal(form: TextForm, message: str) -> RequestError:
    """The library's reason, with the places of the keyword that it is about."""
    stripped = message.removeprefix("the grammar cannot be enforced: ").replace("<non-verbose/>", "")
    reason = " ".join(stripped.split())
    if reason == "NoExtensionBias":
        reason = "it allows no text"
    places: list[str] = []
    if form.kind == "json_schema":
        keyword = next((name for part, name in _KEYWORD_OF_ERROR.items() if part in reason), None)
        places = [] if keyword is None else keyword_places(_parsed(form.value, form.param), keyword)
    where = f" (at {', '.join(places[:MAX_SHOWN_PLACES])})" if places else ""
    text = f"{form.param} cannot be enforced{where}: {reason[:MAX_ERROR_CHARACTERS]}"
    return RequestError(text, param=form.param, code="invalid_grammar")
