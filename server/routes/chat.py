"""POST /v1/chat/completions: messages in, a message out, at once or as a stream of server-sent events."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from headway.server.chat.allowed_tools import with_allowed_tools
from headway.server.chat.answer import begin_chat
from headway.server.formats import Content, Reasoning
from headway.server.generation.choice import Delta
from headway.server.generation.choice_output import NumberedCall, Part
from headway.server.generation.logprobs import chat_logprobs
from headway.server.http.json_response import JsonResponse
from headway.server.http.sse import unless_disconnected
from headway.server.protocol.chat import (
    AnswerCall,
    AnswerFunction,
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
    ChoiceLogprobs,
    DeltaCall,
)
from headway.server.protocol.usage import DraftPositions
from headway.server.requests.answer import (
    Answer,
    chunk_events,
    collect,
    draft_positions,
    event_stream,
)
from headway.server.requests.body import body_of
from headway.server.requests.services import services_of
from headway.server.text.tokenizer import Tokenizer

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    services = services_of(request)
    body, names = with_allowed_tools(await body_of(request, ChatRequest))
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    with names.telling():
        answer, prompt = await begin_chat(
            body, request, services, prefix="chatcmpl-", kind=kind, own=names.own, tells_loss=True
        )
    writer = ChatWriter(body, answer, prompt, services.tokenizer)
    if body.stream:
        return event_stream(writer.answer, chunk_events(writer.answer, writer.chunk_choices))
    return JsonResponse(await unless_disconnected(request.receive, _complete(writer)))


async def _complete(writer: ChatWriter) -> ChatCompletion:
    choices = await collect(writer.answer)
    return ChatCompletion(
        **msgspec.structs.asdict(writer.answer.head),
        choices=[writer.choice(delta) for delta in choices],
        usage=writer.answer.usage(),
        speculation=writer.answer.report(),
        prompt_token_ids=writer.prompt if writer.body.return_token_ids else UNSET,
    )


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes deltas as entries of `choices`."""

    body: ChatRequest
    answer: Answer
    prompt: list[int]
    tokenizer: Tokenizer

    def choice(self, delta: Delta) -> ChatChoice:
        logprobs = self._logprobs(delta)
        positions = draft_positions(self.body, delta)
        return ChatChoice(
            index=delta.index,
            message=self._message(delta),
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            token_ids=self._token_ids(delta),
            speculation=positions,
            stop_reason=delta.stop_reason,
        )

    def _message(self, delta: Delta) -> AnswerMessage:
        if delta.parts is None:
            return AnswerMessage(delta.text)
        content = "".join(part.text for part in delta.parts if isinstance(part, Content))
        calls = [_answer_call(part) for part in delta.parts if isinstance(part, NumberedCall)]
        message = AnswerMessage(content if content or not calls else None)
        if calls:
            message.tool_calls = calls
        if self._tells_reasoning:
            thoughts = "".join(part.text for part in delta.parts if isinstance(part, Reasoning))
            message.reasoning_content = message.reasoning = thoughts or None
        return message

    def chunk_choices(self, delta: Delta, is_first: bool) -> list[ChatChunkChoice]:
        """Returns the chunks of a delta. The role comes first and the finish_reason last, each in a chunk
        of its own. Tokens come with the first part of their delta, except a token that ends the text
        without being part of it, which comes with the finish_reason. Every part has its offset if draft
        positions are requested."""
        choices = []
        if is_first:
            choices.append(ChatChunkChoice(delta.index, ChatDelta(role="assistant", content="")))
        pieces, ending = self._pieces(delta), None
        if delta.finish_reason and pieces:
            behind = tuple(token for token in delta.tokens if token.start >= delta.end)
            ending = replace(delta, tokens=behind)
            delta = replace(delta, tokens=delta.tokens[: len(delta.tokens) - len(behind)])
        if delta.tokens and not pieces:
            pieces = [ChatChunkChoice(delta.index, ChatDelta())]
        choices += pieces
        if pieces:
            self._tell_tokens(delta, pieces[0])
        if delta.finish_reason:
            last = ChatChunkChoice(
                delta.index, ChatDelta(), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
            )
            if ending is not None and ending.tokens:
                self._tell_tokens(ending, last)
            choices.append(last)
        return choices

    def _tell_tokens(self, delta: Delta, choice: ChatChunkChoice) -> None:
        choice.logprobs, choice.token_ids = self._logprobs(delta), self._token_ids(delta)
        told = draft_positions(self.body, delta)
        if told is not UNSET and choice.speculation is not UNSET:
            told.delta_offset = choice.speculation.delta_offset
        choice.speculation = told

    def _pieces(self, delta: Delta) -> list[ChatChunkChoice]:
        if delta.parts is None:
            is_told = delta.text or delta.tokens
            return [ChatChunkChoice(delta.index, ChatDelta(content=delta.text))] if is_told else []
        parts = [part for part in delta.parts if self._tells_reasoning or not isinstance(part, Reasoning)]
        return [ChatChunkChoice(delta.index, _delta(part), speculation=self._offset(part)) for part in parts]

    def _offset(self, part: Part) -> DraftPositions | UnsetType:
        if not self.body.wants_draft_positions or isinstance(part, NumberedCall):
            return UNSET
        return DraftPositions([], [], part.start)

    @property
    def _tells_reasoning(self) -> bool:
        output = self.answer.output
        has_reasoning = output is not None and output.format.thinking_end is not None
        return has_reasoning and self.body.include_reasoning is not False

    def _logprobs(self, delta: Delta) -> ChoiceLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(delta.tokens, self.tokenizer.full_vocabulary)

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return [token.token_id for token in delta.tokens] if self.body.return_token_ids else UNSET


def _answer_call(call: NumberedCall) -> AnswerCall:
    return AnswerCall(call.call_id, AnswerFunction(call.name, call.arguments))


def _delta(part: Part) -> ChatDelta:
    if isinstance(part, Reasoning):
        return ChatDelta(reasoning_content=part.text, reasoning=part.text)
    if isinstance(part, Content):
        return ChatDelta(content=part.text)
    call = DeltaCall(part.index, part.call_id, AnswerFunction(part.name, part.arguments))
    return ChatDelta(tool_calls=[call])
