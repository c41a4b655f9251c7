"""The chats that the browser keeps: their names, opening, export, deletion, and a storage that is full."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headway_testing.chat_page import ChatPage
from headway_testing.fake_engine import FakeEngine
from playwright.async_api import Dialog, Locator, expect

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]
Answer = Callable[..., None]

START = "the quick brown"


async def two_chats(chat: ChatPage, answer: Answer) -> Locator:
    """Asks in one chat, then in another; returns the items of the list, the last chat first."""
    answer("the dog", "the fox")
    await chat.ask("First\nquestion")
    await chat.find("#chat-new").click()
    await chat.ask("Second question")
    await chat.find("#chat-list-toggle").click()
    items = chat.find("#chats li")
    await expect(items.locator(".open")).to_have_text(["Second question", "First question"])
    return items


async def test_an_earlier_chat_is_opened_and_goes_on(chat: ChatPage, answer: Answer) -> None:
    items = await two_chats(chat, answer)
    await expect(items.first.locator(".open")).to_have_attribute("aria-current", "true")
    await items.last.locator(".open").click()
    assert await chat.texts() == ["First\nquestion", "the dog"]
    await expect(chat.find("#chat-list")).to_be_hidden()
    await chat.ask("Again")
    assert [message["content"] for message in chat.bodies[-1]["messages"]] == [
        "First\nquestion",
        "the dog",
        "Again",
    ]
    await chat.page.reload()
    assert (await chat.texts())[0] == "First\nquestion"
    await chat.page.evaluate("sessionStorage.clear()")  # as in another tab
    await chat.page.reload()
    assert await chat.texts() == []
    await chat.find("#chat-list-toggle").click()
    await expect(items.locator(".open")).to_have_text(["First question", "Second question"])


async def answered(chat: ChatPage, button: Locator, text: str | None) -> str:
    """Clicks and answers the browser's question; returns it. None: declines."""
    asked: list[str] = []

    async def reply(dialog: Dialog) -> None:
        asked.append(dialog.message)
        await (dialog.dismiss() if text is None else dialog.accept(text))

    chat.page.once("dialog", reply)
    await button.click()
    return asked[0]


async def test_a_chat_is_renamed_and_deleted_once_that_is_confirmed(chat: ChatPage, answer: Answer) -> None:
    items = await two_chats(chat, answer)
    await answered(chat, items.last.get_by_label("Rename First question"), " <b>Mine</b> ")
    await expect(items.last.locator(".open")).to_have_text("<b>Mine</b>")
    told = await answered(chat, items.last.get_by_label("Delete <b>Mine</b>"), None)
    assert "<b>Mine</b>" in told
    await expect(items).to_have_count(2)
    await answered(chat, items.last.locator(".delete"), "")
    await expect(items).to_have_count(1)
    await answered(chat, items.first.locator(".delete"), "")
    await expect(chat.find("#no-chats")).to_be_visible()
    assert await chat.texts() == []
    await chat.page.reload()
    assert await chat.texts() == []
    assert await chat.page.evaluate("Object.keys(localStorage).filter((key) => key.includes('chat'))") == []


async def test_an_export_has_the_messages_as_the_api_takes_them(chat: ChatPage, answer: Answer) -> None:
    items = await two_chats(chat, answer)
    async with chat.page.expect_download() as downloading:
        await items.last.get_by_label("Export First question").click()
    download = await downloading.value
    assert download.suggested_filename == "First question.json"
    assert json.loads(Path(await download.path()).read_text()) == {
        "title": "First question",
        "messages": [
            {"role": "user", "content": "First\nquestion"},
            {"role": "assistant", "content": "the dog"},
        ],
    }


async def test_chats_are_found_by_what_was_said(chat: ChatPage, answer: Answer) -> None:
    items = await two_chats(chat, answer)
    for text, titles in (("DOG", ["First question"]), ("second", ["Second question"]), ("cat", [])):
        await chat.find("#chat-search").fill(text)
        await expect(items.locator(".open")).to_have_text(titles)
    await expect(chat.find("#no-chats")).to_be_visible()
    await chat.find("#chat-search").fill("")
    await expect(items).to_have_count(2)


