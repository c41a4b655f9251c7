"""Chat templates: where they are found, and how the process that renders them is bounded."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from pathlib import Path

import pytest
from headway_testing import tiny_tokenizers
from headway_testing.in_process_chat import text_of
from headway_testing.tiny_tokenizers import CHAT_TEMPLATE, END_OF_TEXT

from headway.engine import ModelError
from headway.server.base import worker_pool
from headway.server.base.conversation import Conversation
from headway.server.base.errors import ApiError
from headway.server.formats import find_format
from headway.server.text.chat_template import ChatRenderer, ChatTemplate, load_chat_template

HELLO = Conversation([{"role": "user", "content": "hello"}])
Make = Callable[..., ChatRenderer]


@pytest.fixture
async def renderer_of() -> AsyncIterator[Make]:
    made: list[ChatRenderer] = []

    def make(source: str, seconds: float = 10.0) -> ChatRenderer:
        made.append(ChatRenderer(ChatTemplate(source, {"eos_token": "<end>"}), render_seconds=seconds))
        return made[-1]

    yield make
    for renderer in made:
        await renderer.close()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "plain"), ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}], "y"),
        ([{"name": "tool_use", "template": "x"}], None), (None, None), (7, None),
    ],
    ids=["string", "list", "list-without-default", "none", "number"],
)  # fmt: skip
def test_a_template_is_a_string_or_the_default_of_a_list(
    tmp_path: Path, template: object, expected: str | None
) -> None:
    found = load_chat_template(tiny_tokenizers.save_with_template(tmp_path, template))
    assert (found.source if found else None) == expected


def test_a_jinja_file_comes_first_and_special_tokens_are_variables(tmp_path: Path) -> None:
    folder = tiny_tokenizers.save_with_template(tmp_path, "from the config")
    (folder / "chat_template.jinja").write_text("from the file: ü")
    tokens = {
        "eos_token": {"content": "</s>"},
        "bos_token": None,
        "pad_token": "<pad>",
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    variables = {"eos_token": "</s>", "pad_token": "<pad>"}
    assert load_chat_template(folder) == ChatTemplate("from the file: ü", variables)


def test_a_template_for_conversations_with_tools_is_found_beside_the_default(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = tiny_tokenizers.save_with_template(tmp_path, named)
    with_tools = Conversation([], tools=[{"type": "function"}])
    for expected in ("with tools", "of the file", "from the file"):
        template = load_chat_template(folder)
        assert template is not None
        assert (template.source_for(HELLO), template.source_for(with_tools)) == ("plain", expected)
        (folder / "chat_template.jinja").write_text("plain")
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        text = {"with tools": "of the file", "of the file": "from the file"}.get(expected, "")
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(text)


def test_a_named_template_may_have_strings_that_end_an_answer_and_a_note(tmp_path: Path) -> None:
    entry = {
        "name": "default",
        "template": "x",
        "stop_strings": ["\n\n", "", 7, "END"],
        "note": "is a model of text",
    }
    found = load_chat_template(tiny_tokenizers.save_with_template(tmp_path, [entry]))
    variables = {"eos_token": END_OF_TEXT}
    assert found == ChatTemplate("x", variables, None, ("\n\n", "END"), "is a model of text")


def test_the_embedded_model_has_a_template_of_comments() -> None:
    template = load_chat_template(Path(str(files("headway.engine.demo"))))
    assert template is not None
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Do\n\n    this "},
        {"role": "assistant", "content": "x = 1"},
        {"role": "user", "content": "more"},
    ]
    text = text_of(template.source, Conversation(messages))
    assert text.startswith("# Be brief.\n\n# Add two numbers.\n\ndef add_numbers(a, b):\n")
    assert text.endswith("\n\n\n# Do\n#\n#     this\n\nx = 1\n\n\n# more\n\n")
    assert ast.parse(text)
    assert (template.stop_strings, "not trained to chat" in (template.note or "")) == (("\n\n\n",), True)
    assert find_format(template.source).name == find_format(None).name


def test_a_file_that_the_operator_names_takes_the_place_of_the_models_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = tiny_tokenizers.save_with_template(tmp_path / "model", named)
    (tmp_path / "own.jinja").write_text("own")
    assert load_chat_template(folder, tmp_path / "own.jinja") == ChatTemplate(
        "own", {"eos_token": END_OF_TEXT}
    )


def test_a_template_that_is_not_text_is_an_error_of_the_model(tmp_path: Path) -> None:
    (tiny_tokenizers.save_with_template(tmp_path) / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not UTF-8"):
        load_chat_template(tmp_path)


async def test_messages_become_text_in_order_also_many_at_once(renderer_of: Make) -> None:
    renderer = renderer_of(CHAT_TEMPLATE)
    chats = [
        Conversation([{"role": "system", "content": "be brief"}, {"role": "user", "content": f"日本 {i}"}])
        for i in range(9)
    ]
    texts = await asyncio.gather(*map(renderer.render, chats))
    assert texts == [f"system: be brief<end>\nuser: 日本 {i}<end>\nassistant: " for i in range(9)]


BAD = [
    (CHAT_TEMPLATE, "the first message must not be"), ("{{ messages[0].nothing.more }}", "UndefinedError"),
    ("{% for %}", "TemplateSyntaxError"), ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ("{{ range(1000000000) }}", "Range too big"), ("{{ 'x' * 8000000000 }}", "MemoryError"),
    ("{{ 'x' * 40000000 }}", "bytes, the limit is 33554432"),
]  # fmt: skip


async def test_a_template_that_fails_is_refused_with_its_reason_and_the_next_one_works(
    renderer_of: Make,
) -> None:
    """All in one process, which is not to be harmed by any."""
    renderer = renderer_of("")
    for source, reason in BAD:
        renderer._template = ChatTemplate(source, {"eos_token": "<end>"})
        with pytest.raises(ApiError, match=reason) as refused:
            await renderer.render(Conversation([{"role": "assistant", "content": "hi"}]))
        assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("source", "is_warned_of"),
    [
        ("{% for m in messages %}", True), ("{{ messages[0].content.x }}", False),
        pytest.param("{{ messages", True, marks=pytest.mark.long), pytest.param("x", False, marks=pytest.mark.long),
    ],
)  # fmt: skip
async def test_a_template_that_cannot_be_compiled_is_warned_of_at_the_start(
    renderer_of: Make, source: str, is_warned_of: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One that fails over no messages is not judged: it may need some."""
    await renderer_of(source).warm_up()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == is_warned_of
    assert all(
        "TemplateSyntaxError" in message and "every chat will be refused" in message for message in warned
    )


