"""The only door to the engine: what the API process may know of it. Imports no torch."""

from headway.engine.config import EngineConfig
from headway.engine.errors import (
    ConfigError,
    EngineDeadError,
    HeadwayError,
    ModelError,
    QueueFullError,
    RequestError,
)
from headway.engine.mailbox import (
    Abort,
    Configure,
    EngineInfo,
    Failure,
    Heartbeat,
    Mailbox,
    Phase,
    Ready,
    RoundOutput,
    Shutdown,
    StatsSnapshot,
    Submit,
    TokenEvent,
)
from headway.engine.request import FinishReason, SamplingParams
from headway.engine.stats import EngineStats

__all__ = [
    "Abort",
    "ConfigError",
    "Configure",
    "EngineConfig",
    "EngineDeadError",
    "EngineInfo",
    "EngineStats",
    "Failure",
    "FinishReason",
    "HeadwayError",
    "Heartbeat",
    "Mailbox",
    "ModelError",
    "Phase",
    "QueueFullError",
    "Ready",
    "RequestError",
    "RoundOutput",
    "SamplingParams",
    "Shutdown",
    "StatsSnapshot",
    "Submit",
    "TokenEvent",
]