CALL = {"id": "call-1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Rome"}'}}
EXPORTED = {
    "title": "Of another browser",
    "messages": [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "reasoning_content": "Ask.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": "noon"},
        {"role": "assistant", "content": "It is **noon**."},
    ],
}


async def choose(chat: ChatPage, content: str) -> None:
    file: Any = {"name": "chat.json", "mimeType": "application/json", "buffer": content.encode()}
    await chat.find("#chat-import-file").set_input_files([file])


async def test_an_exported_chat_is_imported_and_goes_on(chat: ChatPage, answer: Answer) -> None:
    await chat.find("#chat-list-toggle").click()
    await choose(chat, json.dumps(EXPORTED))
    await chat.find("#chats .open").click()
    await expect(chat.find(".answer .content strong")).to_have_text("noon")
    answer("the dog")
    await chat.ask("Again")
    assert chat.bodies[-1]["messages"] == [*EXPORTED["messages"], {"role": "user", "content": "Again"}]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "no JSON"),
        ("[]", "no list of messages"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "no text"),
        ('{"messages": [{"role": "user", "content": ""}, {"role": "<b>", "content": ""}]}', '"<b>"'),
    ],
)
async def test_a_file_of_another_kind_is_refused_by_name(chat: ChatPage, content: str, told: str) -> None:
    await chat.find("#chat-list-toggle").click()
    await choose(chat, content)
    await expect(chat.find("#chat-import-error")).to_contain_text(told)
    await expect(chat.find("#chats li")).to_have_count(0)


async def test_a_chat_of_200_turns_survives_a_reload(chat: ChatPage, answer: Answer) -> None:
    answer("the dog")
    await chat.ask("Hello")
    turns = [
        {"role": role, "content": f"# {role} {i}\n\n```python\nx = {i}\n```\n\n| a |\n|---|\n| {i} |"}
        for i in range(200)
        for role in ("user", "assistant")
    ]
    await chat.find("#chat-list-toggle").click()
    await choose(chat, json.dumps({"title": "Long", "messages": turns}))
    await chat.find("#chats .open").first.click()
    await chat.page.reload()
    await expect(chat.find(".message")).to_have_count(400)
    await expect(chat.answers.last.locator("td")).to_have_text("199")
    await chat.find("#chat-scroll").evaluate("box => (box.scrollTop = 0)")
    await expect(chat.find(".question").first).to_be_in_viewport()
    await chat.send("Again")
    await expect(chat.find("#chat-send")).to_be_visible(timeout=60_000)
    await expect(chat.answers.last.locator(".content")).to_be_in_viewport()
    assert len(chat.bodies[-1]["messages"]) == 401


async def test_another_chat_stops_the_answer_and_keeps_what_came(
    chat: ChatPage, answer: Answer, engine: FakeEngine
) -> None:
    items = await two_chats(chat, answer)
    answer("the quick brown fox jumps over")
    engine.stall_after = 3
    await chat.send("Third question")
    await expect(chat.answers.last.locator(".content")).to_have_text(START)
    await items.last.locator(".open").click()
    assert await chat.texts() == ["First\nquestion", "the dog"]
    await expect(chat.find("#chat-send")).to_be_visible()
    await chat.find("#chat-list-toggle").click()
    await items.first.locator(".open").click()
    assert await chat.texts() == ["Second question", "the fox", "Third question", START]
    await expect(chat.answers.last.locator(".facts")).to_contain_text("stopped")


async def test_a_chat_that_finds_no_room_says_so_and_goes_on(chat: ChatPage, answer: Answer) -> None:
    answer("the dog")
    await chat.page.evaluate(
        "for (let n = 2 ** 22; n; n >>= 1) try { localStorage.full += 'x'.repeat(n); } catch {}"
    )
    await chat.ask("Hello")
    await expect(chat.find("#chat-warning")).to_contain_text("storage is full")
    assert await chat.texts() == ["Hello", "the dog"]
    await chat.ask("Again")
    assert len(chat.bodies[-1]["messages"]) == 3
