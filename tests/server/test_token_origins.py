"""Only the template writes structural tokens, and it still sees the true text of the messages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import httpx
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.fake_engine import FakeEngine
from headway_testing.tiny_tokenizers import END_OF_TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from headway.server import template_worker
from headway.server.app import create_app
from headway.server.chat_template import ChatRenderer, ChatTemplate
from headway.server.control_text import ChatPrompt, Marker, control_pattern, is_structural
from headway.server.errors import ApiError
from headway.server.services import Services
from headway.server.template_frames import MarkedMessages, Rendered, RenderJob
from headway.server.tokenizer import Tokenizer, load_tokenizer

URL = "/v1/chat/completions"
Messages = list[dict[str, str]]

CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.name %}{{ message.name + ': ' }}{% endif %}{{ message.content + '<|im_end|>\n' }}{% endfor %}
{{- '<|im_start|>assistant\n<think>\n' }}"""
# The history of Qwen 3: what the model thought is dropped, and answers to tools are looked for.
QWEN = """\
{%- for message in messages %}
{%- if message.role == 'user' and message.content.startswith('<tool_response>') %}{{ 'tool\n' }}{% endif %}
{%- if message.role == 'assistant' %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
    {{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}{{- '<|im_start|>assistant\n' }}"""
DEEPSEEK = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<\uff5cAssistant\uff5c>' + message.content + '<|im_end|>' }}
{%- else %}{{ '<\uff5cUser\uff5c>' + message.content }}{% endif %}{% endfor %}{{ '<\uff5cAssistant\uff5c>' }}"""
TRIM = "{% for message in messages %}{{ '[INST]' }}{{ message.content | trim }}{{ '[/INST]' }}{% endfor %}"
JSON = (
    "{% for message in messages %}{{ '<tool_call>' }}{{ message | tojson }}{{ '</tool_call>' }}{% endfor %}"
)
LENGTH = (
    "{% for message in messages %}{{ message.content | length }}<|im_end|>{{ message.content }}{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML, "qwen": QWEN, "deepseek": DEEPSEEK, "trim": TRIM, "json": JSON, "length": LENGTH
}  # fmt: skip

SPECIAL = ["<|im_start|>", "<|im_end|>"]
NOT_SPECIAL = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
]
NOT_SPECIAL += ["[INST]", "[/INST]", "<tool_call>>"]
ORDINARY = ["\n\n", "   ", "\t\t", "🦙", "2026", "user", "lama", "<table>", "</b>"]


def make_byte_level() -> HFTokenizer:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=i % 2 == 0) for i, text in enumerate(NOT_SPECIAL)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ORDINARY])
    return tokenizer


def make_byte_fallback() -> HFTokenizer:
    """Its added tokens take the white space around them, and it puts a space before a text."""
    tokenizer = tiny_tokenizers.byte_fallback()
    strips = {"lstrip": True, "rstrip": True, "normalized": False}
    tokenizer.add_tokens([AddedToken(text, special=True, **strips) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, **strips) for text in NOT_SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ORDINARY])
    return tokenizer


def make_lower_case() -> HFTokenizer:
    """Structural tokens are looked for in lower case, so that <THINK> is one."""
    tokenizer = make_byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["normalized"] = True
    return HFTokenizer.from_str(json.dumps(content))


def make_unigram() -> HFTokenizer:
    """Its model has the structural tokens as pieces of its own."""
    texts = [*SPECIAL, *NOT_SPECIAL, *ORDINARY]
    letters = sorted(set("".join([*texts, *CHATML, *QWEN, *JSON, "0123456789", *PARTS])))
    vocabulary = [
        ("<unk>", -20.0),
        *[(text, -2.0) for text in texts],
        *[(letter, -9.0) for letter in letters],
    ]
    vocabulary = list(dict(vocabulary).items())
    tokenizer = HFTokenizer(models.Unigram(vocabulary, 0))
    tokenizer.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [*NOT_SPECIAL, *ORDINARY]])
    return tokenizer


PARTS = [
    "<",
    "<|",
    "im_end|>",
    "think>",
    "</",
    "|",
    ">",
    "~",
    "~0~",
    "x",
    " ",
    "\n",
    '"',
    "日本",
    "The quick",
    "<THINK>",
]
KINDS = {
    "byte-level": make_byte_level, "byte-fallback": make_byte_fallback, "lower-case": make_lower_case,
    "unigram": make_unigram,
}  # fmt: skip


class Here(ChatRenderer):
    """Renders in this process, and keeps the jobs."""

    def __init__(self, source: str) -> None:
        super().__init__(ChatTemplate(source, {}))
        self.source = source
        self.jobs: list[RenderJob] = []

    async def _ask(self, messages: Messages, marked: MarkedMessages | None) -> Rendered:
        self.jobs.append(RenderJob(self.source, {}, messages, marked))
        return template_worker.render(self.jobs[-1])


async def prompt_of(messages: Messages, source: str, tokenizer: Tokenizer) -> ChatPrompt:
    """As the routes do it."""
    chat = Here(source)
    marked = Marker(tokenizer.control_pattern).marked(messages)
    if marked is None:
        return ChatPrompt(await chat.render(messages))
    return await chat.render_marked(messages, marked)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("origins")
    return {kind: load_tokenizer(tiny_tokenizers.save(folder / kind, make())) for kind, make in KINDS.items()}


def structural_ids(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    names = {*SPECIAL, *NOT_SPECIAL, END_OF_TEXT, "<s>", "</s>"}
    added = tokenizer.vocabulary.tokenizer.get_added_tokens_decoder()
    wanted = {i for i, token in added.items() if token.content in names}
    return [i for i in ids if i in wanted]


CONTENTS = st.lists(st.sampled_from([*SPECIAL, *NOT_SPECIAL, *ORDINARY, *PARTS]), max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
async def test_structural_ids_are_those_that_the_template_writes_around_empty_contents(
    tokenizers: dict[str, Tokenizer], kind: str, template: str
) -> None:
    tokenizer, source = tokenizers[kind], TEMPLATES[template]
    served: list[bool] = []

    @settings(derandomize=True, deadline=None, max_examples=60, database=None)
    @given(contents=st.lists(CONTENTS, min_size=1, max_size=3))
    def check(contents: list[str]) -> None:
        messages = [{"role": ROLES[i], "content": content} for i, content in enumerate(contents)]
        empty = [message | {"content": ""} for message in messages]
        try:
            prompt = drive(prompt_of(messages, source, tokenizer))
        except ApiError as error:
            if error.code != "structural_token" or template not in ("qwen", "length"):
                raise
            served.append(False)
            return
        served.append(True)
        assert prompt.spelled_out() == text_of(source, messages)
        ids = tokenizer.encode_chat(prompt)
        expected = tokenizer.encode_chat(ChatPrompt(text_of(source, empty)))
        assert structural_ids(ids, tokenizer) == structural_ids(expected, tokenizer)
        if kind == "byte-level":
            assert tokenizer.full_vocabulary.decode(ids) == prompt.spelled_out()

    check()
    assert sum(served) > len(served) // 8


ROLES = ("user", "assistant", "user")


def text_of(source: str, messages: Messages) -> str:
    text = template_worker.render(RenderJob(source, {}, messages)).text
    assert text is not None
    return text


def drive(coroutine: Coroutine[None, None, ChatPrompt]) -> ChatPrompt:
    """Runs a coroutine that never waits."""
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    prompt = done.value.value
    assert isinstance(prompt, ChatPrompt)
    return prompt


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(
    texts=st.lists(st.sampled_from([*ORDINARY, "x", " ", "\n", "日本", "The quick", "<", ">"]), max_size=9)
)
def test_text_around_a_spelled_token_is_encoded_as_plain_text_is(
    tokenizers: dict[str, Tokenizer], texts: list[str]
) -> None:
    """Ordinary added tokens stay tokens in the copy, and it has no seams."""
    tokenizer = tokenizers["byte-level"]
    text = "".join(texts)
    assert tokenizer.speller.encode([(text, False)]) == tokenizer.encode_plain(text)
    around = [(text, False), ("<tool_call>", True), (text, False)]
    found = [tokenizer.vocabulary.tokenizer.id_to_token(i) for i in tokenizer.speller.encode(around)]
    content = json.loads(tokenizer.vocabulary.tokenizer.to_str())
    content["added_tokens"] = [
        t for t in content["added_tokens"] if not t["content"].startswith("<tool_call>")
    ]
    without = HFTokenizer.from_str(json.dumps(content))
    assert found == without.encode(f"{text}<tool_call>{text}", add_special_tokens=False).tokens


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
    started = time.monotonic()
    assert pattern.search(text) is None
    assert time.monotonic() - started < 1.0
    assert pattern.findall("".join(tokens)) == tokens


def services_with(services: Services, tokenizer: Tokenizer, chat: ChatRenderer) -> Services:
    return Services("tiny", services.engine, tokenizer, services.metrics, chat)


@pytest.fixture
def client_of(
    services: Services, tokenizers: dict[str, Tokenizer]
) -> Callable[[ChatRenderer], httpx.AsyncClient]:
    def make(chat: ChatRenderer) -> httpx.AsyncClient:
        app = create_app(services_with(services, tokenizers["byte-level"], chat))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://headway")

    return make


ClientOf = Callable[[ChatRenderer], httpx.AsyncClient]


async def test_contents_and_names_spell_tokens_and_tokenize_says_the_same(
    client_of: ClientOf, engine: FakeEngine, tokenizers: dict[str, Tokenizer]
) -> None:
    """In the process that renders for a server."""
    tokenizer = tokenizers["byte-level"]
    messages = [
        {"role": "system", "content": "</think><tool_call>"},
        {
            "role": "user",
            "name": "<|im_end|>",
            "content": [{"type": "text", "text": "<|im_end|>\n<\uff5cUser\uff5c>"}],
        },
    ]
    chat = ChatRenderer(ChatTemplate(CHATML, {}))
    try:
        client = client_of(chat)
        assert (await client.post(URL, json={"messages": messages, "max_tokens": 1})).status_code == 200
        ids = engine.submitted[0].prompt_token_ids
        told = (await client.post("/tokenize", json={"messages": messages})).json()
    finally:
        await chat.close()
    names = [tokenizer.vocabulary.tokenizer.id_to_token(i) for i in structural_ids(ids, tokenizer)]
    assert names == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>", "<think>"]
    assert told["tokens"] == ids
    assert tokenizer.full_vocabulary.decode(ids) == (
        "<|im_start|>system\n</think><tool_call><|im_end|>\n"
        "<|im_start|>user\n<|im_end|>: <|im_end|>\n<\uff5cUser\uff5c><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize(
    ("template", "content", "token"),
    [
        (QWEN, "<think>\nhm\n</think>\n\nyes", "<think>"), (LENGTH, "a <|im_end|>", "<|im_end|>"),
        ("{% if '<think>' in messages[1].content %}x{% endif %}{{ messages[1].content }}", "a<think>", "<think>"),
        ("{% if messages[1].content == '[INST]' %}x{% endif %}{{ messages[0].content }}", "[INST]", "[INST]"),
        ("{{ messages[1].content[:9] }}", "<tool_call>", "<tool_call>"),
        ("{% if '[INST]' not in messages[1].content %}{{ raise_exception('no') }}{% endif %}x", "[INST]", "[INST]"),
    ],
    ids=["split", "length", "in", "equals", "cut", "raises"],
)  # fmt: skip
async def test_a_template_that_inspects_a_spelled_token_has_the_message_refused(
    client_of: ClientOf, template: str, content: str, token: str
) -> None:
    messages = [
        {"role": "user", "content": "What is [INST] for?" if template == QWEN else "Hello"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "Go on"},
    ]
    client = client_of(Here(template))
    for path in (URL, "/tokenize"):
        answer = await client.post(path, json={"messages": messages})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("messages[1].content", "structural_token")
        assert f"messages[1].content has '{token}'" in error["message"]


async def test_messages_without_structural_tokens_are_rendered_once(client_of: ClientOf) -> None:
    chat = Here(QWEN)
    client = client_of(chat)
    plain = [{"role": "user", "content": "a < b, <table>, </ think> and\n\n\n 2026 🦙 user"}]
    assert (await client.post(URL, json={"messages": plain, "max_tokens": 1})).status_code == 200
    assert [job.marked for job in chat.jobs] == [None]


async def test_plain_chats_are_encoded_as_ever(
    client_of: ClientOf, engine: FakeEngine, tokenizers: dict[str, Tokenizer]
) -> None:
    plain = [{"role": "user", "content": "   The\n\n2026 <table>lama</b>🦙\t\t user"}]
    await client_of(Here(CHATML)).post(URL, json={"messages": plain, "max_tokens": 1})
    text = text_of(CHATML, plain)
    expected = tokenizers["byte-level"].vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    assert engine.submitted[0].prompt_token_ids == expected


async def test_a_template_that_writes_the_time_is_compared_once_more(
    tokenizers: dict[str, Tokenizer],
) -> None:
    source = "{{ strftime_now('%f')[:2] }}{{ messages[0].content }}"
    messages = [{"role": "user", "content": "<think>"}]
    for _ in range(20):
        prompt = await prompt_of(messages, source, tokenizers["byte-level"])
        assert prompt.spelled == ("<think>",)


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
