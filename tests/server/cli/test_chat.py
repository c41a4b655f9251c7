"""`headway chat` before a fake engine: what it sends, what it shows, and how it ends; without a terminal and
on one."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from headway_testing.daemon import headway_command
from headway_testing.fake_chat import RoleLines
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.real_server import serving

from headway.engine import Submit
from headway.server import cli
from headway.server.base.config import ServerConfig
from headway.server.cli.options import parse_url
from headway.server.http.keys import Keys
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

SECONDS = 60.0
CONTROL_C, CONTROL_D = b"\x03", b"\x04"
ANSWERS = ["I am here. é 日本語", "Yes,\u2028\tthe fox \x1b[31mis\x07 quick.", "third"]


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer) -> Services:
    """Its model gives one answer after the other and ends each with its end token."""

    def script(request: Submit) -> list[int]:
        number = len(engine.submitted) - 1
        return [*tokenizer.encode_plain(ANSWERS[number % len(ANSWERS)]), *tokenizer.stop_token_ids]

    engine.script = script
    return fake_services(engine, tokenizer, RoleLines())


def prompts(engine: FakeEngine, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(request.prompt_token_ids) for request in engine.submitted]


Run = tuple[int, str, str]


async def chat(
    text: str | bytes,
    *flags: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Returns (status, what it said, what it complained of). text: what it reads; it is no terminal."""
    content = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
    status = await asyncio.to_thread(cli.main, ["chat", *flags])
    return status, *capsys.readouterr()


