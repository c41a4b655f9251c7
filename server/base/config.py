"""The API process's configuration from the command line; the engine has its own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headway.engine import LogFormat

MetricsNames = Literal["headway", "vllm", "both"]
UnknownFields = Literal["ignore", "refuse"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """name: None for the embedded model, else a folder or ORG/NAME on the Hugging Face Hub."""

    name: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits of one request. request_seconds: 0 for no limit.

    keep_alive_seconds: after so long without an event a stream gets a comment, so that nothing between
    server and client takes it for dead; 0 for none. force_include_usage: every stream ends with its usage.
    refuses_unknown_fields: a body with a field that nobody knows is refused.
    """

    max_body_bytes: int = 8 * 2**20
    request_seconds: float = 0.0
    keep_alive_seconds: float = 15.0
    force_include_usage: bool = False
    refuses_unknown_fields: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The configuration of `headway serve`. Its repr leaves the keys out.

    served_model_name: empty for the name of the source; answers carry the first. unix_socket: listened on
    instead of host and port.
    chat_template: a file, instead of the template in the model's files. tool_format: None for that of the
    chat template."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: list[str] = field(default_factory=list)
    chat_template: str | None = None
    drain_seconds: float = 30.0
    log_level: str = "info"
    log_format: LogFormat = "human"
    otlp_endpoint: str | None = None
    metrics_names: MetricsNames = "headway"
    unix_socket: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    api_key: list[str] = field(default_factory=list, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    cors_origin: list[str] = field(default_factory=list)
    max_body_bytes: int = 8 * 2**20
    request_timeout: float = 0.0
    engine_timeout: float = 10.0
    replay: int = 2
    keep_alive: float = 15.0
    force_include_usage: bool = False
    unknown_fields: UnknownFields = "ignore"
    tool_format: str | None = None
    fleet_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class InspectConfig:
    """The configuration of `headway inspect`. gpu_memory: bytes of a GPU that need not be here. json: print
    one JSON object. chat_template, tool_format: as of ServerConfig."""

    gpu_memory: int | None = None
    json: bool = False
    chat_template: str | None = None
    tool_format: str | None = None


@dataclass(frozen=True, slots=True)
class CompleteConfig:
    """The configuration of `headway complete`. None: as the model's files say, or drawn (seed)."""

    max_tokens: int = 64
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """The configuration of `headway chat`. None: as the server and its model have it."""

    url: str = "http://localhost:8000"
    api_key: str | None = field(default=None, repr=False)
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
