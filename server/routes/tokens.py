"""POST /tokenize and /detokenize: text or messages to token ids, and back. GET /tokenizer_info."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.server.base.errors import ApiError
from headway.server.chat.prompt import chat_prompt, conversation_for
from headway.server.generation.logprobs import token_name
from headway.server.http.json_response import JsonResponse
from headway.server.protocol.chat import check_effort, hidden_media
from headway.server.protocol.checks import require
from headway.server.protocol.tokens import CHAT_FIELDS, DetokenizeRequest, Text, TokenizeRequest
from headway.server.protocol.tools import check_tools
from headway.server.requests.body import body_of, tell_ignored, tell_ignored_effort
from headway.server.requests.services import Services, check_model, engine_info, services_of
from headway.server.text.detokenizer import Vocabulary
from headway.server.text.prompt import check_ids

router = APIRouter()
SENT_BYTES = 1 << 16
IDS_AT_ONCE = 1 << 13


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Returns tokenizer_config.json of the model, for clients that load their tokenizer from a server."""
    return JsonResponse(services_of(request).tokenizer_info)


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Returns the token ids of the prompt of a completion or a chat, however many."""
    services = services_of(request)
    body = await body_of(request, TokenizeRequest)
    check_model(body.model, services)
    ignored: list[str] = []
    text, encode = await _encoder(body, services, ignored)
    tell_ignored(request, *ignored)
    tell_ignored_effort(request, body.reasoning_effort, "reasoning_effort")
    names = None if body.return_token_strs is False else services.tokenizer.full_vocabulary
    work = partial(_tokens, encode, names, engine_info(services).max_model_len)
    return TokensResponse(await services.tokenizer.pool.run([text], work))


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    services = services_of(request)
    body = await body_of(request, DetokenizeRequest)
    check_model(body.model, services)
    tokenizer = services.tokenizer
    vocabulary = tokenizer.vocabulary if body.skip_special_tokens else tokenizer.full_vocabulary
    work = partial(_text, body.tokens, vocabulary, engine_info(services).vocab_size)
    return JsonResponse(Text(await tokenizer.pool.run_of(len(body.tokens), 8 * len(body.tokens), work)))


def _text(token_ids: list[int], vocabulary: Vocabulary, vocab_size: int) -> str:
    check_ids("tokens", token_ids, vocab_size)
    return vocabulary.decode(token_ids)


async def _encoder(
    body: TokenizeRequest, services: Services, ignored: list[str]
) -> tuple[str, Callable[[], Iterable[list[int]]]]:
    """Returns the text, and a function that returns its ids piece by piece and blocks. ignored: receives
    the paths of what the model is not shown."""
    tokenizer = services.tokenizer
    if body.messages is not None and body.prompt is None:
        check_tools(body.tools, None)
        check_effort(body.reasoning_effort)
        conversation = conversation_for(body, services)
        ignored += hidden_media(body.messages)
        chat = await chat_prompt(conversation, services, ignored)
        return chat.text, lambda: [tokenizer.encode_chat(chat)]
    if body.prompt is not None and body.messages is None:
        prompt = body.prompt
        given = [name for name in CHAT_FIELDS if getattr(body, name)]
        if body.add_generation_prompt is False:
            given.append("add_generation_prompt")
        for name in given:
            limit = "left out beside a prompt: it is a field of messages"
            require(False, name, "given", limit)
        if body.add_special_tokens is False:
            return prompt, lambda: (piece.token_ids for piece in tokenizer.pieces(prompt))
        return prompt, partial(tokenizer.encode_in_pieces, prompt)
    message = "exactly one of prompt and messages is needed"
    raise ApiError(message, param="prompt", code="invalid_value")


class TokensResponse(Response):
    """Sends JSON that comes in pieces, SENT_BYTES at a time, so that no call holds the interpreter for long.

    Starlette's StreamingResponse would import a part of anyio at its first use, which holds the event loop
    for 80 ms. Mutable as its base: its headers.
    """

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes | bytearray]) -> None:
        super().__init__(headers={"Content-Length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            for start in range(0, len(piece), SENT_BYTES):
                part = bytes(piece[start : start + SENT_BYTES])
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _tokens(
    encode: Callable[[], Iterable[list[int]]], names: Vocabulary | None, max_model_len: int
) -> list[bytes | bytearray]:
    """Returns a `Tokens` as JSON in pieces, written without a list of all tokens."""
    count = 0
    ids, strings = bytearray(), bytearray()
    for piece in _short(encode()):
        comma = b"," if count else b""
        count += len(piece)
        ids += comma + msgspec.json.encode(piece)[1:-1]
        if names is not None:
            strings += comma + msgspec.json.encode([token_name(token_id, names) for token_id in piece])[1:-1]
    head = b'{"count":%d,"max_model_len":%d,"tokens":[' % (count, max_model_len)
    if names is None:
        return [head, ids, b'],"token_strs":null}']
    return [head, ids, b'],"token_strs":[', strings, b"]}"]


def _short(pieces: Iterable[list[int]]) -> Iterator[list[int]]:
    for piece in pieces:
        for start in range(0, len(piece), IDS_AT_ONCE):
            yield piece[start : start + IDS_AT_ONCE]
