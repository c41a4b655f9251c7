"""The chat of the live page in a browser: messages, drafts in colour, stop, regenerate, edit, copy,
errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from headway_testing.chat_page import COMPLETIONS, ChatPage
from headway_testing.fake_engine import FakeEngine
from headway_testing.served import served
from headway_testing.waiting import until
from playwright.async_api import Page, expect

from headway.server.http.keys import Keys
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]
Answer = Callable[..., None]

HELLO = {"role": "user", "content": "Hello"}
TEXT = "the quick brown fox 日本語 😀 jumps over"
START = "the quick brown"  # its first three tokens; white space waits for what follows
MIXED = (
    "<think>\nthe dog 日本\n</think>\n\n"
    + TEXT
    + '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)
# <tools> is one token, and so one span of its own.
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=1</script>&amp;<tools>'


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def test_an_answer_streams_in_the_colours_of_its_drafts(chat: ChatPage, answer: Answer) -> None:
    answer(TEXT)
    shown = await chat.ask("Hello")
    assert await chat.texts() == ["Hello", TEXT]
    (body,) = chat.bodies
    assert (body["messages"], body["stream"]) == ([HELLO], True)
    spans = await shown.locator(".content span").evaluate_all("all => all.map(one => one.dataset.position)")
    assert [int(position) for position in spans] == ([1, 2, 0] * len(spans))[: len(spans)]
    colours = await shown.locator(".content span").evaluate_all(
        "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(colours[:3])) == 3
    assert colours[2] == "rgba(0, 0, 0, 0)"
    await expect(chat.find("#chat-legend li")).to_have_text(["by the model", "draft 1", "draft 2", "draft 3"])
    await chat.find("#chat-colours").uncheck()
    plain = await shown.locator(".content span").evaluate_all(
        "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    assert set(plain) == {"rgba(0, 0, 0, 0)"}


async def test_the_mean_of_accepted_drafts_is_that_of_the_usage(
    chat: ChatPage, answer: Answer, address: str
) -> None:
    answer(TEXT)
    shown = await chat.ask("Hello")
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{address}/v1/chat/completions", json={"messages": [HELLO]})
    usage = response.json()["usage"]
    num_accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    num_steps = usage["completion_tokens"] - num_accepted
    await expect(shown.locator(".facts")).to_contain_text(
        f"{usage['completion_tokens']} tokens · {num_accepted / num_steps:.2f} drafts accepted a step on average"
    )


@pytest.mark.parametrize("rounds", [pytest.param(1, marks=pytest.mark.long), 5])
async def test_each_character_has_the_colour_of_its_own_token(
    chat: ChatPage, answer: Answer, engine: FakeEngine, tokenizer: Tokenizer, address: str, rounds: int
) -> None:
    """Also where the model's own text has delimiters, calls and white space around what is shown."""
    engine.tokens_per_round = rounds
    answer(MIXED)
    await chat.set("tools", '[{"type": "function", "function": {"name": "f"}}]')
    shown = await chat.ask("Hello")
    async with httpx.AsyncClient() as client:
        body = {"messages": [HELLO], "return_token_ids": True, "speculation": {"draft_positions": True}}
        response = await client.post(f"{address}/v1/chat/completions", json=body)
    (choice,) = response.json()["choices"]
    text = tokenizer.full_vocabulary.decode(choice["token_ids"])
    told = choice["speculation"]
    expected = list[int]()
    for i in range(len(text)):
        before = [
            p for p, start in zip(told["draft_positions"], told["text_offset"], strict=True) if start <= i
        ]
        expected.append(before[-1])
    for selector, part in ((".content", TEXT), (".thinking .text", "the dog 日本")):
        runs = await chat.runs(f".answer {selector}")
        assert "".join(piece for piece, _ in runs) == part
        colours = [position for piece, position in runs for _ in piece]
        begin = text.index(part)
        assert colours == expected[begin : begin + len(part)]
    assert await shown.locator(".call summary").all_text_contents() == ["Calls f"]


