"""Parts of messages that are no text and cannot be shown to a model: in a history a line replaces them."""

from __future__ import annotations

from collections.abc import Sequence

from headway.server.base.errors import ApiError

# The line's word for each type of a part or a block.
MEDIA = {
    "image_url": "image", "input_image": "image", "image": "image", "input_audio": "audio", "audio_url": "audio", "audio": "audio",
    "video_url": "video", "video": "video", "file": "file", "input_file": "file", "document": "document",
}  # fmt: skip


def last_question(roles: Sequence[str]) -> int | None:
    """Returns the index of the last message of the user, whose pictures the answer would need."""
    return max((i for i, role in enumerate(roles) if role == "user"), default=None)


def media_line(kind: str, path: str, *, must_show: bool) -> str:
    """Returns the line that replaces a part. must_show: the answer would need the part; raises ApiError."""
    if must_show:
        message = (
            f"{path} is {kind!r}; this model reads text: describe in a part of type 'text' what it shows, or leave it out. In results "
            "of tools and in earlier turns a line of text takes its place"
        )
        raise ApiError(message, param=path, code="unsupported_content")
    return f"[{MEDIA[kind]} not shown: this model reads text]"
