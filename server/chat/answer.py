"""The answer to a chat before its generation starts, the same for every API that has chats."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from headway.engine import DRAFTER_TRAITS
from headway.server.base.continuation import continuation_of
from headway.server.chat.grammar import chat_grammar, relaxed_thinking, thinking_budget
from headway.server.chat.output import callable_tools, output_options
from headway.server.chat.prompt import chat_prompt, conversation_for
from headway.server.generation.engine_requests import (
    RequestOptions,
    choice_requests,
    encode_bad_words,
    encode_prediction,
)
from headway.server.http.keys import credentials
from headway.server.protocol.chat import ChatRequest, check, hidden_media, predicted_text
from headway.server.requests.access import record_of
from headway.server.requests.answer import Answer, new_answer, new_header
from headway.server.requests.body import tell_ignored, tell_ignored_effort
from headway.server.requests.services import Services, check_model, engine_info
from headway.server.text.prompt import encode_chat


async def begin_chat(
    body: ChatRequest,
    request: Request,
    services: Services,
    *,
    prefix: str,
    kind: str,
    fits_context: bool = False,
    own: Callable[[str], str] = str,
    tells_loss: bool = False,
) -> tuple[Answer, list[int]]:
    """Returns the answer, whose generation has not started, and the prompt's token ids.

    prefix, kind: the prefix of the answer's id, and the name of its kind of object, as OpenAI has them.
    fits_context: see RequestOptions. own: returns the request's path for a path in the chat. tells_loss: the
    answer has a system_fingerprint, which says if it is LOSSY; only such answers may be. Raises ApiError and
    RequestError for whatever this server cannot serve, with the names of the chat's fields.
    """
    check_model(body.model, services)
    record = record_of(request)
    record.model = body.model or services.model_name
    services.keys.check_priority(body.priority, credentials(request.headers))
    check(body)
    tell_ignored_effort(request, body.reasoning_effort, own("reasoning_effort"))
    conversation = conversation_for(body, services)
    ignored = hidden_media(body.messages)
    chat = await chat_prompt(conversation, services, ignored)
    output = output_options(
        body, chat, services.output_format, services.tokenizer, ignores_tools=services.chat_note is not None
    )
    if callable_tools(body) and (output is None or output.tools is None):
        ignored.append("tools")
    info = engine_info(services)
    if body.prediction is not None and not DRAFTER_TRAITS[info.drafter].searches_predictions:
        ignored.append("prediction")
    prompt = await encode_chat(
        chat,
        services.tokenizer,
        info,
        keep_last=body.truncate_prompt_tokens,
        num_wanted=body.token_limit,
    )
    grammar = await chat_grammar(body, output, services, ignored)
    tell_ignored(request, *map(own, ignored))
    wanted = RequestOptions(
        num_candidates=body.n or 1,
        max_tokens=body.token_limit,
        limit_name=body.token_limit_name,
        fits_context=fits_context,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        owner=services.keys.owner(credentials(request.headers)),
        prediction=await encode_prediction(predicted_text(body), services.tokenizer),
        bad_words=await encode_bad_words(body, services.tokenizer),
        grammar=grammar,
        end_strings=services.chat_stop_strings if grammar is None else (),
        output=output,
        thinking_budget=thinking_budget(body, output, services.output_format, services.tokenizer),
        relaxed_thinking=relaxed_thinking(body, output, info) if tells_loss else None,
        continuation=continuation_of(request),
    )
    requests = choice_requests(body, wanted, [prompt], services.tokenizer, info)
    head = new_header(prefix, kind, services, request)
    answer = new_answer(head, body, requests, len(prompt), services, request)
    record.answer = answer
    return answer, prompt
