"""The settings of the chat in a browser: sampling, JSON schema, tools, thinking, and what a model does not
take."""

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

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}},
    }
    for name in ("read_config", "close")
]
CALLS = (
    '<tool_call>\n{"name": "read_config", "arguments": {"a": "é😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "close", "arguments": {}}\n</tool_call>'
)
ALWAYS = {"messages", "stream", "speculation"}


async def test_only_the_settings_that_are_filled_are_sent(chat: ChatPage, engine: FakeEngine) -> None:
    await expect(chat.find("#chat-temperature")).to_have_attribute("placeholder", "1")
    await expect(chat.find("#chat-repetition-penalty")).to_have_attribute("placeholder", "1")
    await chat.ask("Hello")
    assert set(chat.bodies[0]) == ALWAYS
    assert engine.submitted[0].max_draft_tokens is None
    filled = {
        "temperature": "0.5",
        "top-p": "0.9",
        "top-k": "40",
        "min-p": "0.1",
        "presence-penalty": "0.25",
        "frequency-penalty": "-0.5",
        "repetition-penalty": "1.1",
        "stop-at": "the end",
        "max-tokens": "7",
        "seed": "11",
        "thinking-budget": "5",
    }
    for name, value in filled.items():
        await chat.set(name, value)
    await chat.find("#chat-drafts").select_option("1")
    shown = await chat.ask("Again")
    await expect(shown.locator(".facts")).to_contain_text("drafts accepted")
    await chat.find("#chat-drafts").select_option("0")
    shown = await chat.ask("Once more")
    await expect(shown.locator(".facts")).not_to_contain_text("drafts accepted")
    await chat.find("#chat-drafts").select_option("1")
    body = {name: value for name, value in chat.bodies[1].items() if name not in ALWAYS}
    assert body == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "max_tokens": 7, "seed": 11, "thinking_budget_tokens": 5,
        "presence_penalty": 0.25, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "stop": "the end",
    }  # fmt: skip
    submitted = engine.submitted[1]
    assert (submitted.max_tokens, submitted.max_draft_tokens) == (7, 1)
    assert submitted.sampling.temperature == 0.5
    await chat.page.reload()
    await expect(chat.find("#chat-drafts option")).to_have_count(5)
    await expect(chat.find("#chat-drafts")).to_have_value("1")
    await expect(chat.find("#chat-temperature")).to_have_value("0.5")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("temperature", "3", "Temperature: Value must be less than or equal to 2."),
        pytest.param("max-tokens", "1.5", "Token limit: Please enter a valid value.", marks=pytest.mark.long),
        ("schema", '{"type": ', "This is no valid JSON: "),
        pytest.param("schema", "[]", "The schema must be a JSON object", marks=pytest.mark.long),
        ("tools", "{}", "The tools must be a JSON list"),
        pytest.param("tools", "[}", "This is no valid JSON: ", marks=pytest.mark.long),
    ],
)
async def test_a_setting_that_is_wrong_is_told_before_anything_is_sent(
    chat: ChatPage, name: str, value: str, told: str
) -> None:
    field, error = chat.find(f"#chat-{name}"), chat.find(f"#chat-{name}-error")
    await chat.set(name, value)
    await expect(error).to_contain_text(told)
    await chat.find("#chat-settings-toggle").click()
    await expect(field).to_be_hidden()
    await chat.send("Hello")
    await expect(field).to_be_focused()
    await expect(field).to_have_attribute("aria-invalid", "true")
    await expect(error).to_contain_text(told)
    assert await chat.texts() == []
    assert chat.bodies == []
    await expect(chat.input).to_have_value("Hello")
    await chat.set(name, "")
    await expect(error).to_be_empty()
    await chat.input.press("Enter")
    await chat.ended()
    assert (await chat.texts())[0] == "Hello"


async def test_on_a_phone_settings_are_closed_and_those_for_experts_folded(chat: ChatPage) -> None:
    await chat.page.set_viewport_size({"width": 390, "height": 844})
    await chat.page.reload()
    temperature, top_p = chat.find("#chat-temperature"), chat.find("#chat-top-p")
    await expect(temperature).to_be_hidden()
    await chat.find("#chat-settings-toggle").click()
    await expect(temperature).to_be_visible()
    await expect(top_p).to_be_hidden()
    fold = chat.find("#chat-more summary")
    await fold.click()
    await chat.set("top-p", "3")
    await fold.click()
    await chat.send("Hello")
    await expect(top_p).to_be_focused()
    await expect(chat.find("#chat-top-p-error")).to_contain_text("Top p: ")
    assert chat.bodies == []
    await chat.find("#chat-settings-done").click()
    await expect(chat.find("#chat-settings")).to_be_hidden()
    await expect(chat.find("#chat-settings-toggle")).to_be_focused()


async def test_a_schema_is_a_response_format(chat: ChatPage, answer: Answer, engine: FakeEngine) -> None:
    answer('{"a": 1}')
    await chat.set("schema", json.dumps(SCHEMA))
    await chat.ask("Hello")
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    assert chat.bodies[0]["response_format"] == wanted
    assert engine.submitted[0].grammar is not None
    await chat.set("schema", "")
    await chat.find("[data-example=chat-schema]").click()
    await chat.ask("Again")
    assert chat.bodies[1]["response_format"]["json_schema"]["schema"]["required"] == ["city", "country"]
    assert await chat.find(".answer .error").all_text_contents() == ["", ""]


