"""POST /v1/messages and /v1/messages/count_tokens: chats by Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.engine import RequestError
from headway.server.base.errors import ApiError, as_api_error
from headway.server.chat.answer import begin_chat
from headway.server.chat.prompt import chat_prompt, conversation_for
from headway.server.http.json_response import JsonResponse
from headway.server.http.sse import unless_disconnected
from headway.server.messages_api.output import PING, MessageWriter
from headway.server.messages_api.translation import ThinkingModel, Translation, translate
from headway.server.protocol import chat
from headway.server.protocol.messages_api import (
    MessagesCount,
    MessagesCountRequest,
    MessagesRequest,
    PromptFields,
)
from headway.server.requests.answer import event_stream
from headway.server.requests.body import body_of, tell_ignored
from headway.server.requests.services import Services, check_model, engine_info, services_of

router = APIRouter(prefix="/v1/messages")

Result = TypeVar("Result")
Work = Callable[[Translation], Coroutine[Any, Any, Result]]


@router.post("")
async def create_message(request: Request) -> Response:
    services = services_of(request)
    body = await body_of(request, MessagesRequest)
    writer = await _translated(body, services, partial(_begin, body, request, services))
    if body.stream:
        return event_stream(writer.answer, writer.events(), keep_alive=PING)
    return JsonResponse(await unless_disconnected(request.receive, writer.message()))


@router.post("/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Returns the length of the prompt of the same body in /v1/messages, whether it fits or not."""
    services = services_of(request)
    body = await body_of(request, MessagesCountRequest)
    return JsonResponse(await _translated(body, services, partial(_count, request, services)))


async def _translated(body: PromptFields, services: Services, work: Work[Result]) -> Result:
    check_model(body.model, services)
    translation = translate(body, _thinking_model(services))
    try:
        return await work(translation)
    except (ApiError, RequestError) as error:
        raise translation.told(as_api_error(error)) from error


async def _begin(
    body: MessagesRequest, request: Request, services: Services, translation: Translation
) -> MessageWriter:
    tell_ignored(request, *translation.ignored)
    answer, prompt = await begin_chat(
        translation.chat,
        request,
        services,
        prefix="msg_",
        kind="message",
        fits_context=True,
        own=translation.names().own,
    )
    thinking = body.thinking
    return MessageWriter(
        answer,
        is_cut=body.max_tokens > engine_info(services).max_model_len - len(prompt),
        shows_thinking=thinking is None or thinking.type != "disabled",
        omits_thinking=thinking is not None and thinking.display == "omitted",
    )


async def _count(request: Request, services: Services, translation: Translation) -> MessagesCount:
    chat.check(translation.chat)
    ignored: list[str] = []
    prompt = await chat_prompt(conversation_for(translation.chat, services), services, ignored)
    tell_ignored(request, *translation.ignored, *map(translation.names().own, ignored))
    ids = await services.tokenizer.pool.run([prompt.text], partial(services.tokenizer.encode_chat, prompt))
    return MessagesCount(len(ids))


def _thinking_model(services: Services) -> ThinkingModel:
    form = services.output_format
    end = None if form.is_harmony else form.thinking_end
    is_bounded = end is not None and services.tokenizer.token_id(end) is not None
    return ThinkingModel(services.template_source, is_bounded, form.thinking_end is not None)
