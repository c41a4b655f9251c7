"""POST /v1/completions: text in, text out, at once or as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headway.server.base.continuation import continuation_of
from headway.server.base.errors import ApiError
from headway.server.generation.choice import Delta
from headway.server.generation.engine_requests import (
    MAX_CHOICES,
    RequestOptions,
    choice_requests,
    encode_bad_words,
)
from headway.server.generation.logprobs import completion_logprobs, prompt_tokens
from headway.server.grammar.grammars import grammar_of
from headway.server.http.json_response import JsonResponse
from headway.server.http.keys import credentials
from headway.server.http.sse import unless_disconnected
from headway.server.protocol.checks import check_count
from headway.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Prompt,
    check,
)
from headway.server.requests.access import record_of
from headway.server.requests.answer import (
    Answer,
    chunk_events,
    collect,
    draft_positions,
    event_stream,
    new_answer,
    new_header,
)
from headway.server.requests.body import body_of, tell_ignored
from headway.server.requests.services import Services, check_model, engine_info, services_of
from headway.server.text.fim import FAMILIES
from headway.server.text.prompt import EncodedPrompt, PromptOptions, encode_prompts
from headway.server.text.tokenizer import Tokenizer

router = APIRouter()
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    services = services_of(request)
    body = await body_of(request, CompletionRequest)
    check_model(body.model, services)
    record = record_of(request)
    record.model = body.model or services.model_name
    services.keys.check_priority(body.priority, credentials(request.headers))
    check(body)
    writer = await _writer(body, services, request)
    record.answer = writer.answer
    if body.stream:
        return event_stream(writer.answer, chunk_events(writer.answer, writer.chunk_choices))
    return JsonResponse(await unless_disconnected(request.receive, _complete(writer)))


async def _writer(body: CompletionRequest, services: Services, request: Request) -> CompletionWriter:
    info = engine_info(services)
    tokenizer = services.tokenizer
    options = PromptOptions(
        keep_last=body.truncate_prompt_tokens,
        num_wanted=body.max_tokens,
        adds_special=body.add_special_tokens is not False,
        wants_starts=bool(body.echo) and body.logprobs is not None,
        suffix=body.suffix or None,
    )
    if options.suffix is not None:
        _check_gaps(body.prompt, services)
    prompts = await encode_prompts(body.prompt, tokenizer, info, options)
    ids = [prompt.token_ids for prompt in prompts]
    ignored: list[str] = []
    ranks = body.num_candidates > (body.n or 1)
    fim = tokenizer.fim if body.suffix else None
    wanted = RequestOptions(
        num_candidates=body.num_candidates,
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=0 if ranks and body.logprobs is None else body.logprobs,
        scores_prompt=bool(body.echo) and body.logprobs is not None,
        owner=services.keys.owner(credentials(request.headers)),
        bad_words=await encode_bad_words(body, tokenizer),
        grammar=await grammar_of(body, services.grammars, info, ignored),
        end_token_ids=() if fim is None else fim.end_ids,
        continuation=continuation_of(request),
    )
    tell_ignored(request, *ignored)
    requests = choice_requests(body, wanted, ids, tokenizer, info)
    head = new_header("cmpl-", "text_completion", services, request)
    answer = new_answer(head, body, requests, sum(map(len, ids)), services, request)
    return CompletionWriter(body, answer, tuple(prompts), tokenizer)


def _check_gaps(prompt: Prompt, services: Services) -> None:
    """Refuses a suffix for a model that cannot fill gaps, and too many prompts, before the suffix is added
    to each."""
    if services.tokenizer.fim is None:
        raise ApiError(
            f"suffix is not served with the model '{services.model_name}': its tokenizer has none of the "
            f"fill-in-the-middle tokens that are known here (those of {', '.join(FAMILIES)}); leave it out, or write "
            "the model's own form into the prompt",
            param="suffix",
            code="unsupported_parameter",
        )
    if not isinstance(prompt, str) and prompt and not isinstance(prompt[0], int):
        check_count("prompt", prompt, MAX_CHOICES, "prompts beside a suffix")


async def _complete(writer: CompletionWriter) -> Completion:
    choices = best(await collect(writer.answer), writer.body)
    return Completion(
        **msgspec.structs.asdict(writer.answer.head),
        choices=[writer.choice(delta, index) for index, delta in enumerate(choices)],
        usage=writer.answer.usage(),
        speculation=writer.answer.report(),
    )


def best(choices: Sequence[Delta], body: CompletionRequest) -> list[Delta]:
    """Returns the n candidates of each prompt with the highest log-probability a token, best first."""
    n, num_candidates = body.n or 1, body.num_candidates
    if n == num_candidates:
        return list(choices)
    prompts = [choices[i : i + num_candidates] for i in range(0, len(choices), num_candidates)]
    return [choice for group in prompts for choice in sorted(group, key=_mean_logprob, reverse=True)[:n]]


def _mean_logprob(choice: Delta) -> float:
    """Returns the mean over all tokens of a choice, including the one that ended the text."""
    return sum(token.logprob or 0.0 for token in choice.tokens) / max(1, len(choice.tokens))


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Writes deltas as entries of `choices`."""

    body: CompletionRequest
    answer: Answer
    prompts: tuple[EncodedPrompt, ...]
    tokenizer: Tokenizer

    def chunk_choices(self, delta: Delta, is_first: bool) -> list[CompletionChoice]:
        if is_first:
            return [self.choice(delta, delta.index)]
        return [self._choice(delta, delta.text, self._logprobs(delta, self._echo(delta)))]

    def choice(self, delta: Delta, index: int) -> CompletionChoice:
        """Returns the beginning of a choice, or all of it, with the prompt if `echo` is set.

        index: its place in the answer; the delta's own index counts all candidates.
        """
        prompt = self._prompt(delta)
        echo = self._echo(delta)
        logprobs = self._logprobs(delta, echo)
        if logprobs is not None and self.body.echo:
            scores = self.answer.generation.prompt_logprobs(delta.index)
            prompt_part = prompt_tokens(prompt, scores, self.tokenizer)
            logprobs = _followed(completion_logprobs(prompt_part, self.tokenizer.full_vocabulary), logprobs)
        choice = self._choice(delta, echo + delta.text, logprobs)
        choice.index = index
        if self.body.return_token_ids:
            choice.prompt_token_ids = prompt.token_ids
        return choice

    def _choice(self, delta: Delta, text: str, logprobs: CompletionLogprobs | None) -> CompletionChoice:
        token_ids = [token.token_id for token in delta.tokens] if self.body.return_token_ids else UNSET
        choice = CompletionChoice(delta.index, text, logprobs, delta.finish_reason, token_ids)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        choice.speculation = draft_positions(self.body, delta, offset=len(self._echo(delta)))
        return choice

    def _prompt(self, delta: Delta) -> EncodedPrompt:
        return self.prompts[delta.index // self.body.num_candidates]

    def _echo(self, delta: Delta) -> str:
        if not self.body.echo:
            return ""
        prompt = self._prompt(delta)
        return self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _logprobs(self, delta: Delta, echo: str) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        return completion_logprobs(delta.tokens, self.tokenizer.full_vocabulary, offset=len(echo))


def _followed(first: CompletionLogprobs, rest: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + rest.tokens,
        first.token_logprobs + rest.token_logprobs,
        first.top_logprobs + rest.top_logprobs,
        first.text_offset + rest.text_offset,
    )