async def test_a_conversation_is_read_line_by_line_and_can_be_read_as_one(
    address: str, engine: FakeEngine, tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    lines = "Are you there?\n\nIs the fox quick?\n/reset\nAnd?"
    status, out, err = await chat(lines, "--url", address, monkeypatch=monkeypatch, capsys=capsys)
    assert (status, err) == (0, "")
    assert out == (
        "> Are you there?\nI am here. é 日本語\n\n> Is the fox quick?\nYes,\u2028\tthe fox [31mis quick.\n\n> /reset\n> And?\nthird\n\n"
    )
    assert prompts(engine, tokenizer) == [
        "user: Are you there?\n",
        f"user: Are you there?\nassistant: {ANSWERS[0]}\nuser: Is the fox quick?\n",
        "user: And?\n",
    ]


async def test_flags_reach_the_request_and_the_system_prompt_stays(
    address: str, engine: FakeEngine, tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    flags = [
        "--system",
        "Rhyme.",
        "--max-tokens",
        "2",
        "--temperature",
        "0.5",
        "--top-p",
        "0.25",
        "--top-k",
        "3",
        "--min-p",
        "0.1",
        "--seed",
        "9",
        "--model",
        "tiny",
    ]
    url = f"{address}/v1/"
    status, out, err = await chat("a\n/reset\nb", *flags, "--url", url, monkeypatch=monkeypatch, capsys=capsys)  # fmt: skip
    assert (status, err) == (0, "")
    assert out.count(" [cut: the limit of tokens is reached]\n") == 2
    assert prompts(engine, tokenizer) == ["system: Rhyme.\nuser: a\n", "system: Rhyme.\nuser: b\n"]
    first = engine.submitted[0]
    sampling = first.sampling
    assert (first.max_tokens, sampling.temperature, sampling.top_p) == (2, 0.5, 0.25)
    assert (sampling.top_k, sampling.min_p) == (3, 0.1)


async def test_what_is_not_given_is_left_to_the_server(
    address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (await chat("a", "--url", address, monkeypatch=monkeypatch, capsys=capsys))[0] == 0
    assert engine.submitted[0].sampling.temperature == 1.0
    assert engine.submitted[0].max_tokens > 100


async def test_without_a_server_it_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9"
    status, out, err = await chat("a", "--url", url, monkeypatch=monkeypatch, capsys=capsys)
    assert (status, out) == (1, "")
    assert err.startswith(f"headway: no server answers at {url} (")
    assert err.endswith("start one with make chat or headway serve, or name another with --url\n")


async def test_a_refusal_is_told_in_the_words_of_the_server(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--url", address, "--model", "other")
    status, out, err = await chat("a", *flags, monkeypatch=monkeypatch, capsys=capsys)
    assert (status, out) == (1, "> a\n\n")
    assert err == "headway: The model 'other' does not exist; this server serves 'tiny'\n"


async def test_an_answer_that_ends_early_is_a_failure(
    address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.die_after = 3
    status, out, err = await chat("a", "--url", address, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 1
    assert out.startswith("> a\nI ")
    assert err == "headway: the engine ended while this request ran: a test\n"


async def test_messages_that_are_not_utf8_are_one_line_and_status_1(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = await chat(b"a\xff\n", "--url", address, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 1
    assert err.startswith("headway: the messages have bytes that are not UTF-8; ")


@pytest.mark.parametrize(("variable", "is_told"), [("secret", False), ("wrong", True), (None, True)])
async def test_the_key_comes_from_the_variable(
    services: Services, variable: str | None, is_told: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    guarded = replace(services, keys=Keys(("secret",)))
    if variable is not None:
        monkeypatch.setenv("HEADWAY_API_KEY", variable)
    async with serving(guarded, ServerConfig(port=0)) as address:
        status, _, err = await chat("a", "--url", address, monkeypatch=monkeypatch, capsys=capsys)
    assert (status == 1) == is_told
    assert ("(set HEADWAY_API_KEY)" in err) == is_told


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("https://models.example/api/v1/", "https://models.example/api"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_a_url_may_end_as_the_base_url_of_clients_does(text: str, url: str) -> None:
    assert parse_url(text) == url


@pytest.mark.parametrize("text", ["localhost:8000", "ftp://x", "http://", "http://a b", "http://a?b"])
def test_what_is_no_url_of_a_server_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", text]) == 1
    assert capsys.readouterr().err == (
        f"headway: --url is {text!r}, it must be a URL such as http://localhost:8000\n"
    )


async def test_a_reader_that_is_gone_ends_it_quietly(address: str) -> None:
    command = headway_command("chat", "--url", address)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    process.stdout._transport.close()  # type: ignore[attr-defined]
    _, err = await asyncio.wait_for(process.communicate(b"a\nb\n"), SECONDS)
    assert (process.returncode, err) == (128 + signal.SIGPIPE, b"")


class Terminal:
    """A pseudo-terminal with `headway chat` on it. Mutable: all that it has shown."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self.shown = ""
        self._master = master

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    async def wait_for(self, text: str, *, times: int = 1) -> None:
        async with asyncio.timeout(SECONDS):
            while self.shown.count(text) < times:
                await asyncio.sleep(0.01)
                with suppress(BlockingIOError):
                    self.shown += os.read(self._master, 1 << 16).decode().replace("\r\n", "\n")


@asynccontextmanager
async def terminal(address: str) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", ON_A_TERMINAL, "chat", "--url", address,
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(master)


# The terminal becomes the one whose keys are signals; a shell's jobs in the background ignore them, and so
# would this.
ON_A_TERMINAL = """
import fcntl, signal, sys, termios
from headway.server.cli import main

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


async def test_on_a_terminal_answers_follow_a_prompt_and_control_d_ends(
    address: str, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    async with terminal(address) as screen:
        await screen.wait_for("> ")
        assert f"tiny at {address}\n" in screen.shown
        screen.type("Größe?\n".encode())
        await screen.wait_for("I am here. é 日本語\n\n> ")
        screen.type(CONTROL_D)
        assert await asyncio.wait_for(screen.process.wait(), SECONDS) == 0
    assert prompts(engine, tokenizer) == ["user: Größe?\n"]


async def test_control_c_stops_the_answer_and_not_the_program(
    address: str, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode_plain("the quick")
    engine.script = lambda request: ids * 50
    engine.tokens_per_round = 1
    engine.stall_after = len(ids)
    async with terminal(address) as screen:
        await screen.wait_for("> ")
        screen.type(b"one\n")
        await screen.wait_for("the quick")
        screen.type(CONTROL_C)
        await screen.wait_for("> ", times=2)
        assert engine.aborted == [0]
        engine.stall_after = None
        engine.script = lambda request: [*ids, *tokenizer.stop_token_ids]
        screen.type(b"two\n")
        await screen.wait_for("> ", times=3)
        screen.type(CONTROL_C)
        await screen.wait_for("(Ctrl-D ends)\n> ")
        screen.type(CONTROL_D)
        assert await asyncio.wait_for(screen.process.wait(), SECONDS) == 0
    assert prompts(engine, tokenizer)[1] == "user: one\nassistant: the quick\nuser: two\n"


async def test_on_a_terminal_a_refused_message_is_told_and_taken_back(
    address: str, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.state = "restarting"
    async with terminal(address) as screen:
        await screen.wait_for("> ")
        screen.type(b"one\n")
        await screen.wait_for("headway: the engine is restarting\n")
        engine.state = "serving"
        screen.type(b"two\n")
        await screen.wait_for("I am here.")
    assert prompts(engine, tokenizer) == ["user: two\n"]
