"""Ways in which commands end besides success and errors."""

from __future__ import annotations

NOT_SERVABLE = 3  # an exit status of `headway inspect`; 1 means an error, and 2 is argparse's


class ReaderGoneError(Exception):
    """The reader of stdout has closed it, as `head` does in a pipe."""
