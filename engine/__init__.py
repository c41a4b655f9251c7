"""The only door to the engine: what the API process may know of it. Imports no torch."""

from headway.engine.config import MAX_DEPTH, EngineConfig
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
    FromEngine,
    Heartbeat,
    Mailbox,
    Phase,
    Ready,
    RoundOutput,
    Shutdown,
    StatsSnapshot,
    Submit,
    ToEngine,
    TokenEvent,
)
from headway.engine.model_config import ModelConfig, read_model_config
from headway.engine.request import FinishReason, SamplingParams
from headway.engine.stats import EngineStats

__all__ = [
    "MAX_DEPTH",
    "Abort",
    "ConfigError",
    "Configure",
    "EngineConfig",
    "EngineDeadError",
    "EngineInfo",
    "EngineStats",
    "Failure",
    "FinishReason",
    "FromEngine",
    "HeadwayError",
    "Heartbeat",
    "Mailbox",
    "ModelConfig",
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
    "ToEngine",
    "TokenEvent",
    "read_model_config",
]
