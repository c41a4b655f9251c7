"""Messages to the text of a prompt, by the chat template in the model's files.

The template runs in a process of its own (template_worker.py), one job at a time, bounded in time, memory
and size.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.engine import read_text
from headway.server.control_text import ROLE, ChatPrompt
from headway.server.errors import RETRY_AFTER, ApiError
from headway.server.model_defaults import read_tokenizer_config, token_content
from headway.server.template_frames import LENGTH, MarkedMessages, Rendered, RenderJob, frame

WORKER_COMMAND = (sys.executable, "-P", "-m", "headway.server.template_worker")
# Its libraries start no thread pools: what they reserve would count as memory in use.
WORKER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
START_SECONDS = 60.0
RENDER_SECONDS = 5.0
MAX_RENDERED_BYTES = 32 * 2**20

logger = logging.getLogger("headway.server")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The source of a template, and the special tokens that it may name."""

    source: str
    variables: dict[str, str]


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """chat_template.jinja, else tokenizer_config.json; None if the model has none. Raises ModelError."""
    config = read_tokenizer_config(folder)
    source = read_text(folder / "chat_template.jinja")
    if source is None:
        source = _default(config.get("chat_template"))
    if source is None:
        return None
    tokens = {name: token_content(token) for name, token in config.items() if name.endswith("_token")}
    return ChatTemplate(source, {name: token for name, token in tokens.items() if token is not None})


def _default(template: object) -> str | None:
    """A string, or a list of named ones of which `default` is for plain chat."""
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


class ChatRenderer:
    """Mutable: owns the worker process, which it starts when needed and kills when a template overdoes it."""

    def __init__(self, template: ChatTemplate, *, render_seconds: float = RENDER_SECONDS) -> None:
        self._template = template
        self._render_seconds = render_seconds
        self._worker: Process | None = None
        self._turn = asyncio.Lock()

    async def render(self, messages: list[dict[str, str]]) -> str:
        """Raises ApiError: the template refused the messages, failed, took too long or wrote too much."""
        return _text(await self._answer(messages, None))

    async def render_marked(self, messages: list[dict[str, str]], marked: MarkedMessages) -> ChatPrompt:
        """The text of the messages with marks where clients spelled structural tokens.

        Raises ApiError as `render` does, and where the template inspects such a token, so that its origin is unknown.
        """
        answer = await self._answer(messages, marked)
        if answer.inspected is not None:
            raise _inspected(messages, marked, answer.inspected)
        return ChatPrompt(_text(answer), marked.mark, marked.spelled)

    async def _answer(self, messages: list[dict[str, str]], marked: MarkedMessages | None) -> Rendered:
        async with self._turn:
            return await self._ask(messages, marked)

    async def warm_up(self) -> None:
        """Starts the worker before the first request needs it, and warns of a template that cannot be compiled.

        Whatever else fails over no messages may work with some.
        """
        with suppress(ApiError):
            answer = await self._answer([], None)
            if answer.error is not None and answer.error.startswith("TemplateSyntaxError"):
                logger.warning(
                    "the model's chat template is not valid (%s); every chat will be refused, completions are served; "
                    "fetch chat_template.jinja or tokenizer_config.json again",
                    answer.error,
                )

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with suppress(ProcessLookupError):
                worker.kill()
            await worker.communicate()  # to the end of its pipes, which are closed with it

    async def _ask(self, messages: list[dict[str, str]], marked: MarkedMessages | None) -> Rendered:
        """Starts a new worker after an abandoned call, whose late answer would be taken for the next one's."""
        job = RenderJob(self._template.source, self._template.variables, messages, marked)
        is_answered = False
        try:
            worker = await self._ready()
            async with asyncio.timeout(self._render_seconds):
                answer = await _exchange(worker, job)
            is_answered = True
            return answer
        except TimeoutError:
            limit = f"the limit is {self._render_seconds:g} s; send less"
            raise _refusal(f"takes too long over these messages, {limit}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _refusal("ended its process over these messages; send less") from None
        finally:
            if not is_answered:
                await self.close()

    async def _ready(self) -> Process:
        """A worker that does not come up is no fault of the messages."""
        try:
            return await self._started()
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise ApiError(
                f"the process that renders chat templates does not start ({type(error).__name__}); try again",
                status=503,
                code="chat_template_unavailable",
                headers=RETRY_AFTER,
            ) from error

    async def _started(self) -> Process:
        """A worker that has its libraries loaded: that time is not the template's."""
        if self._worker is not None and self._worker.returncode is None:
            return self._worker
        self._worker = worker = await asyncio.create_subprocess_exec(
            *WORKER_COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=os.environ | WORKER_ENVIRONMENT
        )
        async with asyncio.timeout(START_SECONDS):
            await _exchange(worker, RenderJob("", {}, []))
        return worker


async def _exchange(worker: Process, job: RenderJob) -> Rendered:
    assert worker.stdin is not None, "the worker is started with pipes"
    assert worker.stdout is not None, "the worker is started with pipes"
    worker.stdin.write(frame(job))
    await worker.stdin.drain()
    (length,) = LENGTH.unpack(await worker.stdout.readexactly(LENGTH.size))
    if length > MAX_RENDERED_BYTES:
        raise _refusal(f"makes a prompt of {length} bytes, the limit is {MAX_RENDERED_BYTES}; send less")
    return msgspec.json.decode(await worker.stdout.readexactly(length), type=Rendered)


def _text(answer: Rendered) -> str:
    if answer.text is None:
        raise ApiError(
            f"the model's chat template does not take these messages: {answer.error}",
            param="messages",
            code="chat_template_error",
        )
    return answer.text


def _inspected(messages: list[dict[str, str]], marked: MarkedMessages, index: int) -> ApiError:
    replaced = marked.messages[index]
    field = next(name for name, text in messages[index].items() if name != ROLE and text != replaced[name])
    pieces = ChatPrompt(replaced[field], marked.mark, marked.spelled).pieces()
    token = next(text for text, is_spelled in pieces if is_spelled)
    path = f"messages[{index}].{field}"
    return ApiError(
        f"{path} has {token!r}, a structural token of this model that only its chat template may write, and the "
        "template treats messages that have it differently; leave it out or write it in another way",
        param=path,
        code="structural_token",
    )


def _refusal(what: str) -> ApiError:
    return ApiError(f"the model's chat template {what}", param="messages", code="chat_template_error")
