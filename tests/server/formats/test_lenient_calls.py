"""Calls that are nearly right: where the tag and the name of a tool are certain, the rest may be wrong.
Certain text is no call."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from headway.server.formats import Content, Piece, Reasoning, find_format
from headway.server.formats.arguments import mended

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}},
    }
    for name in ("f", "g")
]
HERMES = "<tool_call>\n{}\n</tool_call>"
# (format, text, content, calls)
CALLS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "null": ("hermes", HERMES.format('{"name":"g","arguments":null}'), "", [("g", "{}")]),
    "empty-string": ("hermes", HERMES.format('{"name":"g","arguments":""}'), "", [("g", "{}")]),
    "string-of-null": ("hermes", HERMES.format('{"name":"g","arguments":"null"}'), "", [("g", "{}")]),
    "empty-list": ("hermes", HERMES.format('{"name":"g","arguments":[]}'), "", [("g", "{}")]),
    "missing": ("hermes", HERMES.format('{"name":"g"}'), "", [("g", "{}")]),
    "null-parameters-of-llama": ("llama_json", '{"name": "g", "parameters": null}', "", [("g", "{}")]),
    "null-of-mistral": ("mistral", "[TOOL_CALLS]g[ARGS]null", "", [("g", "{}")]),
    "null-in-a-list": ("mistral_list", '[TOOL_CALLS] [{"name": "g", "arguments": null}]', "", [("g", "{}")]),
    "null-of-deepseek": ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>null<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [("g", "{}")]),
    "nothing-of-harmony": ("harmony", "<|channel|>commentary to=functions.g <|constrain|>json<|message|><|call|>", "", [("g", "{}")]),
    "null-of-harmony": ("harmony", "<|channel|>commentary to=functions.g<|message|>null<|call|>", "", [("g", "{}")]),
    "brace-too-many": ("hermes", HERMES.format('{"name":"f","arguments":{"a":1}}}') + " more", "more", [("f", '{"a":1}')]),
    "braces-at-the-end": ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}}}}', "", [("f", '{"a":1}')]),
    "brace-between-calls": ("hermes", 2 * HERMES.format('{"name":"f","arguments":{}}}\n'), "", [("f", "{}"), ("f", "{}")]),
    "brace-too-many-of-deepseek": ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [("f", "{}")]),
    "doubled-opener": ("hermes", "<tool_call>\n" + HERMES.format('{"name":"f","arguments":{}}'), "", [("f", "{}")]),
    "doubled-closer": ("hermes", HERMES.format('{"name":"f","arguments":{}}') + "\n</tool_call>x", "x", [("f", "{}")]),
    "doubled-tags-of-qwen": ("qwen_xml", "<tool_call>\n<tool_call>\n<function=f>\n</function>\n</function>\n</tool_call>\n</tool_call>", "", [("f", "{}")]),
    "doubled-tags-of-glm": ("glm", "<tool_call><tool_call>f</tool_call></tool_call>", "", [("f", "{}")]),
    "line-breaks": ("hermes", HERMES.format('{"name":"f","arguments":{"a":"x\n\ty"}}'), "", [("f", '{"a":"x\\n\\ty"}')]),
    "escapes": ("hermes", HERMES.format(r'{"name":"f","arguments":{"a":"it\'s \$1 \d \" \\ \u00e9 \u1"}}'), "", [("f", """{"a":"it's \\\\$1 \\\\d \\" \\\\ \\u00e9 \\\\u1"}""")]),
    "escapes-of-mistral": ("mistral", r'[TOOL_CALLS]f[ARGS]{"a": "\d"}', "", [("f", r'{"a": "\\d"}')]),
    "line-breaks-of-harmony": ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": "x\ny"}<|call|>', "", [("f", '{"a": "x\\ny"}')]),
    "line-breaks-of-llama": ("llama_json", '{"name": "f", "parameters": {"a": "x\ny"}}', "", [("f", '{"a": "x\\ny"}')]),
    "pythons-constants": ("hermes", HERMES.format('{"name":"f","arguments":{"a":[True,None,"True",],}}'), "", [("f", '{"a":[true,null,"True"]}')]),
    "fence": ("hermes", HERMES.format('```json\n{"name":"f","arguments":{}}\n```'), "", [("f", "{}")]),
    "brace-too-many-of-llama": ("llama_json", '{"name":"f","parameters":{"a":1}}}', "", [("f", '{"a":1}')]),
    "bracket-too-many-behind-text": ("llama_json", 'Well:\n{"name":"f","parameters":{}}]', "Well:", [("f", "{}")]),
    "brace-too-many-of-mistral": ("mistral", '[TOOL_CALLS]f[ARGS]{"a":1}}', "", [("f", '{"a":1}')]),
    "bracket-too-many-of-mistral": ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{}}]]', "", [("f", "{}")]),
    "bracket-too-many-of-python": ("pythonic", "[f(a=1)]]", "", [("f", '{"a": 1}')]),
    "brace-too-many-of-harmony": ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a":1}}<|call|>', "", [("f", '{"a":1}')]),
    "comma-too-many": ("hermes", '<tool_call>{"name":"f","arguments":{}}, </tool_call>', "", [("f", "{}")]),
    "list": ("hermes", HERMES.format('[{"name":"f","arguments":{}}, {"name":"g","arguments":{"a":1}}]'), "", [("f", "{}"), ("g", '{"a":1}')]),
    "two-calls-in-a-tag": ("hermes", HERMES.format('{"name":"f","arguments":{}}\n{"name":"g"}') + " more", "more", [("f", "{}"), ("g", "{}")]),
    "doubled-opener-of-mistral": ("mistral", '[TOOL_CALLS][TOOL_CALLS]f[ARGS]{"a":1}', "", [("f", '{"a":1}')]),
    "nothing-of-deepseek": ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [("f", "{}")]),
    "fence-of-deepseek": ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [("f", "{}")]),
    "fence-of-harmony": ("harmony", '<|channel|>commentary to=functions.f<|message|>```json\n{"a":1}\n```<|call|>', "", [("f", '{"a":1}')]),
    "line-breaks-of-python": ("pythonic", "[f(a='x\n\ty')]", "", [("f", '{"a": "x\\n\\ty"}')]),
    "text-before": ("llama_json", 'Calling now:\n\n{"name":"f","parameters":{"a":3}}', "Calling now:", [("f", '{"a":3}')]),
    "text-around": ("llama_json", 'Well.\n{"name":"f","parameters":{"a":3}}\nDone.', "Well.\n\nDone.", [("f", '{"a":3}')]),
    "text-before-on-the-line": ("llama_json", 'Calling: {"name":"f","parameters":{"a":3}}\n', "Calling:", [("f", '{"a":3}')]),
    "text-before-two": ("llama_json", 'Calling:\n{"name":"f","parameters":{}}; {"name":"g","parameters":{}}', "Calling:", [("f", "{}"), ("g", "{}")]),
}  # fmt: skip
TEXTS: dict[str, tuple[str, str]] = {
    "name-of-no-tool": ("hermes", HERMES.format('{"name":"h","arguments":null}')),
    "value": ("hermes", HERMES.format('{"name":"f","arguments":5}')),
    "no-name": ("hermes", HERMES.format('{"arguments":{}}}')),
    "name-of-no-tool-behind-text": ("llama_json", 'Calling now:\n\n{"name":"h","parameters":{"a":3}}'),
    "no-parameters-behind-text": ("llama_json", 'A person:\n\n{"name":"f"}'),
    "call-in-prose": ("llama_json", 'Write {"name":"f","parameters":{}} to call it.'),
    "call-in-code": ("llama_json", 'Write:\n```json\n{"name":"f","parameters":{}}\n```'),
    "call-in-a-dict": ("llama_json", "Return {'call': " + '{"name":"f","parameters":{}}}'),
    "call-in-backticks": ("llama_json", 'Write `{"name":"f","parameters":{}}`'),
    "call-in-a-list": ("llama_json", 'A list:\n[\n{"name":"f","parameters":{}}\n]'),
    "call-in-an-object": ("llama_json", '{"calls":\n{"name":"f","parameters":{}}\n}'),
    "second-in-a-list": ("llama_json", 'So [1,\n{"name":"f","parameters":{}}'),
}  # fmt: skip