async def test_the_whole_conversation_goes_with_each_message(chat: ChatPage, answer: Answer) -> None:
    answer("the dog", "the fox")
    await chat.set("system", "Be brief.")
    await chat.ask("Hello")
    await chat.ask("And\nthen?")
    system = said("system", "Be brief.")
    assert chat.bodies[0]["messages"] == [system, HELLO]
    assert chat.bodies[1]["messages"] == [
        system,
        HELLO,
        said("assistant", "the dog"),
        said("user", "And\nthen?"),
    ]
    assert await chat.texts() == ["Hello", "the dog", "And\nthen?", "the fox"]


@pytest.mark.parametrize("way", ["button", "escape"])
async def test_stop_ends_the_request_and_keeps_what_came(
    chat: ChatPage, answer: Answer, engine: FakeEngine, way: str
) -> None:
    answer(TEXT)
    engine.stall_after = 3
    await chat.send("Hello")
    await expect(chat.answers.locator(".content")).to_have_text(START)
    await expect(chat.find("#chat-send")).to_be_hidden()
    await chat.input.fill("too early")
    await chat.input.press("Enter")
    await expect(chat.find("#chat-warning")).to_contain_text("Wait for the end of the answer, or stop it")
    assert engine.aborted == []
    if way == "button":
        await chat.find("#chat-stop").click()
    else:
        await chat.input.press("Escape")
    shown = await chat.ended()
    await expect(chat.input).to_be_focused()
    await expect(shown.locator(".facts")).to_contain_text("stopped")
    await expect(shown.locator(".error")).to_be_empty()
    while not engine.aborted:
        await asyncio.sleep(0.01)
    assert engine.running == {}
    engine.stall_after = None
    await chat.ask("Go on")
    assert chat.bodies[-1]["messages"][1:] == [said("assistant", START), said("user", "Go on")]
    assert len(chat.bodies) == 2


async def test_an_answer_that_was_stopped_at_once_is_no_part_of_the_history(
    chat: ChatPage, answer: Answer, engine: FakeEngine
) -> None:
    answer(TEXT)
    engine.stall_after = 0
    await chat.send("Hello")
    await until(lambda: bool(engine.running))
    await chat.input.press("Escape")
    await chat.ended()
    engine.stall_after = None
    await chat.ask("Again")
    assert chat.bodies[-1]["messages"] == [HELLO, said("user", "Again")]


async def test_the_last_answer_is_regenerated(chat: ChatPage, answer: Answer) -> None:
    answer("the dog", "the fox", "the cat")
    await chat.ask("Hello")
    await chat.ask("Again")
    await expect(chat.find(".regenerate:visible")).to_have_count(1)
    await chat.answers.last.locator(".regenerate").click()
    await chat.ended()
    assert chat.bodies[2]["messages"] == chat.bodies[1]["messages"]
    assert await chat.texts() == ["Hello", "the dog", "Again", "the cat"]


