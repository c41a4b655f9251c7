"""GET /openapi.json: the description of the API, made from the types that bodies are read into and answers
written from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from headway import __version__
from headway.server.base.errors import ErrorEnvelope, MessagesErrorEnvelope
from headway.server.protocol import (
    chat,
    completions,
    messages_api,
    models,
    other_names,
    parameters,
    responses_api,
    responses_objects,
    tokens,
    unserved,
)
from headway.server.routes import admin, ops, speculation

router = APIRouter()
Schema = dict[str, object]
REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """answer: None for plain text. statuses: further statuses with the same answer. refusal: the envelope
    of errors."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    statuses: tuple[int, ...] = ()
    refusal: type[msgspec.Struct] = ErrorEnvelope


OPERATIONS = (
    Operation("post", "/v1/completions", "Continue a text", completions.Completion, completions.CompletionRequest,
              streams=True),
    Operation("post", "/v1/chat/completions", "Answer a conversation", chat.ChatCompletion, chat.ChatRequest,
              streams=True),
    Operation("post", "/v1/responses", "Answer a conversation of items", responses_objects.ResponseObject,
              responses_api.ResponsesRequest, streams=True),
    Operation("post", "/v1/messages", "Answer a conversation, by Anthropic's API", messages_api.MessagesAnswer,
              messages_api.MessagesRequest, streams=True, refusal=MessagesErrorEnvelope),
    Operation("post", "/v1/messages/count_tokens", "Tokens of a conversation, by Anthropic's API",
              messages_api.MessagesCount, messages_api.MessagesCountRequest, refusal=MessagesErrorEnvelope),
    Operation("get", "/v1/models", "The model that is served", models.ModelList),
    Operation("get", "/v1/models/{model}", "One model", models.ModelCard),
    Operation("get", "/v1/speculation", "Depth and acceptance of drafts", speculation.SpeculationState),
    Operation("put", "/v1/speculation", "Limit the drafts of every round (admin)", speculation.SpeculationState,
              speculation.SpeculationLimit),
    Operation("post", "/tokenize", "Text or messages to token ids", tokens.Tokens, tokens.TokenizeRequest),
    Operation("post", "/detokenize", "Token ids to text", tokens.Text, tokens.DetokenizeRequest),
    Operation("get", "/tokenizer_info", "The tokenizer's own configuration", tokens.TokenizerDescription),
    Operation("post", "/abort/{name}", "End a request (admin)", admin.Aborted),
    Operation("post", "/pause", "Make no tokens until told to (admin)", admin.Activity),
    Operation("post", "/resume", "Make tokens again (admin)", admin.Activity),
    Operation("get", "/health", "Is the engine alive", ops.Health, statuses=(503,)),
    Operation("get", "/ping", "Is the engine alive, by the name that balancers ask for", ops.Health, statuses=(503,)),
    Operation("get", "/health/generate", "One token through the engine", ops.Probe),
    Operation("get", "/ready", "Are requests taken", ops.Readiness, statuses=(503,)),
    Operation("get", "/load", "What runs and waits", ops.Load),
    Operation("get", "/version", "The server's version", ops.Version),
    Operation("get", "/metrics", "Prometheus text", None),
)  # fmt: skip
EVENT: Schema = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
# The ranges of numbers that the checks accept, by kind of body.
RANGES = {
    "CompletionRequest": parameters.RANGES | completions.RANGES,
    "ChatRequest": parameters.RANGES | chat.RANGES,
    "ResponsesRequest": responses_api.RANGES,
    "MessagesRequest": messages_api.RANGES,
}
UNSERVED = {
    "CompletionRequest": unserved.COMPLETIONS,
    "ChatRequest": unserved.CHAT,
    "Message": unserved.MESSAGE,
    "ResponsesRequest": unserved.RESPONSES,
    "ResponseTool": unserved.RESPONSES_TOOL,
    "Tool": unserved.TOOL,
    "FunctionDefinition": unserved.FUNCTION,
    "TokenizeRequest": unserved.TOKENIZE,
    "StructuredOutputs": unserved.STRUCTURED_OUTPUTS,
    "MessagesRequest": unserved.MESSAGES,
    "MessagesCountRequest": unserved.MESSAGES,
    "MessagesThinking": unserved.MESSAGES_THINKING,
    "MessagesOutput": unserved.MESSAGES_OUTPUT,
}
OTHER_NAMES = {
    "CompletionRequest": other_names.COMPLETIONS,
    "ChatRequest": other_names.CHAT,
    "ResponsesRequest": other_names.RESPONSES,
    "MessagesRequest": other_names.MESSAGES,
}