def parsed(name: str, cuts: Sequence[str], *, is_cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    parser = find_format(None, name=name).parser("", TOOLS)
    pieces: list[Piece] = [
        *(piece for cut in cuts for piece in parser.feed(cut)),
        *parser.finish(is_cut=is_cut),
    ]
    texts = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return texts, [(p.name, p.arguments) for p in pieces if not isinstance(p, Content | Reasoning)]


def cuts_of(text: str) -> list[list[str]]:
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_tag_and_name_are_certain_may_be_wrong_elsewhere(name: str) -> None:
    form, text, content, calls = CALLS[name]
    for cuts in cuts_of(text):
        assert parsed(form, cuts) == (content, calls), cuts


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_certain_call_is_text(name: str) -> None:
    form, text = TEXTS[name]
    for cuts in cuts_of(text):
        assert parsed(form, cuts) == (text, []), cuts


WHOLE = {
    "hermes": 'Well. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "qwen_xml": "Well. <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "Well. <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "mistral": 'Well. [TOOL_CALLS]f[ARGS]{"a": 1}',
    "deepseek_v31": "Well. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "llama_json": 'Well.\n{"name": "f", "parameters": {"a": 1}}',
    "harmony": '<|channel|>final<|message|>Well.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_call_that_a_limit_cuts_shows_no_markup(name: str) -> None:
    text = WHOLE[name]
    for end in range(text.index("Well.") + 5, len(text)):
        content, calls = parsed(name, [text[:end]], is_cut=True)
        rest = content.strip().removeprefix("Well.").strip()
        # Of a delimiter too little may have come to know it.
        assert len(rest) < 11 if name == "llama_json" else len(rest) < 5, text[:end]
        assert not calls or all(c[0] == "f" for c in calls)
        for cuts in (list(text[:end]), [text[: end // 2], text[end // 2 : end]]):
            assert parsed(name, cuts, is_cut=True) == (content, calls)


def test_a_text_that_a_limit_cuts_stays_whole() -> None:
    for text in (
        "a < b",
        "see <tool",
        '{"name": "Anna", "age": 3',
        "use [TOOL",
        "<tool_call>\n{brown}\n</tool_call> x",
    ):
        for form in ("hermes", "llama_json"):
            if form != "hermes" or "<tool" not in text:
                assert parsed(form, [text], is_cut=True) == (text, [])


def test_a_string_of_quotes_without_an_end_is_read_in_little_time() -> None:
    start = time.process_time()
    mended('"' + '\\"' * 20_000)
    assert time.process_time() - start < 0.5  # 8 s where each quote is looked for an end
