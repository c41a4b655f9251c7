"""What of a text may be told in an error or a line of the log."""

from __future__ import annotations

import re


def without_credentials(text: str) -> str:
    """Returns the text without the user and the password that its URLs have before their hosts: errors are logged."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "***@", text)
