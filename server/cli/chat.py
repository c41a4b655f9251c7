"""`headway chat`: a chat in the terminal with a running server, of Headway or another with OpenAI's API."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import msgspec

from headway.engine import ConfigError, HeadwayError
from headway.server.base.config import ChatConfig
from headway.server.cli.console import show

CONNECT_SECONDS, SILENCE_SECONDS = 10.0, 600.0
COMPLETIONS = "/v1/chat/completions"
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
PROMPT, RESET = "> ", "/reset"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# Control characters are removed, so that no text moves the cursor or changes the terminal.
CONTROLS = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t")


class ChatError(HeadwayError):
    """The server cannot be reached, refuses the conversation, or ends an answer early."""


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    delta: Delta
    finish_reason: str | None = None


class Told(msgspec.Struct):
    message: str


class Event(msgspec.Struct):
    """An event of a stream, or the body of an answer that is an error."""

    choices: list[Choice] = []
    error: Told | None = None


class Model(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    data: list[Model]


@dataclass
class Chat:
    """A conversation with a server. Mutable: holds the messages so far; a reset leaves the system prompt."""

    config: ChatConfig
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        system = self.config.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> None:
        """Shows the answer as it arrives; Ctrl-C ends it. What has arrived stays in the conversation; a
        message without an answer does not. Raises ChatError."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            with closing(self._choices()) as choices:
                for choice in choices:
                    answer += choice.delta.content or ""
                    _show_choice(choice)
        except KeyboardInterrupt:
            pass
        finally:
            show("\n")
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _choices(self) -> Generator[Choice]:
        """Yields the choices of the answer's stream. Each answer has a connection of its own, so that one
        which an interrupt closed is never used again."""
        given = {name: getattr(self.config, name) for name in SAMPLING}
        body = {"model": self.model, "messages": self.messages, "stream": True}
        body |= {name: value for name, value in given.items() if value is not None}
        with _client(self.config) as client, client.stream("POST", COMPLETIONS, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(_reason(response))
            yield from _read(response.iter_lines())


def chat(config: ChatConfig, model: str | None) -> int:
    """Reads messages from the terminal, or one message a line from elsewhere; returns the exit status.

    model: None for the first model of the server. Raises ChatError; on a terminal only if the server cannot
    be reached at first.
    """
    conversation = Chat(config, model or _served_model(config))
    conversation.reset()
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):  # some builds of Python lack it
            importlib.import_module("readline")
        show(
            f"{conversation.model} at {config.url}\n{RESET} begins anew, Ctrl-C stops an answer, Ctrl-D ends.\n\n"
        )
    for text in _typed() if is_terminal else _lines():
        if text.strip() == RESET:
            conversation.reset()
        elif text.strip():
            try:
                conversation.ask(text)
            except ChatError as error:
                if not is_terminal:
                    raise
                print(f"headway: {error}", file=sys.stderr)
            show("\n")
    return 0


def _typed() -> Iterator[str]:
    while True:
        try:
            text = input(PROMPT)
            text.encode()
            yield text
        except EOFError:
            show("\n")
            return
        except KeyboardInterrupt:
            show("\n(Ctrl-D ends)\n")
        except UnicodeError:
            print("headway: the message has bytes that are not UTF-8", file=sys.stderr)


def _lines() -> Iterator[str]:
    """Yields the lines of stdin, and shows them, so that the output reads as a conversation."""
    try:
        for line in sys.stdin:
            line.encode()
            text = line.rstrip("\n")
            if text.strip():
                show(f"{PROMPT}{text}\n")
            yield text
    except UnicodeError:
        raise ConfigError(
            "the messages have bytes that are not UTF-8; convert them, such as with iconv"
        ) from None


def _show_choice(choice: Choice) -> None:
    if choice.delta.reasoning_content:
        thought = choice.delta.reasoning_content.translate(CONTROLS)
        show(f"{DIM}{thought}{PLAIN}" if sys.stdout.isatty() else thought)
    show((choice.delta.content or "").translate(CONTROLS))
    if choice.finish_reason == "length":
        show(" [cut: the limit of tokens is reached]")


def _read(lines: Iterator[str]) -> Iterator[Choice]:
    """Yields the choices of a stream of events. Raises ChatError if the stream ends early."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if line.startswith("data:"):
            event = msgspec.json.decode(data, type=Event)
            if event.error is not None:
                raise ChatError(event.error.message)
            yield from event.choices
    raise ChatError("the answer ended early; the server's log may say why")


def _served_model(config: ChatConfig) -> str:
    with _client(config) as client:
        response = client.get("/v1/models")
        if response.status_code != 200:
            raise ChatError(_reason(response))
        models = msgspec.json.decode(response.content, type=Models).data
    if not models:
        raise ChatError(f"the server at {config.url} serves no model")
    return models[0].id


def _reason(response: httpx.Response) -> str:
    """Returns the server's own words, if there are any."""
    try:
        error = msgspec.json.decode(response.content, type=Event).error
    except msgspec.DecodeError:
        error = None
    told = f"status {response.status_code}" if error is None else error.message
    return f"{told} (set HEADWAY_API_KEY)" if response.status_code == 401 else told


@contextmanager
def _client(config: ChatConfig) -> Iterator[httpx.Client]:
    """Opens a client. Raises ChatError if the connection fails, and for a server that does not speak the
    API."""
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
    try:
        with httpx.Client(base_url=config.url, headers=headers, timeout=timeout) as client:
            yield client
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ChatError(
            f"no server answers at {config.url} ({error}); start one with make chat or headway serve, or name another with --url"
        ) from None
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise ChatError(f"the connection to {config.url} failed: {error or type(error).__name__}") from None
    except msgspec.DecodeError as error:
        raise ChatError(f"{config.url} does not speak OpenAI's API: {error}") from None
