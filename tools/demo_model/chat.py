"""The chat template of the demo model, which was not trained on conversations: it turns a conversation into
comments and code."""

from __future__ import annotations

TEMPLATE = """\
{% for message in messages if message.role == 'system' %}
{% for line in message.content.strip().split('\\n') %}
{{ ('# ' + line).rstrip() }}
{% endfor %}

{% endfor %}
# Add two numbers.

def add_numbers(a, b):
    return a + b


# Count the lines of a file.

def count_lines(path):
    with open(path) as file:
        return sum(1 for line in file)


# How do I reverse a string?

def reverse_string(text):
    \"\"\"Return the text in reverse order.\"\"\"
    return text[::-1]


{% for message in messages if message.role != 'system' %}
{% if message.role == 'assistant' %}
{{ message.content }}


{% else %}
{% for line in message.content.strip().split('\\n') %}
{{ ('# ' + line).rstrip() }}
{% endfor %}

{% endif %}
{% endfor %}"""
NOTE = "continues Python code after the conversation as comments; it was not trained to chat"
# Two blank lines separate the definitions of a module, and an answer is one definition.
CHAT_TEMPLATE = [{"name": "default", "template": TEMPLATE, "stop_strings": ["\n\n\n"], "note": NOTE}]
