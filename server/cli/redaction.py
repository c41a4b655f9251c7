"""Removes from texts what no error and no line of the log may tell."""

from __future__ import annotations

import re


def without_credentials(text: str) -> str:
    """Returns the text without the user and the password that its URLs have before their hosts, with or
    without a scheme: errors are logged."""
    return re.sub(r"(?<=://)[^/?#\s]*@|(?<![^\s'\"(])[^/?#\s:@]*:[^/?#\s]*@", "***@", text)
