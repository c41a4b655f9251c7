"""Chat templates with the constructs of well-known models' own, and a tokenizer that has their structural
tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer

from headway_testing import tiny_tokenizers

# Like Qwen 3's: tools as JSON, calls and results between tags, what the model thought is kept after the last
# question only.
QWEN = """\
{%- if tools %}{{ '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' and not (message.content.startswith('<tool_response>')
            and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{% set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}{% set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{ content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{ '\n' }}{% endif %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
# Like Qwen 3 Coder's: names of a schema become tags.
CODER = """\
{%- macro others(mapping, known) %}{% for name in mapping if name not in known %}
    {%- if mapping[name] is mapping or (mapping[name] is sequence and mapping[name] is not string) %}
        {{- '\n<' ~ name ~ '>' ~ (mapping[name] | tojson | safe) ~ '</' ~ name ~ '>' }}
    {%- else %}{{ '\n<' ~ name ~ '>' ~ (mapping[name] | string) ~ '</' ~ name ~ '>' }}{% endif %}
{%- endfor %}{% endmacro %}
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}
    {%- for tool in tools %}{% set tool = tool.function %}{{ '\n<function>\n<name>' ~ tool.name ~ '</name>' }}
        {%- if tool.description is defined %}{{ '\n<description>' ~ (tool.description | trim) ~ '</description>' }}{% endif %}
        {%- if tool.parameters is mapping and tool.parameters.properties is mapping %}
            {%- for name, fields in tool.parameters.properties | items %}
                {{- '\n<parameter>\n<name>' ~ name ~ '</name>' }}
                {%- if fields.type is defined %}{{ '\n<type>' ~ (fields.type | string) ~ '</type>' }}{% endif %}
                {{- others(fields, ['name', 'type']) }}{{ '\n</parameter>' }}
            {%- endfor %}{{ others(tool.parameters, ['type', 'properties']) }}
        {%- endif %}{{ '\n</function>' }}
    {%- endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role }}
    {%- if message.content is string and message.content | trim | length > 0 %}{{ '\n' + message.content | trim + '\n' }}{% endif %}
    {%- for call in message.tool_calls or [] %}{% set call = call.function or call %}
        {{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
        {%- for name, value in call.arguments | items %}{{ '<parameter=' + name + '>\n' }}
            {{- value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}
            {{- '\n</parameter>\n' }}
        {%- endfor %}{{ '</function>\n</tool_call>' }}
    {%- endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like Llama 3's: indented JSON, one call a message, texts are trimmed, results are JSON.
LLAMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none and tools is defined %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Today: ' + (date_string or '26 Jul 2024') + '\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {%- if loop.first and tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{% endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
        {%- else %}{{ message.content }}{% endif %}{{ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
# Like Mistral's: tools before the last question, ids of nine characters, fields of a function one by one.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == users[-1] %}{{ '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{% set tool = tool.function %}{{ '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {%- if value is string %}{{ '"' + key + '": "' + value + '"' }}
                    {%- else %}{{ '"' + key + '": ' + value | tojson }}{% endif %}
                    {%- if not loop.last %}{{ ', ' }}{% endif %}
                {%- endfor %}{{ '}}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' }}{% endif %}
            {%- endfor %}{{ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{ '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}
        {%- else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] }}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}{{ ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
# Like Mistral Nemo's: the user and answers without calls take turns.
NEMO = """\
{{- bos_token }}{% set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if message.role in ['user', 'assistant'] and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
    {%- if message.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + message.content | tojson + '}[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}{{ call.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
    {%- else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}
{%- endfor %}"""
# Like Command R's: documents, one by one.
DOCUMENTS = """\
{%- for document in documents or [] %}{{ 'Document: ' ~ loop.index0 }}
    {%- for key, value in document | items %}{{ '\n' ~ key ~ ': ' ~ value | string }}{% endfor %}{{ '\n' }}
{%- endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like Qwen 3.5's: a system at the beginning alone, a question somewhere, arguments entry by entry.
QWEN_STRICT = """\
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content | trim + '<|im_end|>\n' }}{% endif %}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
    {%- elif message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content | trim }}
        {%- for call in message.tool_calls or [] %}{% set call = call.function %}
            {{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
            {%- endfor %}{{ '</function>\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like Gemma 2's: no system at all, and the user and the model take turns.
GEMMA = """\
{{- bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like Gemma 3's: a system at the beginning goes before the first question; the user and the model take turns.
GEMMA3 = """\
{{- bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in (messages[1:] if system else messages) %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {%- if loop.first and system %}{{ system + '\n\n' }}{% endif %}
    {{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
TEMPLATES = {"qwen": QWEN, "coder": CODER, "llama": LLAMA, "mistral": MISTRAL, "documents": DOCUMENTS}

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
NOT_SPECIAL = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<|tool|>user\n",
]  # fmt: skip


def byte_level() -> Tokenizer:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in NOT_SPECIAL])
    return tokenizer
