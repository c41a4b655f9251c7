"""What the command line decides about the API process; the engine has its own configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSource:
    """name: None for the embedded model, else a folder or ORG/NAME on the Hugging Face Hub."""

    name: str | None = None
    revision: str | None = None
    download_dir: str | None = None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """served_model_name: None for the name of the source."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    drain_seconds: float = 30.0
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class CompleteConfig:
    """What `headway complete` generates. None: as the model's files say, or drawn (seed)."""

    max_tokens: int = 64
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
