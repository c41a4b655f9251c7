"""Removes what no error message and no line of the log may show, and shortens texts that are too long for
one."""

from __future__ import annotations

import re

_MAX_SHOWN = 200


def without_credentials(text: str) -> str:
    """Returns the text without the user names and passwords in its URLs, with or without a scheme: errors
    are logged."""
    return re.sub(r"(?<=://)[^/?#\s]*@|(?<![^\s'\"(])[^/?#\s:@]*:[^/?#\s]*@", "***@", text)


def shortened(text: str) -> str:
    """Returns the text, or its first 200 characters and an ellipsis."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
