"""The exceptions that Headway raises for its user's and the world's faults.

HeadwayError
 ├─ ConfigError          a flag or a combination of flags cannot be met
 ├─ ModelError           the model folder cannot be served: files, architecture, tensors, memory
 ├─ RequestError         one request cannot be served; carries the OpenAI error code and parameter
 │   └─ QueueFullError   the waiting queue is at its limit; the client may try again
 └─ EngineDeadError      the engine process ended while the request was in flight

Faults of our own are assertions. Messages name what, value, limit and remedy.
"""

from __future__ import annotations

INTERNAL_ERROR = "internal_error"  # code of a request that ended by a fault of our own


class HeadwayError(Exception):
    """Root of all errors that have their cause outside this program."""


class ConfigError(HeadwayError):
    """A flag, or a combination of flags, cannot be met."""


class ModelError(HeadwayError):
    """The model folder cannot be served."""


class RequestError(HeadwayError):
    """One request cannot be served.

    code: OpenAI's machine-readable error code, such as `context_length_exceeded`.
    param: the field of the request body at fault, if one is.
    """

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class QueueFullError(RequestError):
    """The waiting queue is at its limit."""


class LogitsError(HeadwayError):
    """The model gave logits that are no numbers, so that no token can be sampled."""


class EngineDeadError(HeadwayError):
    """The engine process ended, or answers no more."""


def describe_fault(error: Exception) -> str:
    """Describes a fault of our own that ended one request, for its sender."""
    return f"the engine failed on this request ({type(error).__name__}: {error}); others are not affected"