# Strings with only a few valid values.
WORDS: dict[str, dict[str, tuple[str | None, ...]]] = {
    "Message": {"role": chat.ROLES},
    "MessagesTurn": {"role": messages_api.ROLES},
    "MessagesBlock": {"type": messages_api.BLOCKS},
    "MessagesTool": {"type": ("custom", None)},
    "MessagesToolChoice": {"type": (*messages_api.CHOICES, "tool")},
    "MessagesThinking": {"type": messages_api.THINKING, "display": (*messages_api.DISPLAYS, None)},
    "MessagesOutput": {"effort": (*messages_api.EFFORTS, None)},
    "MessagesFormat": {"type": ("json_schema",)},
    "MessagesEdit": {"type": messages_api.EDITS},
}


@router.get("/openapi.json")
async def show_description() -> Response:
    return Response(_encoded(), media_type="application/json")


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(description())


def description() -> Schema:
    types = [kind for o in OPERATIONS for kind in (o.body, o.answer) if kind is not None]
    _, schemas = msgspec.json.schema_components(
        [*types, ErrorEnvelope, MessagesErrorEnvelope], ref_template=REFERENCE, schema_hook=_any
    )
    for name, ranges in RANGES.items():
        _limit(_properties(schemas[name]), ranges)
    for name, table in UNSERVED.items():
        _properties(schemas[name]).update({field: _unserved(field, group) for field, group in table.items()})
    for name, words in WORDS.items():
        _properties(schemas[name]).update({field: {"enum": [*values]} for field, values in words.items()})
    for name, others in OTHER_NAMES.items():
        properties = _properties(schemas[name])
        properties.update({other: _other_name(other, properties[own]) for other, own in others.items()})
    for schema in schemas.values():
        if schema.get("additionalProperties") is False:
            del schema["additionalProperties"]  # unknown fields are ignored
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _any(kind: type) -> Schema:
    """Returns the schema of fields of any type."""
    assert kind is object, kind
    return {"description": "ignored, or refused where it is the content"}


def _unserved(name: str, group: unserved.Group) -> Schema:
    if group.is_ignored:
        return {"description": "ignored"}
    values = [{"type": "null"}, *map(_neutral, group.values[name])]
    return {"anyOf": values, "description": f"for {group.purpose}: not served"}


def _other_name(name: str, field: object) -> Schema:
    values = (None, *other_names.NO_VALUE.get(name, ()))
    return {"anyOf": [field, *({"const": value} for value in values)]}


def _neutral(value: object) -> Schema:
    if not isinstance(value, dict):
        return {"const": value}
    properties = {key: {"const": entry} for key, entry in value.items()}
    null: Schema = {"type": "null"}
    return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": null}


def _operation(operation: Operation) -> Schema:
    names = [part.strip("{}") for part in operation.path.split("/") if part.startswith("{")]
    described: Schema = {
        "summary": operation.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ],
        "responses": _responses(operation),
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
    return described


def _responses(operation: Operation) -> Schema:
    """Returns the responses. The default is a refusal, which has the API's envelope for every status."""
    text: Schema = {"text/plain": {"schema": {"type": "string"}}}
    content = text if operation.answer is None else _json(operation.answer)
    if operation.streams:
        content["text/event-stream"] = {"schema": EVENT}
    responses: Schema = {"200": {"description": "the answer", "content": content}}
    for status in operation.statuses:
        responses[str(status)] = {"description": "not now", "content": content}
    return responses | {"default": {"description": "a refusal", "content": _json(operation.refusal)}}


def _json(kind: type[msgspec.Struct]) -> Schema:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(name=kind.__name__)}}}


def _properties(schema: Schema) -> Schema:
    properties = schema["properties"]
    assert isinstance(properties, dict), schema
    return properties


def _limit(properties: Schema, ranges: parameters.Ranges) -> None:
    """Adds the ranges of numbers. A field is null or a number; the number gets its range."""
    for name, (low, high) in ranges.items():
        field = properties[name]
        assert isinstance(field, dict), field
        for alternative in field["anyOf"]:
            if alternative["type"] != "null":
                alternative |= {"minimum": low, "maximum": high}
