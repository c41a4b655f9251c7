"""Which format a chat template shows. The templates here are short ones of the same constructs as the models'
own."""

from __future__ import annotations

import pytest

from headway.engine import ConfigError
from headway.server.formats import ALIASES, FORMATS, find_format

QWEN_25 = """{%- if tools %}For each function call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n{%- endif %}"""
QWEN_3 = (
    QWEN_25
    + "{%- if '</think>' in content %}{{- '<think>\\n' + reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
)
QWEN_CODER = """{{- "If you choose to call a function ONLY reply in the following format:\\n\\n<tool_call>\\n<function=example_function_name>
<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>" }}
{{- '<parameter=' + args_name + '>\\n' }}{{- args_value }}{{- '\\n</parameter>\\n' }}"""
MIMO = """<tool_call>\\n<function=example_function>\\n<parameter=example_parameter_1>value_1</parameter>\\n</function>\\n</tool_call>
<think></think>"""
GLM_45 = """<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>\\n</tool_call>
{{ '\\n<think></think>' }}"""
GLM_47 = "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value></tool_call></think>"
DEEPSEEK_V3 = """{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']
+ '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'}}</think>"""
DEEPSEEK_V31 = """{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + args }}</think>"""
DSML = '<｜DSML｜{}>\\n<｜DSML｜invoke name="$TOOL_NAME">\\n</｜DSML｜{}></think>'
MISTRAL_V3 = '{{- "[TOOL_CALLS] [" }}{{- \'{"name": "\' + tool_call.function.name }}[/INST]'
MISTRAL_V11 = '{{- "[TOOL_CALLS]" + tool_call.function.name + "[ARGS]" + arguments }}[SYSTEM_PROMPT]'
MAGISTRAL = MISTRAL_V11 + "{{- '[THINK]' + block.thinking + '[/THINK]' }}"
LLAMA_3 = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""
LLAMA_32 = """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}"""
LLAMA_32_ESCAPED = """{{- "\\"parameters\\": " }}{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}"""
LLAMA_3_WITHOUT_TOOLS = (
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}"
)
PYTHONIC = "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]<|python_tag|>"
HARMONY = (
    '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}to=functions.'
)
R1_DISTILL = "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}<｜Assistant｜><think>\\n"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "name", "start"),
    [
        (QWEN_25, "hermes", None),
        (QWEN_3, "hermes", "<think>"),
        (QWEN_CODER, "qwen_xml", None),
        (MIMO, "mimo", "<think>"),
        (GLM_45, "glm_lines", "<think>"),
        (GLM_47, "glm", "<think>"),
        (DEEPSEEK_V3, "deepseek_v3", "<think>"),
        (DEEPSEEK_V31, "deepseek_v31", "<think>"),
        (DSML.replace("{}", "function_calls"), "deepseek_v32", "<think>"),
        (DSML.replace("{}", "tool_calls"), "deepseek_v4", "<think>"),
        (DSML.replace("｜DSML｜", "｜DSML｜ ").replace("{}", "calls"), "deepseek_v41", "<think>"),
        (MISTRAL_V3, "mistral_list", None),
        (MISTRAL_V11, "mistral", None),
        (MAGISTRAL, "mistral", "[THINK]"),
        (LLAMA_3, "llama_json", None),
        (LLAMA_32, "llama_json", None),
        (LLAMA_32_ESCAPED, "llama_json", None),
        (LLAMA_3_WITHOUT_TOOLS, "plain", None),
        (PYTHONIC, "llama_pythonic", None),
        (HARMONY, "harmony", "<|channel|>analysis<|message|>"),
        (R1_DISTILL, "think", "<think>"),
        (CHATML, "plain", None),
        ("", "plain", None),
        (None, "plain", None),
    ],
)  # fmt: skip
def test_a_chat_template_shows_the_format(template: str | None, name: str, start: str | None) -> None:
    found = find_format(template)
    assert (found.name, found.thinking_start) == (name, start)


def test_a_name_counts_before_the_template() -> None:
    assert find_format(QWEN_25, name="llama_json").name == "llama_json"
    assert find_format(None, name="hermes").thinking_start == "<think>"


@pytest.mark.parametrize("alias", ALIASES)
def test_the_names_of_other_servers_are_known(alias: str) -> None:
    assert find_format(None, name=alias).name == ALIASES[alias]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'herms' is not known; the formats are harmony, .*hermes"):
        find_format(None, name="herms")


def test_the_names_are_distinct() -> None:
    names = [one.name for one in FORMATS]
    assert len(set(names)) == len(names)
    assert not set(names) & set(ALIASES)
