"""The chat for a keyboard, a screen reader and screens of all widths; names are those that Chromium
computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from headway_testing.chat_page import ChatPage
from headway_testing.fake_engine import FakeEngine
from playwright.async_api import expect

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]
Answer = Callable[..., None]

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
CONTROLS = ("button", "textbox", "combobox", "checkbox", "spinbutton", "link", "DisclosureTriangle")
SENTENCES = "The dog jumps. " * 3 + "The fox"


async def controls(chat: ChatPage) -> list[tuple[str, str]]:
    """(role, name) of all, as a screen reader gets them from Chromium."""
    session = await chat.page.context.new_cdp_session(chat.page)
    nodes = (await session.send("Accessibility.getFullAXTree"))["nodes"]
    await session.detach()
    seen = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    ]
    return [(role, name) for role, name in seen if role in CONTROLS]


async def test_every_control_has_a_name(chat: ChatPage, answer: Answer) -> None:
    answer(f"<think>hm</think>the dog {CALL}")
    await chat.set("tools", json.dumps(TOOLS))
    await chat.ask("Hello")
    await chat.find(".edit").click()
    found = await controls(chat)
    assert len(found) >= 25
    assert [role for role, name in found if not name.strip()] == []
    fields = [name for role, name in found if role in ("textbox", "combobox", "checkbox", "spinbutton")]
    assert len(set(fields)) == len(fields)
    assert {"message", "edited message", "System prompt", "Temperature", "Result of f", "Tools, a JSON list"} <= set(fields)  # fmt: skip


async def test_the_focus_is_seen_wherever_tab_leads(chat: ChatPage, answer: Answer) -> None:
    answer("the dog")
    await chat.ask("Hello")
    seen = list[dict[str, Any]]()
    for _ in range(60):
        await chat.page.keyboard.press("Tab")
        focused = await chat.page.evaluate(
            """() => {
                const one = document.activeElement, box = one.getBoundingClientRect();
                const isInside = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
                return one === document.body ? null : {
                    id: one.id || one.className || one.textContent, outline: getComputedStyle(one).outlineStyle, isInside,
                };
            }"""
        )
        if seen and focused == seen[0]:
            break
        if focused is not None:  # between the last and the first
            seen.append(focused)
    ids = [focused["id"] for focused in seen]
    assert {"theme", "chat-system", "chat-seed", "chat-new", "plain copy", "plain edit", "plain regenerate", "chat-input", "chat-send"} <= set(ids)  # fmt: skip
    assert [one for one in seen if one["outline"] == "none" or not one["isInside"]] == []


async def test_the_keyboard_alone_holds_a_chat(chat: ChatPage, answer: Answer) -> None:
    """The focus is where the next thing is typed."""
    answer("the dog", "the fox", "the cat")
    await expect(chat.input).to_be_focused()
    keyboard = chat.page.keyboard
    await keyboard.type("Hello")
    await keyboard.press("Shift+Enter")
    await keyboard.type("you")
    await keyboard.press("Enter")
    await chat.ended()
    await expect(chat.input).to_be_focused()
    await expect(chat.input).to_have_value("")
    await keyboard.press("Shift+Tab")
    await expect(chat.find(".regenerate")).to_be_focused()
    await keyboard.press("Enter")
    await chat.ended()
    await expect(chat.input).to_be_focused()
    await chat.find(".edit").focus()
    await keyboard.press("Space")
    await keyboard.press("ControlOrMeta+A")
    await keyboard.type("Bye")
    await keyboard.press("Enter")
    await chat.ended()
    await expect(chat.input).to_be_focused()
    assert [body["messages"][-1]["content"] for body in chat.bodies] == ["Hello\nyou", "Hello\nyou", "Bye"]
    assert await chat.texts() == ["Bye", "the cat"]


async def test_enter_that_ends_a_composition_sends_nothing(chat: ChatPage) -> None:
    """Of an input method, as for Japanese."""
    await chat.input.fill("日本")
    await chat.input.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    await chat.input.dispatch_event("keydown", {"key": "a"})
    assert chat.bodies == []
    await expect(chat.input).to_have_value("日本")


async def watched(chat: ChatPage) -> Callable[[], Any]:
    """What is added to the region that is read out, from now on."""
    await chat.page.evaluate(
        """() => {
            window.told = [];
            new MutationObserver((all) => all.forEach(({ addedNodes }) => window.told.push(
                ...[...addedNodes].map((node) => node.textContent))))
                .observe(document.querySelector("[aria-live=polite]"), { childList: true, characterData: true, subtree: true });
        }"""
    )
    return lambda: chat.page.evaluate("window.told")


async def test_an_answer_is_read_out_in_sentences_and_not_token_by_token(
    chat: ChatPage, answer: Answer, engine: FakeEngine
) -> None:
    answer(SENTENCES)
    told = await watched(chat)
    await chat.ask("Hello")
    assert await told() == [SENTENCES, "End of the answer."]
    # Slowly: the clock of the page runs five times as fast, so that the seconds between announcements pass.
    await chat.page.evaluate(
        "(now => { performance.now = () => 5 * now.call(performance); })(performance.now)"
    )
    engine.tokens_per_round, engine.round_seconds = 1, 0.06
    await chat.page.evaluate("window.told = []")
    await chat.ask("Again")
    *sentences, rest, end = await told()
    assert (rest, end) == ("The fox", "End of the answer.") or rest.endswith(". The fox")
    assert 1 <= len(sentences) <= 3
    assert all(sentence.endswith("The dog jumps.") for sentence in sentences)
    assert " ".join([*sentences, rest]) == SENTENCES


@pytest.mark.parametrize(
    ("text", "body", "told"),
    [
        (f"the dog {CALL}", {}, ["the dog", "The model calls f. Enter what it returns."]),
        ("the dog jumps", {"max-tokens": "2"}, ["the dog", "The answer was cut off at the limit of tokens."]),
    ],
    ids=["calls", "length"],
)
async def test_the_end_of_an_answer_is_read_out_with_its_reason(
    chat: ChatPage, answer: Answer, text: str, body: dict[str, str], told: list[str]
) -> None:
    answer(text)
    await chat.set("tools", json.dumps(TOOLS))
    for name, value in body.items():
        await chat.set(name, value)
    read_out = await watched(chat)
    await chat.ask("Hello")
    assert await read_out() == told


async def test_the_chat_fits(chat: ChatPage, answer: Answer) -> None:
    """320 by 256 is a window of 1,280 by 1,024 enlarged four times."""
    wide = f"```\n{'quick ' * 30}\n```\n|{' quick |' * 9}\n|{'---|' * 9}\n"
    answer("<think>hm</think>" + "the-quick-brown-fox" * 4 + f"\n\n{wide}\n\n" + CALL)
    await chat.set("tools", json.dumps(TOOLS))
    await chat.page.set_viewport_size({"width": 320, "height": 256})
    await chat.ask("https://example.org/" + "quick" * 30)
    await chat.find("#chat-list-toggle").click()
    await expect(chat.find("#chats .delete")).to_be_visible()
    for width, height in ((320, 256), (320, 568), (360, 740), (1440, 900)):
        await chat.page.set_viewport_size({"width": width, "height": height})
        await check_fit(chat, width, height)


async def check_fit(chat: ChatPage, width: int, height: int) -> None:
    """With the settings shown and hidden."""
    for _ in range(2):
        await expect(chat.find("html")).to_have_js_property("scrollWidth", width)
        outside = await chat.find("button, input, select, textarea, summary, .text").evaluate_all(
            """(all, width) => all.filter((one) => {
                const box = one.getBoundingClientRect();
                return one.checkVisibility() && (box.width === 0 || box.left < 0 || box.right > width);
            }).map((one) => one.outerHTML.slice(0, 80))""",
            width,
        )
        assert outside == []
        if height > 400:
            await expect(chat.input).to_be_in_viewport(ratio=1)
            await expect(chat.find("#chat-send")).to_be_in_viewport(ratio=1)
        await chat.find("#chat-settings-toggle").click()


async def test_the_theme_is_that_of_the_system(chat: ChatPage, answer: Answer) -> None:
    answer("the dog")
    await chat.ask("Hello")
    for theme in ("light", "dark"):
        await chat.page.emulate_media(color_scheme=theme)
        await expect(chat.find("html")).to_have_attribute("data-theme", theme)
        for selector in ("body", "#chat-settings", ".question .text", "#chat-input"):
            brightness = await chat.find(selector).evaluate(
                "one => getComputedStyle(one).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
            )
            assert (sum(brightness) / 3 > 128) == (theme == "light"), selector
