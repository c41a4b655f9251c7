"""POST /v1/chat/completions: messages in, a message out, at once or as a stream of server-sent events."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from headway.engine import Grammar
from headway.server.access import record_of
from headway.server.body import read_body
from headway.server.chat_prompt import Conversation, chat_prompt
from headway.server.choice import Delta
from headway.server.grammars import grammar_of
from headway.server.logprobs import chat_logprobs
from headway.server.prompt import encode_chat
from headway.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
    ChoiceLogprobs,
    check,
    check_messages,
    template_messages,
)
from headway.server.protocol.decoding import decode
from headway.server.response import (
    GenerationResponse,
    collect,
    draft_positions,
    event_stream,
    new_header,
    new_response,
)
from headway.server.routes.models import check_model
from headway.server.sampling import RequestOptions, choice_requests, encode_bad_words
from headway.server.services import Services, engine_info, request_id_of, services_of
from headway.server.sse import unless_disconnected
from headway.server.tokenizer import Tokenizer

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    services = services_of(request)
    body = decode(await read_body(request), ChatRequest)
    check_model(body.model, services)
    record = record_of(request)
    record.model = body.model or services.model_name
    services.keys.check_priority(body.priority, request.headers.get("Authorization", ""))
    check(body)
    check_messages(body.messages)
    chat = await chat_prompt(Conversation(template_messages(body.messages)), services)
    info = engine_info(services)
    prompt = await encode_chat(
        chat,
        services.tokenizer,
        info,
        keep_last=body.truncate_prompt_tokens,
        num_wanted=body.token_limit,
    )
    bad_words = await encode_bad_words(body, services.tokenizer)
    grammar = await grammar_of(body, services.grammars, info)
    writer = _writer(body, prompt, bad_words, grammar, services, request)
    record.answer = writer.answer
    if body.stream:
        return event_stream(writer.answer, writer.chunk_choices)
    completion = await unless_disconnected(request.receive, _complete(writer))
    return Response(msgspec.json.encode(completion), media_type="application/json")


def _writer(
    body: ChatRequest,
    prompt: list[int],
    bad_words: list[list[int]],
    grammar: Grammar | None,
    services: Services,
    request: Request,
) -> ChatWriter:
    info = engine_info(services)
    wanted = RequestOptions(
        num_candidates=body.n or 1,
        max_tokens=body.token_limit,
        limit_name=body.token_limit_name,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        owner=services.keys.owner(request.headers.get("Authorization", "")),
        bad_words=bad_words,
        grammar=grammar,
    )
    requests = choice_requests(body, wanted, [prompt], services.tokenizer, info)
    head = new_header("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", services)
    answer = new_response(head, body, requests, len(prompt), services, request_id_of(request))
    return ChatWriter(body, answer, prompt, services.tokenizer)


async def _complete(writer: ChatWriter) -> ChatCompletion:
    choices = await collect(writer.answer)
    head = writer.answer.head
    return ChatCompletion(
        id=head.id,
        object=head.object,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[writer.choice(delta) for delta in choices],
        usage=writer.answer.usage(),
        speculation=writer.answer.report(),
        prompt_token_ids=writer.prompt if writer.body.return_token_ids else UNSET,
    )


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Deltas as entries of `choices`."""

    body: ChatRequest
    answer: GenerationResponse
    prompt: list[int]
    tokenizer: Tokenizer

    def choice(self, delta: Delta) -> ChatChoice:
        message = AnswerMessage(delta.text)
        logprobs = self._logprobs(delta)
        positions = draft_positions(self.body, delta)
        return ChatChoice(
            index=delta.index,
            message=message,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            token_ids=self._token_ids(delta),
            speculation=positions,
            stop_reason=delta.stop_reason,
        )

    def chunk_choices(self, delta: Delta, is_first: bool) -> list[ChatChunkChoice]:
        """The role comes first and the finish_reason last, each in a chunk of its own."""
        choices = []
        if is_first:
            choices.append(ChatChunkChoice(delta.index, ChatDelta(role="assistant", content="")))
        if delta.text or delta.tokens:
            piece = ChatDelta(content=delta.text)
            logprobs, token_ids = self._logprobs(delta), self._token_ids(delta)
            positions = draft_positions(self.body, delta)
            choices.append(
                ChatChunkChoice(delta.index, piece, logprobs, token_ids=token_ids, speculation=positions)
            )
        if delta.finish_reason:
            choices.append(
                ChatChunkChoice(
                    delta.index,
                    ChatDelta(),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )
        return choices

    def _logprobs(self, delta: Delta) -> ChoiceLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(delta.tokens, self.tokenizer.full_vocabulary)

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return [token.token_id for token in delta.tokens] if self.body.return_token_ids else UNSET