async def test_an_answer_that_was_cut_off_goes_on(chat: ChatPage, answer: Answer) -> None:
    answer("the quick brown fox jumps", " over the **dog**")
    await chat.set("max-tokens", "4")
    shown = await chat.ask("Hello")
    cut = (await chat.texts())[1]
    await expect(shown.locator(".facts")).to_contain_text("cut off at the limit of tokens")
    await chat.set("max-tokens", "")
    await shown.locator(".continue").click()
    await chat.ended()
    body = chat.bodies[1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["messages"] == [HELLO, said("assistant", cut)]
    assert await chat.texts() == ["Hello", f"{cut} over the dog"]
    await expect(shown.locator("strong")).to_have_text("dog")
    await expect(chat.answers).to_have_count(1)
    await expect(shown.locator(".continue")).to_be_hidden()
    await chat.ask("Again")
    assert chat.bodies[2]["messages"][1] == said("assistant", f"{cut} over the **dog**")


async def test_an_edited_message_is_answered_in_place_of_all_that_followed(
    chat: ChatPage, answer: Answer
) -> None:
    answer("the dog", "the fox", "the cat")
    await chat.ask("Hello")
    await chat.ask("And?")
    question = chat.find(".question").first
    edit, box = question.locator(".edit"), question.get_by_label("edited message")
    await edit.click()
    await expect(box).to_be_focused()
    await box.fill("Never mind")
    await box.press("Escape")
    await expect(edit).to_be_focused()
    assert await chat.texts() == ["Hello", "the dog", "And?", "the fox"]
    await edit.click()
    await expect(box).to_have_value("Hello")
    await box.press("End")
    await box.press("Shift+Enter")
    await box.press_sequentially("you")
    await box.press("Enter")
    await chat.ended()
    assert chat.bodies[-1]["messages"] == [said("user", "Hello\nyou")]
    assert await chat.texts() == ["Hello\nyou", "the cat"]


@pytest.mark.parametrize("has_api", [True, False], ids=["api", "page-without-tls"])
async def test_a_message_is_copied_as_it_was_written(chat: ChatPage, answer: Answer, has_api: bool) -> None:
    """Browsers give a page of another machine without TLS no clipboard API."""
    if not has_api:
        await chat.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    answer("<think>hm</think>the  dog\n\njumps")
    shown = await chat.ask("Hello  you")
    for message, text in ((shown, "the  dog\n\njumps"), (chat.find(".question"), "Hello  you")):
        button = message.locator(".copy")
        await button.click()
        await expect(button).to_have_text("Copied")
        await expect(button).to_be_focused()
        await chat.input.fill("")
        await chat.input.press("Control+V")
        await expect(chat.input).to_have_value(text)


async def test_texts_are_never_markup(chat: ChatPage, answer: Answer) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": ' + f"{MARKUP!r}".replace('"', '\\"').replace("'", '"') + "}}</tool_call>"  # fmt: skip
    answer(f"<think>{MARKUP}</think>{MARKUP}{call}", MARKUP)
    await chat.set("tools", '[{"type": "function", "function": {"name": "f"}}]')
    shown = await chat.ask(MARKUP)
    await expect(shown.locator(".thinking .text")).to_have_text(MARKUP)
    await shown.get_by_label("Result of f").fill(MARKUP)
    await shown.get_by_role("button", name="Send results").click()
    await chat.ended()
    shown_by_markdown = MARKUP.replace("&amp;", "&")
    assert await chat.texts() == [MARKUP, shown_by_markdown, shown_by_markdown]
    assert MARKUP in (await chat.find(".call pre").text_content() or "").replace('\\"', '"')
    await expect(chat.find(".result pre")).to_have_text(MARKUP)
    assert await chat.find("#messages :is(img, script, tools)").count() == 0
    assert await chat.page.title() == "Headway · tiny"


async def test_a_refusal_is_told_in_full_and_the_answer_can_be_asked_for_again(
    chat: ChatPage, answer: Answer
) -> None:
    answer("the dog")
    await chat.set("max-tokens", "100000")
    shown = await chat.ask("Hello")
    error = shown.get_by_role("alert")
    await expect(error).to_contain_text("requested 100009 tokens")
    await expect(error).to_contain_text("Please reduce your prompt or max_tokens.")
    await chat.set("max-tokens", "")
    await shown.locator(".regenerate").click()
    shown = await chat.ended()
    await expect(shown.locator(".error")).to_be_empty()
    assert await chat.texts() == ["Hello", "the dog"]


async def test_a_stream_that_fails_says_why_and_keeps_what_came(
    chat: ChatPage, answer: Answer, engine: FakeEngine
) -> None:
    answer(TEXT)
    engine.die_after = 3
    shown = await chat.ask("Hello")
    await expect(shown.get_by_role("alert")).to_contain_text("the engine ended while this request ran")
    assert await chat.texts() == ["Hello", START]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({}, "The server cannot be reached"),
        ({"status": 502, "body": "<h1>Bad gateway</h1>"}, "status 502: <h1>Bad gateway</h1>"),
        ({"status": 200, "body": 'data: {"choices":[]}\n\n'}, "The connection ended before the answer did"),
    ],
    ids=["unreachable", "proxy", "cut"],
)
async def test_a_fault_on_the_way_is_told_with_what_to_do(
    chat: ChatPage, fault: dict[str, Any], told: str
) -> None:
    await chat.page.route(COMPLETIONS, lambda route: route.fulfill(**fault) if fault else route.abort())
    shown = await chat.ask("Hello")
    await expect(shown.get_by_role("alert")).to_contain_text(told)


