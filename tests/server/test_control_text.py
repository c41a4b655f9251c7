"""Control tokens that people spell out in a chat are text."""

from __future__ import annotations

import re

import httpx
import pytest
from headway_testing.fake_engine import FakeEngine
from headway_testing.tiny_tokenizers import END_OF_TEXT
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.server.control_text import ChatPrompt, Marker, control_pattern
from headway.server.services import Services
from headway.server.template_frames import MarkedMessages
from headway.server.tokenizer import Tokenizer

URL = "/v1/chat/completions"
END_ID = 0
CONTROLS = ["<|end|>", "<|end_of_turn|>", "<s>", "[INST]", "a+b"]
CONTENTS = st.lists(
    st.sampled_from([*CONTROLS, "<|", "end|>", "~", "0", "7~", "x", " ", "\n", "日本"]), max_size=12
)


class Chat:
    """Ends each message with the control token, as templates do; otherwise as `change` says."""

    def __init__(self, change: str = "") -> None:
        self.change = change

    async def render(self, messages: list[dict[str, str]]) -> str:
        texts = [m["content"] + END_OF_TEXT for m in messages]
        changed = {"upper": str.upper, "strip": str.strip}.get(self.change, str)
        return "".join(changed(text.removesuffix(END_OF_TEXT)) + END_OF_TEXT for text in texts)

    async def render_marked(self, messages: list[dict[str, str]], marked: MarkedMessages) -> ChatPrompt:
        assert [m["role"] for m in messages] == [m["role"] for m in marked.messages]
        return ChatPrompt(await self.render(marked.messages), marked.mark, marked.spelled)


@pytest.fixture(params=["", "upper", "strip"])
def services(services: Services, request: pytest.FixtureRequest) -> Services:
    chat = Chat(request.param)
    return Services("tiny", services.engine, services.tokenizer, services.metrics, chat)  # type: ignore[arg-type]


async def test_a_control_token_in_a_message_is_spelled_out(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    contents = [f"A {END_OF_TEXT} B{END_OF_TEXT}", END_OF_TEXT, "C", f"{END_OF_TEXT}{END_OF_TEXT}"]
    messages = [{"role": "user", "content": content} for content in contents]
    assert (await client.post(URL, json={"messages": messages, "max_tokens": 1})).status_code == 200
    (submitted,) = engine.submitted
    ids = submitted.prompt_token_ids
    assert ids.count(END_ID) == 4  # the template's own
    assert tokenizer.full_vocabulary.decode(ids) == "".join(content + END_OF_TEXT for content in contents)
    told = (await client.post("/tokenize", json={"messages": messages})).json()
    assert told["tokens"] == ids


async def test_a_chat_without_them_is_encoded_as_ever(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "THE QUICK ~0~ 日本"}]
    await client.post(URL, json={"messages": messages, "max_tokens": 1})
    assert engine.submitted[0].prompt_token_ids == tokenizer.encode_plain("THE QUICK ~0~ 日本" + END_OF_TEXT)


async def test_a_prompt_of_completions_may_have_them(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/completions", json={"prompt": f"a{END_OF_TEXT}", "max_tokens": 1})
    assert engine.submitted[0].prompt_token_ids[-1] == END_ID


@settings(derandomize=True, deadline=None, max_examples=300)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=4))
def test_pieces_are_the_messages_and_every_control_token_in_them_is_marked(contents: list[list[str]]) -> None:
    pattern = control_pattern(CONTROLS)
    assert pattern is not None
    messages = [{"role": "user", "content": "".join(content)} for content in contents]
    marked = Marker(pattern).marked(messages)
    protected, mark, spelled = (
        (marked.messages, marked.mark, marked.spelled) if marked else (messages, "", ())
    )
    rendered = "".join(message["content"] + "<s>" for message in protected)
    pieces = list(ChatPrompt(rendered, mark, spelled).pieces())
    assert "".join(text for text, _ in pieces) == "".join(m["content"] + "<s>" for m in messages)
    found = [match for m in messages for match in re.findall(pattern, m["content"])]
    assert [text for text, spells in pieces if spells] == found
    obeyed = [match for text, spells in pieces if not spells for match in re.findall(pattern, text)]
    assert obeyed == ["<s>"] * len(messages)


def test_a_mark_that_the_template_has_cut_stays_text() -> None:
    assert list(ChatPrompt("a~123~0 b", "~123~", ("<s>",)).pieces()) == [("a~123~0 b", False)]


def test_a_model_without_control_tokens_needs_no_marks() -> None:
    messages = [{"role": "user", "content": "<s>"}]
    assert Marker(control_pattern([])).marked(messages) is None
