"""How commands end besides with success and errors."""

from __future__ import annotations

NOT_SERVABLE = 3  # the exit status of `headway inspect`; 1 is that of errors, 2 argparse's


class ReaderGoneError(Exception):
    """The reader of stdout has closed it, as with `| head`."""
