"""What the API process and the process that checks grammars tell each other, as MessagePack."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headway.engine import TokenTable

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tools"]
KINDS: tuple[Kind, ...] = ("json_object", "json_schema", "regex", "choice", "lark", "tools")


class TextForm(msgspec.Struct, frozen=True):
    """What a text may be, as the client wrote it.

    value: a JSON schema as JSON, a regular expression, a JSON list of texts, or a Lark grammar; empty for
    json_object; that of tools is a ToolCalls as JSON. param: the field that it came in. strict: a keyword of
    a schema that cannot be enforced is refused; else it is left out and told. Each tool says that for itself.
    """

    kind: Kind
    value: str
    param: str
    strict: bool = False


class ToolCalls(msgspec.Struct, frozen=True):
    """What an answer may call.

    output_format: the name of one of FORMATS. tools: those that may be called, in OpenAI's form, by their
    place in the request. required: only calls; else text, which is of the form `text` where there is one, may
    stand in their place. parallel: one or more; else one.
    """

    output_format: str
    tools: list[tuple[int, dict[str, Any]]]
    required: bool
    parallel: bool
    text: TextForm | None = None


class TargetVocabulary(msgspec.Struct, frozen=True):
    """What grammars are checked for; the first frame. vocab_size: the width of the logits."""

    table: TokenTable
    vocab_size: int


class Checked(msgspec.Struct, frozen=True):
    """The answer to a form; either source or error is set. source: see `Grammar`. error: why it cannot be
    enforced. param: the field at fault, where it is another than the form's. dropped: paths of keywords of
    schemas that are not enforced."""

    source: str | None = None
    error: str | None = None
    param: str | None = None
    dropped: list[str] = []
