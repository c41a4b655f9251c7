"""The messages between the API process and the process that checks grammars, as MessagePack."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headway.engine import TokenTable

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tools"]
KINDS: tuple[Kind, ...] = ("json_object", "json_schema", "regex", "choice", "lark", "tools")


class TextForm(msgspec.Struct, frozen=True):
    """The form of a text, as the client wrote it.

    value: a JSON schema as JSON, a regular expression, a JSON list of texts, or a Lark grammar; empty for
    json_object; for tools a ToolCalls as JSON. param: the field that it came in. strict: a keyword of a
    schema that cannot be enforced is refused, instead of left out and reported. Each tool has its own
    `strict`.
    """

    kind: Kind
    value: str
    param: str
    strict: bool = False


class ToolCalls(msgspec.Struct, frozen=True):
    """The calls that an answer may have.

    output_format: the name of one of FORMATS. tools: the callable tools in OpenAI's form, with their indices
    in the request. required: only calls; otherwise text, of the form `text` if there is one, may take their
    place. parallel: one call or more; otherwise one.
    """

    output_format: str
    tools: list[tuple[int, dict[str, Any]]]
    required: bool
    parallel: bool
    text: TextForm | None = None


class TargetVocabulary(msgspec.Struct, frozen=True):
    """The vocabulary for which grammars are checked; the first frame. vocab_size: the width of the logits."""

    table: TokenTable
    vocab_size: int


class Checked(msgspec.Struct, frozen=True):
    """The answer to a form; either source or error is set. source: see `Grammar`. error: why it cannot be
    enforced. param: the field at fault, if it is not the form's. dropped: paths of schema keywords that
    are not enforced."""

    source: str | None = None
    error: str | None = None
    param: str | None = None
    dropped: list[str] = []
