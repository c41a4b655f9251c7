"""What goes between the API process and the process that renders chat templates, over its stdin and stdout.

Each frame is four bytes of length, then JSON.
"""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")


class RenderJob(msgspec.Struct):
    """variables: what the template sees beside the messages, such as bos_token."""

    template: str
    variables: dict[str, str]
    messages: list[dict[str, str]]


class Rendered(msgspec.Struct):
    """Either the text, or why there is none."""

    text: str | None = None
    error: str | None = None


def frame(content: RenderJob | Rendered) -> bytes:
    payload = msgspec.json.encode(content)
    return LENGTH.pack(len(payload)) + payload
