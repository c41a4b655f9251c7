"""GET /v1/models."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "headway"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
