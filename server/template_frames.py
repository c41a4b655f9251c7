"""The frames between the API process and the process that renders chat templates, over its stdin and stdout.

Each frame is four bytes of length, then JSON.
"""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")


class MarkedMessages(msgspec.Struct, frozen=True):
    """Messages in which texts are replaced by marks: spelled[i] by `mark` + i + `~`.

    messages: those in which structural tokens are. with_parts: also parts of them, at the ends of texts; None if
    there are no such parts.
    """

    messages: list[dict[str, str]]
    with_parts: list[dict[str, str]] | None
    mark: str
    spelled: tuple[str, ...]


class RenderJob(msgspec.Struct):
    """variables: what the template sees in addition to the messages, such as bos_token. marked: to render as well."""

    template: str
    variables: dict[str, str]
    messages: list[dict[str, str]]
    marked: MarkedMessages | None = None


class Rendered(msgspec.Struct):
    """Exactly one field is set. text: of the marked messages if there are any, which without marks is that of the
    messages. error: the reason why the template failed. inspected: the index of a message whose marks change more
    than the marked texts, because the template looks at what they replace."""

    text: str | None = None
    error: str | None = None
    inspected: int | None = None


def frame(content: RenderJob | Rendered) -> bytes:
    payload = msgspec.json.encode(content)
    return LENGTH.pack(len(payload)) + payload
