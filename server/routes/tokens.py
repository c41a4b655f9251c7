"""POST /tokenize and /detokenize: text or messages to token ids, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.server.body import read_body
from headway.server.errors import ApiError
from headway.server.logprobs import token_name
from headway.server.prompt import check_ids
from headway.server.protocol.decoding import decode
from headway.server.protocol.tokens import DetokenizeRequest, Text, TokenizeRequest, Tokens
from headway.server.routes.chat import chat_prompt
from headway.server.routes.models import check_model
from headway.server.services import Services, engine_info, services_of
from headway.server.tokenizer import Tokenizer

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The ids that a completion or a chat would start from, however many."""
    services = services_of(request)
    body = decode(await read_body(request), TokenizeRequest)
    check_model(body.model, services)
    encode = await _encoder(body, services)
    max_model_len = engine_info(services).max_model_len
    return _json(await asyncio.to_thread(_tokens, encode, services.tokenizer, max_model_len))


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    services = services_of(request)
    body = decode(await read_body(request), DetokenizeRequest)
    check_model(body.model, services)
    check_ids("tokens", body.tokens, engine_info(services).vocab_size)
    tokenizer = services.tokenizer
    vocabulary = tokenizer.vocabulary if body.skip_special_tokens else tokenizer.full_vocabulary
    return _json(Text(await asyncio.to_thread(vocabulary.decode, body.tokens)))


async def _encoder(body: TokenizeRequest, services: Services) -> Callable[[], list[int]]:
    """What makes the ids; it blocks."""
    tokenizer = services.tokenizer
    if body.messages is not None and body.prompt is None:
        return partial(tokenizer.encode_chat, await chat_prompt(body.messages, services))
    if body.prompt is not None and body.messages is None:
        is_plain = body.add_special_tokens is False
        return partial(tokenizer.encode_plain if is_plain else tokenizer.encode, body.prompt)
    message = "exactly one of prompt and messages is needed"
    raise ApiError(message, param="prompt", code="invalid_value")


def _tokens(encode: Callable[[], list[int]], tokenizer: Tokenizer, max_model_len: int) -> Tokens:
    ids = encode()
    names = [token_name(token_id, tokenizer.full_vocabulary) for token_id in ids]
    return Tokens(len(ids), max_model_len, ids, names)


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
