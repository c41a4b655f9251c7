"""Control tokens that people spell out in a chat are text."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.fake_chat import FakeChat
from headway_testing.fake_engine import FakeEngine
from headway_testing.tiny_tokenizers import END_OF_TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from headway.server.base.conversation import Conversation
from headway.server.requests.services import Services
from headway.server.text.control_text import ChatPrompt, control_pattern, is_structural
from headway.server.text.escaping import Escaper
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

URL = "/v1/chat/completions"
END_ID = 0
CONTROLS = ["<|end|>", "<|end_of_turn|>", "<s>", "[INST]", "a+b"]
CONTENTS = st.lists(
    st.sampled_from([*CONTROLS, "<|", "end|>", "~", "0", "7~", "x", " ", "\n", "日本"]), max_size=12
)


class Chat(FakeChat):
    """Ends each message with the control token, as templates do; otherwise as `change` says."""

    def __init__(self, change: str = "") -> None:
        self.change = change

    async def render(self, conversation: Conversation) -> str:
        texts = [m["content"] + END_OF_TEXT for m in conversation.messages]
        changed = {"upper": str.upper, "strip": str.strip}.get(self.change, str)
        return "".join(changed(text.removesuffix(END_OF_TEXT)) + END_OF_TEXT for text in texts)


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
    marked = Escaper(pattern).marked(Conversation(messages))
    protected, mark, spelled = (
        (marked.by_tokens.messages, marked.mark, marked.spelled) if marked else (messages, "", ())
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
    assert Escaper(control_pattern([])).marked(Conversation(messages)) is None


@pytest.mark.parametrize(
    ("token", "template", "expected"),
    [
        ("<think>", "", True), ("</tool_call>", "", True), ("<|fim_prefix|>", "", True), ("<\uff5cUser\uff5c>", "", True),
        ("<|im_start|>user\n", "", True), ("[INST]", "", True), ("[/INST]", "", True), ("[gMASK]", "", True),
        ("<<SYS>>", "", True), ("</s>", "", True), ("<unused7>", "", True), (" <think>\n", "", True),
        ("USER:", "{{ 'USER: ' + x }}", True), ("### Task", "'### Task'", True), ("<table>", "'<table>'", True),
        ("USER:", "", False), ("<table>", "", False), ("</h1>", "", False), ("<br/>", "", False),
        ("\n\n", "'\n\n'", False), ("▁▁", "▁▁", False), ("\t", "", False), ("7", "[7]", False), ("🦙", "🦙", False),
        ("user", "'user'", False), ("don't", "don't", False), ("C++", "C++", False), ("[x]", "", False),
        ("[1]", "[1]", False), ("->", "->", False), ("|>", "|>", False), ("<3", "", False),
    ],
)  # fmt: skip
def test_which_added_tokens_are_structural(token: str, template: str, expected: bool) -> None:
    assert is_structural(token, is_special=False, template=template) is expected
    assert is_structural(token, is_special=True, template=template) is bool(token.strip())


def test_tokens_that_the_files_name_are_structural(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens(["ends", "pads", "USER:", "words"])
    folder = tiny_tokenizers.save(tmp_path, tokenizer)
    config = {"eos_token": "ends", "pad_token": {"content": "pads"}, "bos_token": None}
    config |= {"additional_special_tokens": [], "chat_template": "{{ 'USER: ' + messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    pattern = load_tokenizer(folder).control_pattern
    assert pattern is not None
    assert pattern.findall("words ends pads USER: x" + END_OF_TEXT) == ["ends", "pads", "USER:", END_OF_TEXT]


def test_many_tokens_that_begin_alike_are_found_in_little_time() -> None:
    """Gemma 3's tokenizer has 6,400; a content of `<unused` made an alternation of them try each one."""
    tokens = [f"<unused{i}>" for i in range(6242)]
    pattern = control_pattern(tokens)
    assert pattern is not None
    text = "<unused" * 50_000
    started = time.thread_time()
    assert pattern.search(text) is None
    assert time.thread_time() - started < 1.0
    assert pattern.findall("".join(tokens)) == tokens


def test_a_copy_of_a_vocabulary_with_gaps_keeps_every_id(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "~": 2, "<": 3, ">": 4, "<x1>": 6, "c": 7, "d": 8, "?": 12}
    tokenizer = HFTokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_tokens(
        [AddedToken("<x1>"), AddedToken("<x2>"), AddedToken("<x3>", special=True), AddedToken("ab")]
    )
    loaded = load_tokenizer(tiny_tokenizers.save(tmp_path, tokenizer))
    text = "<x1>ab<x2>cd<x3>abz?"
    assert loaded.speller.encode([(text, False)]) == loaded.encode_plain(text)
    spelled = loaded.speller.encode([("<x1>", True), ("<x2>", False), ("<x3>d", True)])
    assert structural(loaded, spelled) == ["<x2>"]


def structural(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    names = [tokenizer.vocabulary.tokenizer.id_to_token(i) for i in ids]
    return [name for name in names if name.startswith("<x")]
