"""The API process's configuration from the command line; the engine has its own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headway.engine import LogFormat

MetricsNames = Literal["headway", "vllm", "both"]
UnknownFields = Literal["ignore", "refuse"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to serve. name: None for the embedded model, else a folder or ORG/NAME on the Hugging Face
    Hub."""

    name: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits of one request. request_seconds: 0 for no limit.

    keep_alive_seconds: a stream without an event for this long gets a comment, so that nothing between server
    and client closes the connection; 0 turns this off. force_include_usage: every stream ends with its usage.
    refuses_unknown_fields: a body with an unknown field is refused.
    """

    max_body_bytes: int = 8 * 2**20
    request_seconds: float = 0.0
    keep_alive_seconds: float = 15.0
    force_include_usage: bool = False
    refuses_unknown_fields: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The configuration of `headway serve`. Its repr leaves the keys out.

    served_model_name: if empty, the name of the source is used; answers carry the first name. unix_socket:
    the server listens there instead of at host and port. chat_template: a file that replaces the template in
    the model's files. tool_format: None for the format that the chat template shows.
    """

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
    """The configuration of `headway inspect`. gpu_memory: the memory of a GPU in bytes, which need not be
    in this machine. json: print one JSON object. chat_template, tool_format: as in ServerConfig."""

    gpu_memory: int | None = None
    json: bool = False
    chat_template: str | None = None
    tool_format: str | None = None


@dataclass(frozen=True, slots=True)
class CompleteConfig:
    """The configuration of `headway complete`. A field that is None gets its value from the model's files;
    the seed is drawn."""

    max_tokens: int = 64
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """The configuration of `headway chat`. A field that is None is left to the server and its model."""

    url: str = "http://localhost:8000"
    api_key: str | None = field(default=None, repr=False)
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