async def test_calls_are_folded_and_go_on_once_they_have_their_results(
    chat: ChatPage, answer: Answer
) -> None:
    answer("<think>hm</think>the dog " + CALLS, "the fox")
    await chat.set("tools", json.dumps(TOOLS))
    shown = await chat.ask("Hello")
    assert (chat.bodies[0]["tools"], "tool_choice" in chat.bodies[0]) == (TOOLS, False)
    calls = shown.locator(".call")
    await expect(calls.locator("summary")).to_have_text(["Calls read_config", "Calls close"])
    await expect(calls.locator("pre").first).to_be_hidden()
    await calls.locator("summary").first.click()
    await expect(calls.locator("pre").first).to_have_text('{\n  "a": "é😀"\n}')
    await chat.input.fill("Go on")
    await chat.input.press("Enter")
    first, second = shown.get_by_label("Result of read_config"), shown.get_by_label("Result of close")
    await expect(first).to_be_focused()
    await expect(chat.find("#chat-warning")).to_contain_text("Enter the result of read_config first")
    assert len(chat.bodies) == 1
    await first.fill("41")
    await second.fill("ok")
    await second.press("Enter")
    await chat.ended()
    await expect(chat.find("#chat-warning")).to_be_empty()
    _, said, one, two = chat.bodies[1]["messages"]
    ids = [call["id"] for call in said["tool_calls"]]
    functions = [call["function"] for call in said["tool_calls"]]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [("read_config", {"a": "é😀"}), ("close", {})]  # fmt: skip
    assert (said["content"], said["reasoning_content"]) == ("the dog", "hm")
    assert [one, two] == [
        {"role": "tool", "tool_call_id": ids[0], "content": "41"},
        {"role": "tool", "tool_call_id": ids[1], "content": "ok"},
    ]
    assert await chat.texts() == ["Hello", "the dog", "the fox"]
    await expect(chat.find(".result summary")).to_have_text(["Result of read_config", "Result of close"])
    await expect(chat.find(".result pre").first).to_be_hidden()
    await expect(first).to_be_hidden()


async def test_a_call_may_be_required_and_its_results_are_answered_freely(
    chat: ChatPage, answer: Answer, engine: FakeEngine
) -> None:
    answer(CALLS, "the dog")
    await chat.find("[data-example=chat-tools]").click()
    await chat.find("#chat-tool-choice").select_option("one")
    shown = await chat.ask("Hello")
    body = chat.bodies[0]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert engine.submitted[0].grammar is not None
    await expect(shown.locator(".call")).to_have_count(1)
    await shown.get_by_role("button", name="Send results").click()
    await chat.ended()
    assert "tools" in chat.bodies[1]
    assert "tool_choice" not in chat.bodies[1]


async def test_thinking_is_folded_and_can_be_turned_off(
    chat: ChatPage, answer: Answer, engine: FakeEngine
) -> None:
    answer("<think>the dog jumps over</think>the fox", "the cat")
    engine.stall_after = 4
    await chat.send("Hello")
    summary = chat.find(".thinking summary")
    await expect(summary).to_have_text("Thinking …")
    await expect(chat.find(".thinking .text")).to_be_hidden()
    await chat.input.press("Escape")
    engine.stall_after = None
    await chat.find(".regenerate").click()
    await chat.ended()
    await expect(chat.find(".thinking")).to_be_hidden()
    assert await chat.texts() == ["Hello", "the cat"]
    answer("<think>the dog jumps over</think>the fox")
    await chat.find("#chat-thinking").select_option("none")
    shown = await chat.ask("Again")
    assert chat.bodies[-1]["reasoning_effort"] == "none"
    await expect(shown.locator("summary")).to_contain_text("Thought for ")
    await shown.locator("summary").click()
    await expect(shown.locator(".thinking .text")).to_have_text("the dog jumps over")
    await expect(shown.locator(".content")).to_have_text("the fox")
    assert await chat.find("#chat-thinking option:not([hidden])").all_text_contents() == [
        "the model\u2019s",
        "off",
    ]


class TestModelThatOnlyTalks:
    @pytest.fixture
    def template(self) -> str:
        return "{{ messages }}"

    async def test_settings_that_it_does_not_take_are_hidden_and_not_sent(
        self, chat: ChatPage, answer: Answer
    ) -> None:
        answer("the dog")
        await expect(chat.find("#chat-tools")).to_be_hidden()
        await expect(chat.find("#chat-thinking")).to_be_hidden()
        await expect(chat.find("#chat-schema")).to_be_visible()
        kept: dict[str, Any] = {"chat-tools": json.dumps(TOOLS), "chat-thinking": "none"}
        await chat.page.evaluate(
            "kept => sessionStorage.setItem('headway-chat-settings', JSON.stringify(kept))", kept
        )
        await chat.page.reload()  # as after another model of this address
        await expect(chat.find("#chat-tools")).to_be_hidden()
        await expect(chat.find("#chat-tools")).to_have_value(kept["chat-tools"])
        await chat.ask("Hello")
        assert set(chat.bodies[0]) == ALWAYS
