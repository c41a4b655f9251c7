"""Grammars by which a model can only write calls of the offered tools, in its own format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.engine import RequestError
from headway.server.formats.arguments import schemas_of
from headway.server.formats.calls import (
    BracketCalls,
    CallForm,
    InvokeCalls,
    JsonCalls,
    KeyedCalls,
    PythonicCalls,
    SeparatedCalls,
    TaggedCalls,
)
from headway.server.formats.lark import ANY, Lark
from headway.server.formats.text_values import Parameter, json_value, parameters_of, string_text, text_value

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
Write = Callable[
    [str, dict[str, Any]], str
]  # from the name of a tool and the schema of its arguments to an expression


def tool_grammar(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    parallel: bool,
    special_ids: Mapping[str, int],
) -> str:
    """Returns the source of a grammar in Lark. required: calls only; otherwise text, which calls may follow.
    parallel: several calls.

    Raises RequestError for parameters that the form cannot enforce; the rest is checked when the grammar is
    compiled.
    """
    lark = Lark(special_ids)
    opener, separator = _opener(form), _separator(form)
    body = lark.rule(_body(lark, form, tools, parallel=parallel))
    more = f" ({lark.literal(separator + opener)} {body})*" if parallel and separator is not None else ""
    if required:
        return lark.source(f"/\\n{{1,2}}/? {lark.literal(opener)} {body}{more}")
    if opener:
        return lark.source(f"/{ANY}/ | {lark.text(opener)} {body}{more}")
    start = _start(form)
    return lark.source(f"{body}{more} | /([^\\s\\{start}]{ANY})?/")


def harmony_grammar(
    tools: Sequence[Mapping[str, Any]], *, required: bool, special_ids: Mapping[str, int]
) -> str:
    """Returns the source of a grammar of gpt-oss's messages from the first token on: reasoning, then one
    call.

    required: a call must come; otherwise any messages, of which a call may be the last.
    """
    lark = Lark(special_ids)
    next_message = "<|end|><|start|>assistant"
    reasoning = f"{lark.literal('<|channel|>analysis<|message|>')} {lark.text(next_message)}"
    calls = [
        f"{lark.literal(f'<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>')} {lark.json(schema)}"
        for name, schema in object_schemas(tools).items()
    ]
    call = lark.rule(" | ".join(calls))
    if required:
        return lark.source(f"({reasoning})? {call}")
    preamble = f"{lark.literal('<|channel|>commentary<|message|>')} {lark.text(next_message)}"
    final = f"{lark.literal('<|channel|>final<|message|>')} /{ANY}/"
    return lark.source(f"({reasoning} | {preamble})* ({call} | {final})")


def object_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the schemas of the tools' arguments, which are objects. A tool without parameters takes an
    empty one. Raises RequestError if a schema allows no object."""
    schemas = {}
    for name, schema in schemas_of(tools).items():
        types = schema.get("type", "object")
        if "object" not in ([types] if isinstance(types, str) else types):
            raise RequestError(
                f'the parameters of the tool {name!r}: type is {json.dumps(types)}, it must be "object" or left out',
                code="invalid_value",
                param="tools",
            )
        schemas[name] = {**schema, "type": "object"} if schema else NO_ARGUMENTS
    return schemas


def _start(form: CallForm) -> str:
    """Returns the text that begins calls without an opener; empty if the form has openers."""
    return form.starts[0] if isinstance(form, JsonCalls | PythonicCalls) and form.starts else ""


def _opener(form: CallForm) -> str:
    return "" if _start(form) else form.openers[0]


def _separator(form: CallForm) -> str | None:
    """Returns the text between two calls that each have an opener; None if one opener covers all calls, or
    if only one call is allowed."""
    match form:
        case BracketCalls(is_list=False):
            return ""
        case JsonCalls(closer=None):
            return None  # Llama 3's templates accept only one call a message
        case JsonCalls():
            return "\n"
        case TaggedCalls():
            return "\n"
        case KeyedCalls():
            return "\n" if form.has_lines else ""
        case _:
            return None


