"""The frames between the API process and the process that checks grammars, over its stdin and stdout.

Each frame is four bytes of length, then MessagePack.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from headway.engine import TokenTable

LENGTH = struct.Struct("<I")

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tools"]
KINDS: tuple[Kind, ...] = ("json_object", "json_schema", "regex", "choice", "lark", "tools")


class TextForm(msgspec.Struct, frozen=True):
    """What a text may be, as the client wrote it.

    value: a JSON schema as JSON, a regular expression, a JSON list of texts, or a Lark grammar; empty for json_object. That of
    tools is a Lark grammar of the server's own, whose schemas have passed `enforceable`.
    param: the field that it came in.
    """

    kind: Kind
    value: str
    param: str


class TargetVocabulary(msgspec.Struct, frozen=True):
    """What grammars are checked for; the first frame. vocab_size: the width of the logits."""

    table: TokenTable
    vocab_size: int


class Checked(msgspec.Struct, frozen=True):
    """The answer to a form; exactly one field is set. source: see `Grammar`. error: why it cannot be enforced."""

    source: str | None = None
    error: str | None = None


def frame(content: TextForm | TargetVocabulary | Checked) -> bytes:
    payload = msgspec.msgpack.encode(content)
    return LENGTH.pack(len(payload)) + payload
