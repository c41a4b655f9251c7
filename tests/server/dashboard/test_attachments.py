"""Text files that go with a message: what the model gets, what is shown, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from headway_testing.chat_page import ChatPage
from playwright.async_api import expect

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]
Answer = Callable[..., None]

SCRIPT = "# é\n```\n<script>document.title='taken'</script>\n"


async def attach(chat: ChatPage, **files: bytes) -> None:
    chosen: list[Any] = [
        {"name": f"{name}.txt", "mimeType": "text/plain", "buffer": content}
        for name, content in files.items()
    ]
    await chat.find("#chat-files").set_input_files(chosen)


async def test_files_come_before_the_message_and_stay_with_it(chat: ChatPage, answer: Answer) -> None:
    answer("the dog")
    await attach(chat, a=SCRIPT.encode(), b=b"second", c=b"third")
    await chat.page.get_by_label("take off c.txt").click()
    await chat.ask("What do they do?")
    content = f"a.txt:\n````\n{SCRIPT}````\n\nb.txt:\n```\nsecond\n```\n\nWhat do they do?"
    assert chat.bodies[-1]["messages"] == [{"role": "user", "content": content}]
    await expect(chat.find("#chat-attached li")).to_have_count(0)
    await chat.page.reload()
    await expect(chat.find(".question summary")).to_have_text(["a.txt", "b.txt"])
    await chat.find(".question summary").first.click()
    await expect(chat.find(".question pre").first).to_have_text(SCRIPT)
    await chat.find(".question .edit").click()
    await chat.find(".question form textarea").fill("And now?")
    await chat.find(".question form textarea").press("Enter")
    await chat.ended()
    assert chat.bodies[-1]["messages"] == [
        {"role": "user", "content": content.replace("What do they do?", "And now?")}
    ]
    assert "taken" not in await chat.page.title()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe", "a.txt is no text in UTF-8"),
        (b"PK\0", "a.txt is no text in UTF-8"),
        (b"x" * 524_289, "a.txt has 513 KiB, the limit is 512"),
    ],
    ids=["bytes", "zeros", "size"],
)
async def test_what_is_no_text_or_too_large_is_refused_by_name(
    chat: ChatPage, content: bytes, told: str
) -> None:
    await attach(chat, a=content, b=b"good")
    await expect(chat.find("#chat-warning")).to_contain_text(told)
    await expect(chat.find("#chat-attached li")).to_have_count(1)
