"""Reads the form that the text of an answer must have, out of the fields that completions and chats share."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headway.server.errors import ApiError
from headway.server.grammar_frames import TextForm
from headway.server.protocol.checks import check_strings, require
from headway.server.protocol.parameters import GenerationFields
from headway.server.protocol.structured import JsonSchema, ResponseFormat, StructuredOutputs

MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1024
MAX_NAME_CHARACTERS = 64
FORMAT_TYPES = ("text", "json_object", "json_schema")


def text_form(fields: GenerationFields) -> TextForm | None:
    """Returns the form that the text must have; None for any text. Raises ApiError for two forms, and for ill-formed ones."""
    forms = list(_forms(fields))
    if len(forms) > 1:
        first, second = forms[0].param, forms[1].param
        message = f"{first} and {second} both say what the text may be; send one of them"
        raise ApiError(message, param=second, code="invalid_value")
    return forms[0] if forms else None


def _forms(fields: GenerationFields) -> Iterator[TextForm]:
    if fields.response_format is not None:
        yield from _of_response_format(fields.response_format)
    outputs = fields.structured_outputs or StructuredOutputs()
    for prefix, value in (("guided_", fields.guided_json), ("structured_outputs.", outputs.json)):
        yield from _of_schema(value, f"{prefix}json")
    for param, wants in (
        ("guided_json_object", fields.guided_json_object),
        ("structured_outputs.json_object", outputs.json_object),
    ):
        if wants:
            yield TextForm("json_object", "", param)
    for param, pattern in (
        ("guided_regex", fields.guided_regex),
        ("structured_outputs.regex", outputs.regex),
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
    ):
        if grammar:
            yield TextForm("lark", grammar, param)


def _of_response_format(wanted: ResponseFormat) -> Iterator[TextForm]:
    where = "response_format"
    kind = "text" if wanted.type is None else wanted.type
    require(kind in FORMAT_TYPES, f"{where}.type", repr(kind), f"one of {', '.join(FORMAT_TYPES)}")
    is_schema = kind == "json_schema"
    if wanted.json_schema is not None:
        require(is_schema, f"{where}.type", repr(kind), "'json_schema' where there is a json_schema")
    if wanted.schema is not None:
        limit = "in json_schema, or with the type json_object"
        require(kind == "json_object", f"{where}.schema", "there", limit)
        yield from _of_schema(wanted.schema, f"{where}.schema", passes_empty=False)
    elif kind == "json_object":
        yield TextForm("json_object", "", where)
    elif is_schema:
        held = wanted.json_schema
        if held is None or held.schema is None:
            path = f"{where}.json_schema" if held is None else f"{where}.json_schema.schema"
            raise ApiError(
                f"{path} is missing; it is required", param=path, code="missing_required_parameter"
            )
        num_characters = len(held.name or "")
        limit = f"at most {MAX_NAME_CHARACTERS}"
        require(
            num_characters <= MAX_NAME_CHARACTERS,
            f"{where}.json_schema.name",
            f"{num_characters} characters",
            limit,
        )
        yield from _of_schema(held.schema, f"{where}.json_schema.schema", passes_empty=False)


def _of_schema(
    value: JsonSchema | str | None, param: str, *, passes_empty: bool = True
) -> Iterator[TextForm]:
    """passes_empty: an empty schema is no form, as where other servers have it as their default."""
    if value is None or (passes_empty and value in ({}, "")):
        return
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    yield TextForm("json_schema", text, param)
