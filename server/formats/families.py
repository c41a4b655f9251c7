"""The formats of all model families as data, and how a chat template shows which one its model writes."""

from __future__ import annotations

import re
from dataclasses import replace

from headway.engine import ConfigError
from headway.server.formats.calls import (
    BracketCalls,
    InvokeCalls,
    JsonCalls,
    KeyedCalls,
    PythonicCalls,
    SeparatedCalls,
    TaggedCalls,
)
from headway.server.formats.output_format import OutputFormat

THINK = (("<think>", "</think>"),)
BRACKETED_THINK = (("[THINK]", "[/THINK]"), *THINK)
HARMONY_THINK = (("<|channel|>analysis<|message|>", "<|end|>"),)

PLAIN = OutputFormat("plain")
FORMATS = (
    OutputFormat("harmony", None, HARMONY_THINK, is_harmony=True),
    OutputFormat("deepseek_v41", InvokeCalls("calls", "｜DSML｜ "), THINK),
    OutputFormat("deepseek_v4", InvokeCalls("tool_calls"), THINK),
    OutputFormat("deepseek_v32", InvokeCalls("function_calls"), THINK),
    OutputFormat("deepseek_v31", SeparatedCalls(), THINK),
    OutputFormat("deepseek_v3", SeparatedCalls(has_fence=True), THINK),
    OutputFormat("mistral", BracketCalls(), BRACKETED_THINK, call_id_length=9),
    OutputFormat("mistral_list", BracketCalls(is_list=True), BRACKETED_THINK, call_id_length=9),
    OutputFormat("glm", KeyedCalls(), THINK, calls_end_thinking=True),
    OutputFormat("glm_lines", KeyedCalls(has_lines=True), THINK, calls_end_thinking=True),
    OutputFormat("qwen_xml", TaggedCalls(), THINK, calls_end_thinking=True),
    OutputFormat("mimo", TaggedCalls(has_lines=False), THINK, calls_end_thinking=True),
    OutputFormat("hermes", JsonCalls(("<tool_call>",), "</tool_call>"), THINK, calls_end_thinking=True),
    OutputFormat("llama_pythonic", PythonicCalls()),
    OutputFormat(
        "llama_json", JsonCalls(("<|python_tag|>",), None, ("parameters", "arguments"), ("{",), ";")
    ),
    OutputFormat("think", None, THINK),
    PLAIN,
)

NAMES = {one.name: one for one in FORMATS}
# The names of vLLM's and SGLang's parsers of the same formats.
ALIASES = {
    "openai": "harmony", "gpt-oss": "harmony", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "glm45": "glm_lines", "glm47": "glm", "qwen3_coder": "qwen_xml", "qwen3_xml": "qwen_xml", "qwen25": "hermes", "qwen": "hermes",
    "llama3_json": "llama_json", "llama3": "llama_json", "llama4_pythonic": "llama_pythonic", "pythonic": "llama_pythonic",
}  # fmt: skip

# The first row whose patterns are all found in a chat template gives its format. A template may match several
# rows: later formats reuse the tags of earlier ones.
_MARKS = (
    ("harmony", (r"<\|channel\|>",)),
    ("deepseek_v41", (r"｜DSML｜", r" calls\b")),
    ("deepseek_v4", (r"｜DSML｜", r"\btool_calls[>'\"]")),
    ("deepseek_v32", (r"｜DSML｜",)),
    ("deepseek_v3", (r"<｜tool▁calls▁begin｜>", r"```json")),
    ("deepseek_v31", (r"<｜tool▁calls▁begin｜>",)),
    ("mistral", (r"\[TOOL_CALLS\]", r"\[ARGS\]")),
    ("mistral_list", (r"\[TOOL_CALLS\]",)),
    ("glm_lines", (r"</arg_key>(?:\\n|\n)<arg_value>",)),
    ("glm", (r"<arg_key>",)),
    ("mimo", (r"<function=", r"<parameter=[^<>\n]*>(?!\\n)[^<>\s][^<\n]*</parameter>")),
    ("qwen_xml", (r"<function=", r"<parameter=")),
    ("hermes", (r"<tool_call>",)),
    ("llama_pythonic", (r"\[func_name1\(",)),
    ("llama_json", (r"<\|python_tag\|>|<\|python_start\|>",)),
    ("llama_json", (r"<\|start_header_id\|>ipython", r'"parameters\\?": ')),
    ("think", (r"</think>|\[/THINK\]",)),
)


def find_format(template: str | None, *, name: str | None = None) -> OutputFormat:
    """Returns the format that a model writes.

    template: the source of its chat template; the format is plain without one, or if no row of _MARKS
    matches. name: one of FORMATS or ALIASES, which overrides the template. Raises ConfigError for an unknown
    name.
    """
    if name is not None:
        found = NAMES.get(ALIASES.get(name, name))
        if found is None:
            raise ConfigError(f"the tool format {name!r} is not known; the formats are {', '.join(NAMES)}")
        return found
    for known, marks in _MARKS:
        if template and all(re.search(mark, template) for mark in marks):
            return _with_thinking_of(NAMES[known], template)
    return PLAIN


def _with_thinking_of(known: OutputFormat, template: str) -> OutputFormat:
    """Returns the format with only those delimiters of reasoning that are in the template: not all models
    of a family reason."""
    if known.is_harmony:
        return known
    return replace(known, thinking=tuple(pair for pair in known.thinking if pair[1] in template))
