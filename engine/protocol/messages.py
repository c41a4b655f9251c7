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
# Has the number of the process that starts the engine.
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
    served first, equals in the order of their coming. group_id: the same for all choices of one HTTP request,
    which together take turns with other HTTP requests; no other group's requests may have it as their id.
    prediction_token_ids: what the output probably is; the n-gram drafter searches it.
    grammar: what the output may be; None for any text. label: the request's name in logs; empty: its id.
    output_token_ids: of a request that an earlier life of the engine had taken in, the tokens that it has got
    since; the output goes on after them, and they count towards max_tokens. None: it is new.
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

    reason: what it counts under: STOP when a stop string completed its text, ABORT when nobody waits for it.
    """

    request_id: int
    reason: FinishReason = FinishReason.ABORT


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Launches no step from now on: what runs keeps its row and blocks, what comes waits."""


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Steps are launched again."""


class SetDepth(msgspec.Struct, tag=True, frozen=True):
    """Each step planned from now on drafts at most this number of tokens a row, 0 to the depth of the
    configuration. It holds for running requests, too. Where the depth is fixed, rounds draft this number."""

    depth: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """The engine leaves after the step in flight; requests that still run are dropped."""


# --- from the engine -------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the engine established while starting. Sizes in bytes, lengths in tokens.

    depth: the most drafts of a round; chooses_depth: a policy chooses how many each has. has_dummy_weights,
    synthetic_acceptance: as the configuration says; with either the text means nothing. relaxed_thinking:
    likewise, None unless the server is LOSSY. is_deterministic: a text depends on no other request.
    drafter, draft_lm_head, draft_layers: what was taken for auto; drafter is "none" exactly where depth is
    0. has_draft_head: the draft head is loaded. weights_bytes: all in that dtype, whatever drafts and
    cpu_weights take. num_ranks: the processes that compute the model; sizes are those of all of them.
    draft_check: how the head's drafts were found; with the state failed rounds have no drafts.
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
        """Returns for people what makes the server LOSSY; None: drafts change no text."""
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
    num_accepted: drafts that were valid in this step, and how many of token_ids they gave: those from place
    draft_start on (1 after the token of a prefill that ended in the same step, else 0). error: set with
    FinishReason.ERROR; error_param: the field of the request that it is about, if one is. logprobs: of
    token_ids, if the request asked for them. prompt_logprobs: of the prompt's tokens but the first, if the
    request asked for them; they come with its first event, as do queue_seconds, the time from its arrival to
    its first admission, and num_cached, the prompt tokens that it then found in the prefix cache.
    round_seconds: how long the device worked on the round, and what the drafter usually takes if it had to
    catch up before; undrafted_seconds: how long the device would have worked on the rounds without drafts
    that give the same tokens. Both are 0 where nothing is known of that.
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
    """One message for each step that added anything."""

    events: list[TokenEvent]


class StatsSnapshot(msgspec.Struct, tag=True, frozen=True):
    """Sent at most every 100 ms while busy, and at once when the engine becomes idle."""

    stats: EngineStats


class Failure(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot go on and leaves. kind: the name of the error's class in errors.py, or "crash"."""

    kind: str
    message: str


ToEngine = Configure | Submit | Abort | Pause | Resume | SetDepth | Shutdown
FromEngine = Heartbeat | Ready | RoundOutput | StatsSnapshot | Failure


class Mailbox:
    """The engine's end of the socket. Used by one thread only.

    Mutable: owns its zmq context, which is closed by `close` so that no frame is lost.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # to send must never wait for an API process that is gone
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_seconds: float = 0.0) -> list[ToEngine]:
        """Returns all frames that wait; if there are none, waits up to the timeout for the first."""
        messages: list[ToEngine] = []
        if timeout_seconds > 0:
            self._socket.poll(int(timeout_seconds * 1000))
        while self._socket.poll(0):
            messages.append(self._decoder.decode(self._socket.recv()))
        return messages

    def close(self) -> None:
        self._socket.close(linger=2000)
        self._context.term()
