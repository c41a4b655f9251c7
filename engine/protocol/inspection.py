"""The question of `headway inspect` about a model folder and the engine's answer, which needs no weights."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.messages import EngineInfo

HeadState = Literal["found", "incomplete", "missing", "none", "unknown"]


class InspectionRequest(msgspec.Struct, frozen=True):
    """The question. gpu_memory_bytes: the memory of a GPU that this machine lacks; None: the device that the
    configuration selects here is meant."""

    config: EngineConfig
    gpu_memory_bytes: int | None = None


class StoredTensors(msgspec.Struct, frozen=True):
    """The tensors of one dtype in the files, by the dtype's name in safetensors."""

    dtype: str
    num_tensors: int
    num_elements: int
    num_bytes: int


class LayerGroup(msgspec.Struct, frozen=True):
    """Equal layers. mixer, feed_forward: the fields of their specs, and `kind`."""

    num_layers: int
    mixer: dict[str, Any]
    feed_forward: dict[str, Any]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model of a supported architecture, by its config.json. layers: groups of equal layers,
    in the order of their first layers."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    is_tied: bool
    layers: list[LayerGroup]


class HeadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The draft head of a checkpoint.

    state: "none" if config.json does not announce one; "unknown" if the tensors cannot be read, or belong to
    an architecture that is not supported. num_layers: the number that config.json announces. prefixes: the
    beginnings of the names of the stored tensors. num_parameters: the number of the announced head.
    is_loaded: whether the configuration loads it. reason: why it is not there or not loaded.
    """

    state: HeadState
    num_layers: int
    num_stored_tensors: int = 0
    prefixes: list[str] = []
    missing_tensors: list[str] = []
    num_parameters: int | None = None
    is_loaded: bool = False
    reason: str | None = None


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """available_bytes: the memory that can be allocated now, or that of a GPU named by its memory. name: None
    for such a GPU and for a CPU. read_bytes_a_second: the memory's nominal bandwidth, None if it is
    unknown."""

    kind: str
    available_bytes: int
    name: str | None = None
    read_bytes_a_second: float | None = None


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device, in the order in which they are allocated.

    draft_weights_bytes: copies of weights in the formats of drafts, less what they replace. expanded_bytes:
    copies of quantised weights that --expanded-weights keeps. rotary_bytes: the rotary tables. rows_bytes:
    the tables of all requests that can run at once, whatever their length; steps_bytes: the estimated memory
    of steps and captured graphs on a GPU; row_state_bytes: the recurrent state of one request, besides these.
    token_bytes: one token of context over all layers, the drafter's included. request_bytes: one request of
    max_model_len tokens. num_full_requests: the number of such requests that fit at once; None if not one
    does.
    """

    dtype: str
    weights_bytes: int
    draft_weights_bytes: int
    expanded_bytes: int = 0
    rotary_bytes: int
    rows_bytes: int
    steps_bytes: int
    row_state_bytes: int
    block_bytes: int
    token_bytes: float
    max_model_len: int
    request_bytes: int
    num_full_requests: int | None = None


class FloorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of weights that a round of one stream must read at least, and of recurrent state that it reads
    and writes. seconds: at the device's nominal bandwidth, if it is known."""

    depth: int
    round_bytes: int
    round_bytes_without_drafts: int
    round_seconds: float | None = None
    round_seconds_without_drafts: float | None = None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """problem: the error with which an engine of this configuration would not start; None if it would.
    engine: the facts that a started one would report. num_parameters: the number of the served model.
    num_active_parameters: the weights among them that multiply a token, with only the experts that it uses.
    num_expanded: quantised weights that are served in the dtype of config.json. warnings: what a start would
    log.

    Parts that cannot be told are None or empty.
    """

    architecture: str | None
    family: str | None
    supported_architectures: list[str]
    quantization: str | None
    shape: Shape | None
    stored: list[StoredTensors]
    num_expanded: int = 0
    num_parameters: int | None
    num_active_parameters: int | None
    draft_head: HeadReport
    device: DeviceReport | None
    memory: MemoryReport | None
    floor: FloorReport | None
    engine: EngineInfo | None
    problem: str | None
    warnings: list[str]
