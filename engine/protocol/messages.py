"""The border between the API process and the engine process: typed frames over a local ZeroMQ socket.

The API process binds, the engine connects; one PAIR socket for each life of an engine. Never pickle.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import zmq

from headway.engine.protocol.config import CpuWeights, DraftLayers, DraftLmHead, EngineConfig
from headway.engine.protocol.draft_check import DraftCheck
from headway.engine.protocol.drafters import DrafterName
from headway.engine.protocol.grammar import Grammar, TokenTable
from headway.engine.protocol.logprobs import TokenLogprobs
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.engine.protocol.stats import EngineStats

Phase = Literal["load", "capture", "serve"]
# The environment variable with the id of the process that starts the engine.
PARENT_VARIABLE = "HEADWAY_ENGINE_PARENT"

# --- to the engine ---------------------------------------------------------------------------------


class Configure(msgspec.Struct, tag=True, frozen=True):
    """The first frame of a life. token_table: None where the tokens have no text, so that no grammar is
    served."""

    config: EngineConfig
    token_table: TokenTable | None = None


class Submit(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A new request: ids in. request_id is the sender's choice, unique within the engine's life.

    max_draft_tokens: the request's own depth cap; None for none, 0 turns speculation off. priority: lower is
    served first, equal ones in the order of arrival. group_id: the same for all choices of one HTTP request,
    which together take turns with other HTTP requests; no other group's requests may have it as their id.
    prediction_token_ids: the predicted output, which the n-gram drafter searches. grammar: the grammar of the
    output; None for any text. label: the request's name in logs; empty: its id. output_token_ids: the tokens
    so far of a request that an earlier engine process had accepted; the output continues after them, and they
    count towards max_tokens. None: the request is new.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: list[int] = []
    max_draft_tokens: int | None = None
    prediction_token_ids: list[int] = []
    cache_salt: str = ""
    priority: int = 0
    group_id: int | None = None
    grammar: Grammar | None = None
    label: str = ""
    output_token_ids: list[int] | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends a request at any state; no event follows. Unknown ids are ignored (it may just have finished).

    reason: the reason that is counted: STOP when a stop string completed its text, ABORT when its client has
    gone.
    """

    request_id: int
    reason: FinishReason = FinishReason.ABORT


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Launches no step from now on. Running requests keep their rows and blocks, new ones wait."""


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Launches steps again."""


class SetDepth(msgspec.Struct, tag=True, frozen=True):
    """Limits the drafts of a row in each step planned from now on to this number, 0 to the depth of the
    configuration. It holds for running requests, too. Where the depth is fixed, rounds draft this number."""

    depth: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Ends the engine after the step in flight. Running requests are dropped."""


# --- from the engine -------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the engine established while starting. Sizes are in bytes, lengths in tokens.

    depth: the most drafts of a round; chooses_depth: a policy chooses the depth of each round.
    has_dummy_weights, synthetic_acceptance: as in the configuration; with either the text means nothing.
    relaxed_thinking: as in the configuration, None unless the server is LOSSY. is_deterministic: a text does
    not depend on other requests. drafter, draft_lm_head, draft_layers: the resolved values of auto; drafter
    is "none" exactly if depth is 0. has_draft_head: the draft head is loaded. weights_bytes: the size of all
    weights in dtype, whatever the formats of drafts and cpu_weights. num_ranks: the number of processes that
    compute the model; sizes are those of all of them. draft_check: the result of the check of the drafts; if
    it failed, rounds have no drafts.
    """

    architecture: str
    device: str
    dtype: str
    num_parameters: int
    weights_bytes: int
    kv_cache_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_running: int
    vocab_size: int
    depth: int
    has_draft_head: bool
    chooses_depth: bool = False
    drafter: DrafterName = "none"
    draft_lm_head: DraftLmHead = "full"
    draft_layers: DraftLayers = "full"
    cpu_weights: CpuWeights = "full"
    has_dummy_weights: bool = False
    synthetic_acceptance: tuple[float, ...] | None = None
    relaxed_thinking: tuple[int, float] | None = None
    is_deterministic: bool = False
    num_ranks: int = 1
    draft_check: DraftCheck = DraftCheck()

    @property
    def loss(self) -> str | None:
        """Returns a description of what makes the server LOSSY; None: drafts change no text."""
        if self.relaxed_thinking is None:
            return None
        top_k, max_gap = self.relaxed_thinking
        return f"while a chat reasons, drafts that the model does not choose are accepted (--relaxed-thinking {top_k},{max_gap:g})"


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Sent with progress only: by the loader for each tensor, by the loop for each step or idle half second.

    progress: 0 to 1 within the phase; step: the loop's count.
    """

    phase: Phase
    progress: float
    step: int = 0


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo


class TokenEvent(msgspec.Struct, array_like=True, frozen=True):
    """The output that one step added to one request.

    token_ids: new tokens, the stop token included when finish_reason is STOP through a token. num_drafted,
    num_accepted: the number of valid drafts of this step, and of those that are among token_ids, from index
    draft_start on (1 after the token of a prefill that ended in the same step, else 0). error: set with
    FinishReason.ERROR; error_param: the field of the request that is at fault, if one is. logprobs: those of
    token_ids, if the request asked for them. prompt_logprobs: those of the prompt's tokens except the first,
    if the request asked for them; they come with its first event, as do queue_seconds, the time from its
    arrival to its first admission, and num_cached, the prompt tokens that it then found in the prefix cache.
    round_seconds: the device time of the round, and the usual time of the drafter to catch up if it had to;
    undrafted_seconds: the estimated device time of rounds without drafts for the same tokens. Both are 0 if
    they are unknown.
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    error: str | None = None
    error_code: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    queue_seconds: float | None = None
    draft_start: int = 0
    error_param: str | None = None
    num_cached: int | None = None
    round_seconds: float = 0.0
    undrafted_seconds: float = 0.0


class RoundOutput(msgspec.Struct, tag=True, frozen=True):
    """The events of one step. There is one message for each step that had any."""

    events: list[TokenEvent]


class StatsSnapshot(msgspec.Struct, tag=True, frozen=True):
    """The counters of the engine, sent at most every 100 ms while it is busy, and at once when it becomes
    idle."""

    stats: EngineStats


class Failure(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot continue and ends. kind: the name of the error's class in errors.py, or "crash"."""

    kind: str
    message: str


ToEngine = Configure | Submit | Abort | Pause | Resume | SetDepth | Shutdown
FromEngine = Heartbeat | Ready | RoundOutput | StatsSnapshot | Failure


class Mailbox:
    """The engine's end of the socket, for one thread only.

    Mutable: owns its zmq context, which `close` closes so that no frame is lost.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # sending must never wait for an API process that is gone
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_seconds: float = 0.0) -> list[ToEngine]:
        """Returns all queued messages; if there are none, waits up to the timeout for the first."""
        messages: list[ToEngine] = []
        if timeout_seconds > 0:
            self._socket.poll(int(timeout_seconds * 1000))
        while self._socket.poll(0):
            messages.append(self._decoder.decode(self._socket.recv()))
        return messages

    def close(self) -> None:
        self._socket.close(linger=2000)
        self._context.term()
