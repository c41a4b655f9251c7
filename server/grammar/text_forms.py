"""Reads the form of an answer's text from the fields that completions and chats share."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headway.server.base.errors import ApiError
from headway.server.grammar.frames import TextForm
from headway.server.protocol.checks import check_strings, missing, require
from headway.server.protocol.parameters import GenerationFields
from headway.server.protocol.structured import JsonSchema, ResponseFormat, StructuredOutputs

MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1024
MAX_NAME_CHARACTERS = 64
FORMAT_TYPES = ("text", "json_object", "json_schema", "json", "regex")


def text_form(fields: GenerationFields) -> TextForm | None:
    """Returns the form of the text; None if any text is allowed. Raises ApiError for two forms, and for
    ill-formed ones. One form under several names counts once."""
    forms = [*{(form.kind, form.value): form for form in reversed([*_forms(fields)])}.values()][::-1]
    if len(forms) > 1:
        first, second = forms[0].param, forms[1].param
        message = f"{first} and {second} both say what the text may be; send one of them"
        raise ApiError(message, param=second, code="invalid_value")
    return forms[0] if forms else None


def _forms(fields: GenerationFields) -> Iterator[TextForm]:
    if fields.response_format is not None:
        yield from _of_response_format(fields.response_format, "response_format")
    if isinstance(fields.grammar, ResponseFormat):
        yield from _of_response_format(fields.grammar, "grammar")
    outputs = fields.structured_outputs or StructuredOutputs()
    for param, value in (
        ("guided_json", fields.guided_json),
        ("structured_outputs.json", outputs.json),
        ("json_schema", fields.json_schema),
        ("format", None if isinstance(fields.format, str) else fields.format),
    ):
        yield from _of_schema(value, param)
    if isinstance(fields.format, str):
        require(fields.format in ("", "json"), "format", repr(fields.format[:64]), "'json' or a schema")
    for param, wants in (
        ("guided_json_object", fields.guided_json_object),
        ("structured_outputs.json_object", outputs.json_object),
        ("format", fields.format == "json"),
    ):
        if wants:
            yield TextForm("json_object", "", param)
    for param, pattern in (
        ("guided_regex", fields.guided_regex),
        ("structured_outputs.regex", outputs.regex),
        ("regex", fields.regex),
    ):
        if pattern:
            yield TextForm("regex", pattern, param)
    for param, texts in (
        ("guided_choice", fields.guided_choice),
        ("structured_outputs.choice", outputs.choice),
    ):
        if texts:
            check_strings(param, texts, MAX_CHOICES, MAX_CHOICE_CHARACTERS)
            yield TextForm("choice", msgspec.json.encode(texts).decode(), param)
    for param, grammar in (
        ("guided_grammar", fields.guided_grammar),
        ("structured_outputs.grammar", outputs.grammar),
        ("ebnf", fields.ebnf),
        ("grammar", fields.grammar if isinstance(fields.grammar, str) else None),
    ):
        if grammar:
            yield TextForm("lark", grammar, param)


def _of_response_format(wanted: ResponseFormat, where: str) -> Iterator[TextForm]:
    kind = "text" if wanted.type is None else wanted.type
    require(kind in FORMAT_TYPES, f"{where}.type", repr(kind), f"one of {', '.join(FORMAT_TYPES)}")
    if wanted.json_schema is not None:
        require(
            kind == "json_schema",
            f"{where}.type",
            repr(kind),
            "'json_schema' where there is a json_schema",
        )
    if kind == "regex":
        pattern = wanted.value if isinstance(wanted.value, str) else None
        if not pattern:
            raise missing(f"{where}.value")
        yield TextForm("regex", pattern, f"{where}.value")
        return
    schemas = _schemas(wanted, where)
    for path in schemas:
        require(kind != "text", path, "there", "with the type json_schema, json_object or json")
    _check_name(wanted, where)
    if len({msgspec.json.encode(schema) for schema in schemas.values()}) > 1:
        first, second = [*schemas][:2]
        message = f"{first} and {second} differ; send one of them"
        raise ApiError(message, param=second, code="invalid_value")
    if schemas:
        path, schema = next(iter(schemas.items()))
        yield from _of_schema(schema, path, passes_empty=False, strict=_is_strict(wanted))
    elif kind == "json_schema":
        raise missing(f"{where}.json_schema" if wanted.json_schema is None else f"{where}.json_schema.schema")
    elif kind != "text":
        yield TextForm("json_object", "", where)


def _schemas(wanted: ResponseFormat, where: str) -> dict[str, JsonSchema | str]:
    """Returns the schemas of the format by path: clients put them in three places."""
    value = wanted.value
    held_there = value.get("schema") if isinstance(value, dict) and wanted.type == "json_schema" else None
    if isinstance(held_there, dict):
        value = held_there  # TGI's form, which has the fields of OpenAI's json_schema
    held = None if wanted.json_schema is None else wanted.json_schema.schema
    found = {f"{where}.json_schema.schema": held, f"{where}.schema": wanted.schema, f"{where}.value": value}
    return {path: schema for path, schema in found.items() if schema is not None}


def _is_strict(wanted: ResponseFormat) -> bool:
    of_value = (
        wanted.value.get("strict")
        if isinstance(wanted.value, dict) and wanted.type == "json_schema"
        else None
    )
    held = None if wanted.json_schema is None else wanted.json_schema.strict
    return True in (held, wanted.strict, of_value)


def _check_name(wanted: ResponseFormat, where: str) -> None:
    path = f"{where}.name" if wanted.json_schema is None else f"{where}.json_schema.name"
    name = (wanted.name if wanted.json_schema is None else wanted.json_schema.name) or ""
    limit = f"at most {MAX_NAME_CHARACTERS}"
    require(len(name) <= MAX_NAME_CHARACTERS, path, f"{len(name)} characters", limit)


def _of_schema(
    value: JsonSchema | str | None, param: str, *, passes_empty: bool = True, strict: bool = False
) -> Iterator[TextForm]:
    """passes_empty: an empty schema is no form, since it is the default of other servers."""
    if value is None or (passes_empty and value in ({}, "")):
        return
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    yield TextForm("json_schema", text, param, strict)
