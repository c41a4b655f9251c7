"""The only door to the engine: what the API process may know of it. Imports no torch."""

from headway.engine.config import MAX_DEPTH, EngineConfig
from headway.engine.errors import (
    INTERNAL_ERROR,
    ConfigError,
    EngineDeadError,
    HeadwayError,
    ModelError,
    QueueFullError,
    RequestError,
)
from headway.engine.limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
)
from headway.engine.logprobs import TokenLogprobs
from headway.engine.logs import LogFormat, configure_logging
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
    "INTERNAL_ERROR",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_DEPTH",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_PENALTY",
    "MAX_REPETITION_PENALTY",
    "MAX_STOP_TOKEN_IDS",
    "MIN_REPETITION_PENALTY",
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
    "LogFormat",
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
    "TokenLogprobs",
    "configure_logging",
    "read_model_config",
]