async def test_an_endless_template_is_stopped_and_the_loop_stays_free(renderer_of: Make) -> None:
    endless = "{% if messages[0].content == 'hello' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    renderer = renderer_of(endless + "{% endfor %}{% endfor %}{% endif %}fine", seconds=1.0)
    longest = 0.0
    started = time.monotonic()
    rendering = asyncio.create_task(renderer.render(HELLO))
    while not rendering.done():
        before = time.monotonic()
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - before)
    with pytest.raises(ApiError, match=r"takes too long over these messages, the limit is 1 s"):
        await rendering
    assert longest < (time.monotonic() - started) / 2
    assert await renderer.render(Conversation([{"role": "user", "content": "other"}])) == "fine"


@pytest.mark.parametrize(
    "command", [("sleep", "60"), (sys.executable, "-c", ""), ("/no/such/program",)],
    ids=["silent", "leaves", "missing"],
)  # fmt: skip
async def test_a_worker_that_does_not_come_up_is_no_fault_of_the_messages(
    renderer_of: Make, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    renderer = renderer_of(CHAT_TEMPLATE)
    with monkeypatch.context() as patch:
        patch.setattr(renderer._pool, "_command", command)
        patch.setattr(worker_pool, "START_SECONDS", 0.3)
        with pytest.raises(ApiError, match="does not start") as refused:
            await renderer.render(HELLO)
    assert (refused.value.status, refused.value.param) == (503, None)
    assert refused.value.headers == {"Retry-After": "1"}
    assert await renderer.render(HELLO) == "user: hello<end>\nassistant: "


async def test_a_question_given_up_does_not_answer_the_next(renderer_of: Make) -> None:
    renderer = renderer_of(CHAT_TEMPLATE)
    await renderer.render(HELLO)
    given_up = asyncio.create_task(renderer.render(Conversation([{"role": "user", "content": "x" * 10**6}])))
    await asyncio.sleep(0.001)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert await renderer.render(HELLO) == "user: hello<end>\nassistant: "


async def test_chats_that_the_template_is_slow_over_hold_no_other_up(renderer_of: Make) -> None:
    """Eight of them from one client; then a chat of another, and one of the same."""
    slow = "{% if messages[0].content[0] == 's' %}{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{% endif %}"
    renderer = renderer_of(slow + "fine", seconds=5.0)
    await renderer.warm_up()
    chats = [Conversation([{"role": "user", "content": f"slow {i}"}]) for i in range(8)]
    waiting = [asyncio.create_task(renderer.render(chat)) for chat in chats]
    await asyncio.sleep(0.1)
    for client in ("other", ""):
        worker_pool.CLIENT.set(client)
        assert await renderer.render(HELLO) == "fine"
        assert sum(task.done() for task in waiting) <= 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
