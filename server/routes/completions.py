"""POST /v1/completions: text in, text out, at once or as a stream of server-sent events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.engine import EngineDeadError, EngineInfo
from headway.server.body import read_body
from headway.server.generation import Generation
from headway.server.prompt import EncodedPrompt, choice_requests, encode_prompts
from headway.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    CompletionTokensDetails,
    Usage,
    check,
    decode,
)
from headway.server.routes.models import check_model
from headway.server.services import Services, services_of
from headway.server.sse import DONE, EventStreamResponse, unless_disconnected
from headway.server.tokenizer import Tokenizer

router = APIRouter()
OBJECT = "text_completion"


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that runs, with what its answer repeats. echoes: by choice, the text put in front."""

    id: str
    created: int
    model: str
    generation: Generation
    num_prompt_tokens: int
    echoes: tuple[str, ...]
    includes_usage: bool

    def usage(self) -> Usage:
        counts = self.generation.counts()
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=counts.num_completion_tokens,
            total_tokens=self.num_prompt_tokens + counts.num_completion_tokens,
            completion_tokens_details=CompletionTokensDetails(counts.num_accepted, counts.num_rejected),
        )


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    services = services_of(request)
    body = decode(await read_body(request), CompletionRequest)
    check_model(body.model, services)
    check(body)
    answer = await _answer(body, services)
    if body.stream:
        return EventStreamResponse(_events(answer))
    completion = await unless_disconnected(request.receive, _complete(answer))
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def _answer(body: CompletionRequest, services: Services) -> Answer:
    info = _engine_info(services)
    prompts = await encode_prompts(body.prompt, services.tokenizer, info)
    requests = choice_requests(body, prompts, services.tokenizer, info)
    n = body.n or 1
    return Answer(
        id=f"cmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=services.model_name,
        generation=Generation(
            services.engine, services.tokenizer.vocabulary, requests, metrics=services.metrics
        ),
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        echoes=tuple(_echo(p, services.tokenizer) if body.echo else "" for p in prompts for _ in range(n)),
        includes_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _engine_info(services: Services) -> EngineInfo:
    info = services.engine.info
    if info is None:
        raise EngineDeadError("the model is still loading; /health tells how far it is")
    return info


def _echo(prompt: EncodedPrompt, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text


async def _complete(answer: Answer) -> Completion:
    texts = [[echo] for echo in answer.echoes]
    reasons: list[str | None] = [None] * len(texts)
    async with aclosing(answer.generation.deltas()) as deltas:
        async for delta in deltas:
            texts[delta.index].append(delta.text)
            reasons[delta.index] = delta.finish_reason
    choices = [
        CompletionChoice("".join(parts), index, None, reason)
        for index, (parts, reason) in enumerate(zip(texts, reasons, strict=True))
    ]
    return Completion(answer.id, OBJECT, answer.created, answer.model, choices, answer.usage())


async def _events(answer: Answer) -> AsyncGenerator[bytes, None]:
    """The `data:` lines. Only text, index and finish_reason differ between chunks: a template is filled."""
    head = _json({"id": answer.id, "object": OBJECT, "created": answer.created, "model": answer.model})[:-1]
    tail = b'}],"usage":null}\n\n' if answer.includes_usage else b"}]}\n\n"
    template = b'data: %s,"choices":[{"index":%%d,"text":%%s,"logprobs":null,"finish_reason":%%s%s'
    chunk = template % (head.replace(b"%", b"%%"), tail)
    async with aclosing(answer.generation.deltas()) as deltas:
        started: set[int] = set()
        async for delta in deltas:
            text = delta.text if delta.index in started else answer.echoes[delta.index] + delta.text
            started.add(delta.index)
            yield chunk % (delta.index, _json(text), _json(delta.finish_reason))
    if answer.includes_usage:
        yield b'data: %s,"choices":[],"usage":%s}\n\n' % (head, _json(answer.usage()))
    yield DONE


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