def _body(lark: Lark, form: CallForm, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
    """Returns an expression for the text after the opener: one call, or all calls of a section."""
    schemas = object_schemas(tools)

    def calls(write: Write) -> str:
        return lark.rule(" | ".join(lark.rule(write(name, schema)) for name, schema in schemas.items()))

    def row(call: str, separator: str) -> str:
        return f"{call} ({lark.literal(separator)} {call})*" if parallel else call

    def named(key: str) -> Write:
        return lambda name, schema: " ".join(
            (lark.literal(f'{{"name": {json.dumps(name)}, "{key}": '), lark.json(schema), lark.literal("}"))
        )

    match form:
        case JsonCalls(closer=None):
            return calls(named(form.argument_keys[0]))
        case JsonCalls():
            return f"{lark.literal(chr(10))} {calls(named('arguments'))} {lark.literal(f'{chr(10)}{form.closer}')}"
        case BracketCalls(is_list=True):
            return f"{lark.literal(' [')} {row(calls(named('arguments')), ', ')} {lark.literal(']')}"
        case BracketCalls():
            return calls(lambda name, schema: f"{lark.literal(name + form.arguments)} {lark.json(schema)}")
        case SeparatedCalls():
            end = lark.literal(form.section_end)
            return f"{row(calls(_separated(lark, form)), chr(10) if form.has_fence else '')} {end}"
        case TaggedCalls():
            return calls(_tagged(lark, form))
        case KeyedCalls():
            return calls(_keyed(lark, form))
        case InvokeCalls():
            end = lark.literal(f"\n{form.section_end}")
            return f"{calls(_invoked(lark, form))}{'+' if parallel else ''} {end}"
        case PythonicCalls():
            return f"{lark.literal('[')} {row(calls(_pythonic(lark)), ', ')} {lark.literal(']')}"


def _separated(lark: Lark, form: SeparatedCalls) -> Write:
    def write(name: str, schema: dict[str, Any]) -> str:
        before = f"function{form.separator}{name}\n```json\n" if form.has_fence else f"{name}{form.separator}"
        after = f"\n```{form.end}" if form.has_fence else form.end
        return f"{lark.literal(form.begin + before)} {lark.json(schema)} {lark.literal(after)}"

    return write


def _tagged(lark: Lark, form: TaggedCalls) -> Write:
    line = "\n" if form.has_lines else ""
    excluded = (form.parameter_end, form.parameter, form.call_end, form.closer)

    def write(name: str, schema: dict[str, Any]) -> str:
        parts = [lark.literal(f"\n{form.call}{name}>\n")]
        for one in parameters_of(name, schema, forbidden=">\n"):
            value = text_value(
                lark, one, f"{line}{form.parameter_end}\n", excluded, is_bare=not form.has_lines
            )
            parts.append(_optional(lark, one, f"{lark.literal(f'{form.parameter}{one.key}>{line}')} {value}"))
        return " ".join([*parts, lark.literal(f"{form.call_end}\n{form.closer}")])

    return write


def _keyed(lark: Lark, form: KeyedCalls) -> Write:
    line = "\n" if form.has_lines else ""

    def write(name: str, schema: dict[str, Any]) -> str:
        parts = [lark.literal(f"{name}{line}")]
        for one in parameters_of(name, schema, forbidden="<\n"):
            key = lark.literal(f"{form.key[0]}{one.key}{form.key[1]}{line}{form.value[0]}")
            value = text_value(lark, one, f"{form.value[1]}{line}", [form.value[1]])
            parts.append(_optional(lark, one, f"{key} {value}"))
        return " ".join([*parts, lark.literal(form.closer)])

    return write


def _invoked(lark: Lark, form: InvokeCalls) -> Write:
    closer = f"{form.parameter_end}\n"

    def write(name: str, schema: dict[str, Any]) -> str:
        parts = [lark.literal(f'\n{form.call}{name}">\n')]
        for one in parameters_of(name, schema, forbidden='"\n'):
            head = f'{form.parameter}{one.key}" string='
            if one.is_string:
                value = string_text(lark, one, closer, [form.parameter_end])
                parts.append(
                    _optional(lark, one, f"{lark.literal(f'{head}{chr(34)}true{chr(34)}>')} {value}")
                )
            else:
                value = f"{json_value(lark, one)} {lark.literal(closer)}"
                parts.append(
                    _optional(lark, one, f"{lark.literal(f'{head}{chr(34)}false{chr(34)}>')} {value}")
                )
        return " ".join([*parts, lark.literal(form.call_end)])

    return write


def _optional(lark: Lark, parameter: Parameter, expression: str) -> str:
    return expression if parameter.is_required else f"{lark.rule(expression)}?"


def _pythonic(lark: Lark) -> Write:
    """Arguments are written by keyword, the required ones first, because commas stand between them."""

    def write(name: str, schema: dict[str, Any]) -> str:
        parameters = parameters_of(name, schema, forbidden="")
        for one in parameters:
            if not one.key.isidentifier():
                raise one.refuse_name(
                    "its name is none in Python, in which this model writes calls; use another"
                )
        written = {p.key: lark.rule(f"{lark.literal(f'{p.key}=')} {json_value(lark, p)}") for p in parameters}
        required = [written[p.key] for p in parameters if p.is_required]
        others = [written[p.key] for p in parameters if not p.is_required]
        comma, rest, firsts = lark.literal(", "), "", list[str]()
        for other in reversed(others):
            firsts.insert(0, f"{other} {rest}")
            rest = lark.rule(f"({comma} {other})? {rest}")
        if required:
            arguments = f"{f' {comma} '.join(required)} {rest}"
        else:
            arguments = f"({' | '.join(firsts)})?" if firsts else ""
        return f"{lark.literal(f'{name}(')} {arguments} {lark.literal(')')}"

    return write
