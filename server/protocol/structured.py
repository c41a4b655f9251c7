"""Objects by which a client defines the form of an answer's text; grammar/text_forms.py reads them."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from headway.server.protocol.unserved import STRUCTURED_OUTPUTS, Table

JsonSchema = dict[str, object] | bool


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """strict: a keyword that cannot be enforced is refused, instead of left out. name, description: for
    the prompt on other servers; without effect here."""

    name: str | None = None
    schema: JsonSchema | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's format. type: None for text. schema, name, strict, description: those of a json_schema or a
    json_object beside its type, as in llama.cpp and the Responses API. value: for the types json,
    json_schema and regex, as in TGI."""

    type: str | None = None
    json_schema: JsonSchemaFormat | None = None
    schema: JsonSchema | None = None
    value: JsonSchema | str | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's format, of which one field is set."""

    unserved: ClassVar[Table] = STRUCTURED_OUTPUTS

    json: JsonSchema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
