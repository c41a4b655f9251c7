"""POST /v1/responses: a conversation in, items out, at once or as a stream of named events. No answer is
stored."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from headway.server.base.errors import ApiError
from headway.server.base.field_names import FieldNames
from headway.server.chat.answer import begin_chat
from headway.server.generation.logprobs import PartLogprobs
from headway.server.http.json_response import JsonResponse
from headway.server.http.sse import escape_line_ends, unless_disconnected
from headway.server.protocol.responses_api import ResponsesRequest, TextFormat, TextOptions
from headway.server.protocol.responses_events import (
    Completed,
    Created,
    Event,
    Failed,
    Incomplete,
    InProgress,
)
from headway.server.protocol.responses_objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningEcho,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
)
from headway.server.protocol.usage import Usage
from headway.server.requests.answer import Answer, collect, event_stream
from headway.server.requests.body import body_of, tell_ignored
from headway.server.requests.services import services_of
from headway.server.responses_api.chat import as_chat
from headway.server.responses_api.output import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    OutputItems,
    ReasoningForms,
)
from headway.server.responses_api.tools import ResponseTools, served
from headway.server.text.tokenizer import Tokenizer

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    services = services_of(request)
    body = await body_of(request, ResponsesRequest)
    chat, names, tools = as_chat(body)
    tell_ignored(request, *tools.ignored)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        tell_ignored(request, "text.verbosity")
    if body.store:
        tell_ignored(request, "store")
    with names.telling():
        answer, _ = await begin_chat(chat, request, services, prefix="resp_", kind="response", own=names.own)
    writer = ResponseWriter(body, answer, names, tools, services.tokenizer, bool(chat.logprobs))
    if body.stream:
        return event_stream(answer, writer.events(), error_event=writer.failed_event)
    return JsonResponse(await unless_disconnected(request.receive, writer.whole()))


@dataclass(slots=True)
class ResponseWriter:
    """Writes one answer. Mutable: counts the events that it has written."""

    body: ResponsesRequest
    answer: Answer
    names: FieldNames
    tools: ResponseTools
    tokenizer: Tokenizer
    wants_logprobs: bool
    items: OutputItems = field(init=False)
    begun: ResponseObject = field(init=False)
    num_events: int = 0

    def __post_init__(self) -> None:
        body = self.body
        forms = ReasoningForms(
            body.include_reasoning is not False, body.wants_carried_reasoning, body.summary is not None
        )
        logprobs = PartLogprobs(self.tokenizer.full_vocabulary) if self.wants_logprobs else None
        self.items = OutputItems(forms, self.tools, logprobs, self.answer.continuation.draws("items"))
        self.begun = _begun(self.body, self.answer, self.tokenizer)

    async def whole(self) -> ResponseObject:
        with self.names.telling():
            (delta,) = await collect(self.answer)
        list(self.items.take(delta))
        list(self.items.end(_status(delta.finish_reason)))
        return self._ended(delta.finish_reason)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Writes the first events when the first token has arrived, so that a refusal by the engine is
        still an HTTP error."""
        reason = None
        with self.names.telling():
            async with self.answer.running() as deltas:
                async for delta in deltas:
                    reason = delta.finish_reason
                    written = self._beginning() + b"".join(map(self._written, self.items.take(delta)))
                    if written:
                        yield written
        for event in self.items.end(_status(reason)):
            yield self._written(event)
        kind = Completed if _status(reason) == COMPLETED else Incomplete
        yield self._written(kind(response=self._ended(reason)))

    def failed_event(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that an error has ended, and the first ones if only comments
        were sent."""
        fault = ResponseFault(_fault_code(error), str(error))
        failed = replace(self.begun, status="failed", error=fault, output=list(self.items.done))
        return self._beginning() + self._written(Failed(response=failed))

    def _beginning(self) -> bytes:
        """Returns the events before all others; nothing if they were written."""
        if self.num_events:
            return b""
        return self._written(Created(response=self.begun)) + self._written(InProgress(response=self.begun))

    def _written(self, event: Event) -> bytes:
        event.sequence_number = self.num_events
        self.num_events += 1
        payload = escape_line_ends(msgspec.json.encode(event))
        return b"event: %s\ndata: %s\n\n" % (event.event_name.encode(), payload)

    def _ended(self, reason: str | None) -> ResponseObject:
        is_cut = _status(reason) == INCOMPLETE
        return replace(
            self.begun,
            status=_status(reason),
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=list(self.items.done),
            usage=_usage(self.answer.usage()),
            speculation=self.answer.report(),
        )


def _status(reason: str | None) -> str:
    """reason: a chat's finish_reason."""
    return INCOMPLETE if reason == "length" else COMPLETED


def _fault_code(error: ApiError) -> str:
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 or error.status == 410 else "invalid_prompt"


def _begun(body: ResponsesRequest, answer: Answer, tokenizer: Tokenizer) -> ResponseObject:
    """Returns the object before there is any output; most of it repeats the request."""
    head, default = answer.head, tokenizer.default_sampling
    return ResponseObject(
        id=head.id,
        created_at=head.created,
        status=IN_PROGRESS,
        model=head.model,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(None if body.reasoning is None else body.reasoning.effort, body.summary),
        safety_identifier=body.safety_identifier,
        temperature=default.temperature if body.temperature is None else body.temperature,
        text=_text(body.text),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=served(body.tools or ()),
        top_logprobs=body.top_logprobs or 0,
        top_p=default.top_p if body.top_p is None else body.top_p,
        user=body.user,
    )


def _text(text: TextOptions | None) -> TextOptions:
    wanted = (text and text.format) or TextFormat()
    kind = wanted.type or "text"
    name = wanted.name or ("" if kind == "json_schema" else None)  # OpenAI's types want one
    return TextOptions(replace(wanted, type=kind, name=name), "medium")


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            details.reasoning_tokens if isinstance(details.reasoning_tokens, int) else 0,
            details.accepted_prediction_tokens,
            details.rejected_prediction_tokens,
        ),
        total_tokens=usage.total_tokens,
    )