async def test_a_reload_keeps_the_chat_and_a_new_one_begins_empty(chat: ChatPage, answer: Answer) -> None:
    answer("<think>hm</think>" + TEXT, "the dog")
    await chat.set("system", "Be brief.")
    await chat.ask("Hello")
    before = await chat.runs(".answer .content")
    facts = await chat.find(".facts").text_content()
    await chat.page.reload()
    assert await chat.texts() == ["Hello", TEXT]
    assert await chat.runs(".answer .content") == before
    await expect(chat.find(".facts")).to_have_text(facts or "")
    await chat.ask("Again")
    assert [message["role"] for message in chat.bodies[-1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    await chat.find("#chat-new").click()
    await expect(chat.input).to_be_focused()
    await expect(chat.find("#chat-empty")).to_be_visible()
    await chat.page.reload()
    assert await chat.texts() == []


async def test_a_new_chat_stops_the_answer_of_the_old_one(
    chat: ChatPage, answer: Answer, engine: FakeEngine
) -> None:
    answer(TEXT)
    engine.stall_after = 3
    await chat.send("Hello")
    await expect(chat.answers.locator(".content")).to_have_text(START)
    await chat.find("#chat-new").click()
    while not engine.aborted:
        await asyncio.sleep(0.01)
    engine.stall_after = None
    await expect(chat.find("#chat-send")).to_be_visible()
    await chat.find("#chat-empty button").first.click()
    await chat.ended()
    assert await chat.texts() == ["What is the capital of France?", TEXT]


async def test_the_dashboard_shows_while_an_answer_streams_on(
    chat: ChatPage, answer: Answer, engine: FakeEngine
) -> None:
    answer(TEXT)
    engine.round_seconds = 0.05
    await chat.send("Hello")
    await chat.page.get_by_role("link", name="Dashboard").click()
    await expect(chat.find("#tiles")).to_be_visible()
    await expect(chat.find("#chat-view")).to_be_hidden()
    await expect(chat.find(".chart canvas").first).to_be_visible()
    await chat.page.get_by_role("link", name="Chat", exact=True).click()
    await chat.ended()
    assert await chat.texts() == ["Hello", TEXT]


async def visible(page: Page) -> list[str]:
    return [name for name in ("chat", "dashboard") if await page.locator(f"#{name}-view").is_visible()]


@pytest.mark.parametrize("kind", ["no-chat", "note"])
async def test_a_model_that_continues_text_opens_the_dashboard(
    page: Page, services: Services, kind: str
) -> None:
    other = (
        replace(services, chat=None) if kind == "no-chat" else replace(services, chat_note="continues code")
    )
    async with served(other) as address:
        await page.goto(f"{address}/")
        await expect(page.locator("#state")).to_have_text("serving")
        assert await visible(page) == ["dashboard"]
        await expect(page.locator("#views")).to_be_visible(visible=kind == "note")
        await page.goto(f"{address}/dashboard#chat")
        if kind == "note":
            await expect(page.locator("#chat-note")).to_have_text("This model continues code.")
        await expect(page.locator("#dashboard-view")).to_be_visible(visible=kind == "no-chat")


async def test_a_server_with_keys_answers_once_it_has_one(
    page: Page, services: Services, answer: Answer
) -> None:
    answer("the dog")
    async with served(replace(services, keys=Keys(("secret",)))) as address:
        chat = ChatPage(page)
        await page.goto(f"{address}/")
        await expect(page.locator("#state")).to_have_text("needs a key")
        await expect(await chat.ask("Hello")).to_contain_text("API key")
        await page.locator("#key").fill("secret")
        await page.locator("#key-form button").click()
        await expect(page.locator("#state")).to_have_text("serving")
        await chat.answers.locator(".regenerate").click()
        await chat.ended()
        assert await chat.texts() == ["Hello", "the dog"]
        chat.close()
