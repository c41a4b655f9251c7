"""Many short requests of every kind, some left by their clients, and what they leave behind in a server.

The same requests are sent in each of several stretches: what differs between two of them is the server.
Behind each comes the probe: some of those that nobody leaves, by which drafts are judged. Then the server is
to be idle, with all blocks and rows free, and memory is read. What grows for a while in a server that forgets
nothing is grown before, or counted: SERVER_FLAGS, SERVER_ENVIRONMENT and `bring_up` say what that is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path

import httpx
import msgspec

from headway.engine import EngineInfo
from headway.server.bench.server_side import read_engine, read_metrics
from headway_testing.bring_up import bring_up_rounds
from headway_testing.daemon import Server

NUM_STRETCHES = 8
SHARE_LEFT = 0.2
MAX_CHOICES = 2
NUM_PROBES = 256
ADMIN_KEY = "admin"
# The index of cached prefixes takes some 350 bytes of the engine process for each block of the KV cache that
# holds one. With this few blocks, all hold one after a stretch of 2,500 requests; the 32,769 that a GPU has
# by default do after eight stretches.
SERVER_FLAGS = ("--log-level", "warning", "--kv-cache-memory", "256MiB", "--admin-key", ADMIN_KEY)
# On a CPU, linear layers would keep what their libraries compile for each number of rows.
SERVER_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}
# With all that grown, nothing is left of a request: scheduler, prefix index and mailbox hold 97 bytes more
# after 10,000 of them, the whole engine on a CPU none after 2,500. The allowance is for what allocators do in
# between. The ids of a prompt of 60 tokens, 2 KiB, are more: an engine that keeps no more of a request than
# these is found.
GROWTH_BYTES_PER_REQUEST = 1024
# Allocators take memory from the system by the megabyte, whenever requests come in a new order.
LEAST_GROWTH_BYTES = 4 << 20
# Rounds of rare kinds are captured when they come a second time, and the allocator takes segments of 20 MiB.
DEVICE_GROWTH_BYTES = 64 << 20
# A simulated device met 2 to 11 in the last half. The allowance for many of them would hide a leak.
MAX_LATE_KINDS = 32
# Where rounding makes a quarter of the texts others, the acceptance length of a probe differs by 0.2 % (one
# standard deviation); where it does not, as on a CPU, by nothing.
MAX_DRIFT = 0.01


ADJUSTING_OR_SCORING = {
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids",
    "min_tokens", "logprobs",
}  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """A body, and when its client hangs up: after so many seconds, or pieces of the stream; None: never."""

    body: dict[str, object]
    leaves_after_seconds: float | None = None
    leaves_after_pieces: int | None = None

    @property
    def is_left(self) -> bool:
        return self.leaves_after_seconds is not None or self.leaves_after_pieces is not None


@dataclass(frozen=True)
class Rounds:
    """What rounds gave: tokens, over how many rows."""

    num_tokens: float
    num_row_rounds: float


@dataclass(frozen=True)
class Stretch:
    """One pass over all requests and the probe, and the idle server behind them. Counters are this stretch's
    own.

    outcomes: how many ended how, by "200", "left", another status or the kind of an error.
    rounds: of all requests but the probe's, some of which end when their clients happen to leave.
    num_rounds_launched: kernel by kernel: on a GPU, the first of each kind.
    engine_file_bytes: of engine_bytes, what is mapped from files, such as code as it is first run.
    device_bytes: memory in use on the GPU; None without one.
    """

    outcomes: dict[str, int]
    rounds: Rounds
    probe: Rounds
    num_aborted: float
    num_server_errors: float
    num_blocks_used: float
    num_rows_used: float
    num_rounds_launched: float
    api_bytes: int
    engine_bytes: int
    engine_file_bytes: int
    device_bytes: int | None


@dataclass(frozen=True)
class Check:
    """A finding and the most that it may be."""

    name: str
    found: float
    limit: float

    @property
    def is_met(self) -> bool:
        return self.found <= self.limit


def bring_up(server: Server, *, concurrency: int) -> float:
    """Has a GPU capture rounds of every rare kind; those that share their forward pass with prompts are
    plain, and there from the start. Returns how many bytes of the engine process each takes; 0 on a CPU."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        info = msgspec.convert(read_engine(client), EngineInfo)
        if info.device == "cpu":
            return 0.0
        before, bytes_before = read_metrics(client), _engine_bytes(server)
        max_rows = min(MAX_CHOICES * concurrency, info.max_running)
        bring_up_rounds(server, ADMIN_KEY, max_rows=max_rows, max_depth=info.depth)
        server.wait_until_idle()
        num_kinds = _rounds_launched(before, read_metrics(client))
        return max(0, _engine_bytes(server) - bytes_before) / max(1, num_kinds)


def soak(
    server: Server,
    *,
    num_requests: int,
    concurrency: int,
    num_processes: int,
    num_stretches: int = NUM_STRETCHES,
) -> Iterator[Stretch]:
    """Yields one stretch after the other, as they end. The server serves the embedded model, with
    SERVER_FLAGS."""
    asks = list(random_asks(num_requests // num_stretches))
    probe = list(probe_of(asks))
    context = get_context("spawn")
    with (
        ProcessPoolExecutor(num_processes, mp_context=context) as pool,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def run(asks: Sequence[Ask], salt: str) -> Counter[str]:
            """Sends the requests and waits until the server is idle."""
            parts = [asks[i::num_processes] for i in range(num_processes)]
            streams = -(-concurrency // num_processes)
            args = ([server.url] * num_processes, parts, [streams] * num_processes, [salt] * num_processes)
            outcomes = sum(pool.map(send_all, *args), Counter[str]())
            server.wait_until_idle()
            return outcomes

        has_gpu = read_engine(client)["device"] != "cpu"
        before = read_metrics(client)
        for number in range(num_stretches):
            outcomes = run(asks, f"{number}")
            between = read_metrics(client)
            outcomes += run(probe, "probe")
            after = read_metrics(client)
            yield _stretch(server, outcomes, before, between, after, has_gpu=has_gpu)
            before = after


def checks_of(stretches: Sequence[Stretch], graph_bytes: float = 0.0) -> list[Check]:
    """Returns what must hold after a soak: growth over the last half, drift from the first quarter to the
    last. graph_bytes: of the engine process, for each kind of round that comes late, as `bring_up` gives
    them."""
    half, quarter = len(stretches) // 2, len(stretches) // 4
    per_stretch = sum(stretches[0].outcomes.values())
    num_left = sum(s.outcomes.get("left", 0) for s in stretches)
    num_odd = sum(n for s in stretches for kind, n in s.outcomes.items() if kind not in ("200", "left"))
    probes = [stretch.probe for stretch in stretches]
    first, last = acceptance_length(probes[:quarter]), acceptance_length(probes[-quarter:])
    growth = max(LEAST_GROWTH_BYTES, GROWTH_BYTES_PER_REQUEST * per_stretch * half)
    num_late = sum(s.num_rounds_launched for s in stretches[half:])
    middle, end = stretches[half - 1], stretches[-1]
    checks = [
        Check("answers that are not 200", num_odd, 0),
        Check("5xx, as the server counts", sum(s.num_server_errors for s in stretches), 0),
        Check("blocks in use at the end of a stretch", max(s.num_blocks_used for s in stretches), 0),
        Check("rows in use at the end of a stretch", max(s.num_rows_used for s in stretches), 0),
        Check("share of left requests that ended otherwise",
              1 - min(1.0, sum(s.num_aborted for s in stretches) / max(num_left, 1)), 0.5),
        Check("growth of the API process, bytes", end.api_bytes - middle.api_bytes, growth),
        Check("growth of the engine process, bytes",
              end.engine_bytes - middle.engine_bytes, growth + graph_bytes * num_late),
        Check("drift of the acceptance length", abs(last / first - 1), MAX_DRIFT),
    ]  # fmt: skip
    if end.device_bytes is not None and middle.device_bytes is not None:
        grown = end.device_bytes - middle.device_bytes
        checks += [
            Check("growth of the GPU's memory, bytes", grown, DEVICE_GROWTH_BYTES),
            Check("kinds of rounds that came late", num_late, MAX_LATE_KINDS),
        ]
    return checks


def acceptance_length(parts: Sequence[Rounds]) -> float:
    return sum(part.num_tokens for part in parts) / sum(part.num_row_rounds for part in parts)


def probe_of(asks: Sequence[Ask]) -> Iterator[Ask]:
    """Returns the first requests that are never left. They have no stop strings: how many tokens follow one
    depends on how soon the engine is told."""
    unleft = (ask for ask in asks if not ask.is_left)
    for ask in itertools.islice(unleft, NUM_PROBES):
        yield Ask({name: value for name, value in ask.body.items() if name != "stop"})


def random_asks(number: int, seed: int = 0) -> Iterator[Ask]:
    """Returns requests with every field that changes sampling or answers, depths from 0 to all, a fifth of
    them left. The first quarter do without logits processors and log-probabilities: no prompts share a
    round's forward pass with those."""
    chance = random.Random(seed)
    text = files("headway.engine.demo").joinpath("heldout_prompts.json").read_text()
    texts = [entry["text"] for entry in json.loads(text)]
    for place in range(number):
        body = _random_body(chance, chance.choice(texts))
        if place < number // 4:
            body = {name: value for name, value in body.items() if name not in ADJUSTING_OR_SCORING}
        if chance.random() >= SHARE_LEFT:
            yield Ask(body)
            continue
        body |= {"max_tokens": 120, "ignore_eos": True}  # not over before its client leaves
        body.pop("stop", None)
        if body["stream"] and chance.random() < 0.8:
            yield Ask(body, leaves_after_pieces=chance.randint(0, 12))
        else:
            yield Ask(body, leaves_after_seconds=chance.uniform(0.0, 0.05))


def _random_body(chance: random.Random, text: str) -> dict[str, object]:
    max_tokens = chance.randint(1, 40)
    body: dict[str, object] = {
        "prompt": text[: chance.randint(1, 500)],
        "max_tokens": max_tokens,
        "seed": chance.getrandbits(63),
        "temperature": chance.choice([0.0, 0.0, 0.7, 1.0]),
        "stream": chance.random() < 0.7,
        "speculation": {"max_draft_tokens": chance.choice([0, 1, 2, 8, 8])},
    }
    fields: dict[str, object] = {
        "top_p": 0.9, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "logit_bias": {"17": 2.0, "300": -100.0}, "bad_words": ["self", "None"],
        "allowed_token_ids": list(range(1, 2000)), "min_tokens": min(4, max_tokens), "stop": ["\n\n"],
        "stop_token_ids": [200], "logprobs": 3, "n": MAX_CHOICES, "echo": True, "ignore_eos": True, "priority": 1,
        "return_token_ids": True,
    }  # fmt: skip
    return body | {name: value for name, value in fields.items() if chance.random() < 0.1}


def send_all(url: str, asks: Sequence[Ask], num_streams: int, salt: str) -> Counter[str]:
    """Sends requests from a process of its own. Half the prompts share blocks only with those of the same
    salt."""
    return asyncio.run(_send_all(url, asks, num_streams, salt))


async def _send_all(url: str, asks: Sequence[Ask], num_streams: int, salt: str) -> Counter[str]:
    outcomes = Counter[str]()
    waiting = iter(enumerate(asks))

    async def stream(client: httpx.AsyncClient) -> None:
        for number, ask in waiting:
            salted = {"cache_salt": salt} if number % 2 else {}
            outcomes[await send(client, ask, salted)] += 1

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(stream(client) for _ in range(num_streams)))
    return outcomes


async def send(client: httpx.AsyncClient, ask: Ask, salted: dict[str, str]) -> str:
    try:
        async with asyncio.timeout(ask.leaves_after_seconds):
            return await _read_answer(client, ask, ask.body | salted)
    except TimeoutError:
        return "left"
    except httpx.HTTPError as error:
        return type(error).__name__


async def _read_answer(client: httpx.AsyncClient, ask: Ask, body: dict[str, object]) -> str:
    num_pieces = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}"
        if ask.leaves_after_pieces == 0:
            return "left"
        content = b""
        async for piece in response.aiter_raw():
            content += piece
            num_pieces += piece.count(b"\n\n")
            if ask.leaves_after_pieces is not None and num_pieces >= ask.leaves_after_pieces:
                return "left"
    if b'"error":' in content and b'data: {"error"' in content:
        return "error event"
    is_whole = content.endswith(b"data: [DONE]\n\n") if body["stream"] else content.startswith(b"{")
    return "200" if is_whole else "cut off"


def _stretch(
    server: Server,
    outcomes: dict[str, int],
    before: dict[str, float],
    between: dict[str, float],  # its requests and the probe
    after: dict[str, float],
    *,
    has_gpu: bool,
) -> Stretch:
    changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return Stretch(
        outcomes=dict(outcomes),
        rounds=_rounds(before, between),
        probe=_rounds(between, after),
        num_aborted=changes.get('headway_requests_finished_total{reason="abort"}', 0.0),
        num_server_errors=sum(
            value
            for name, value in changes.items()
            if name.startswith("headway_http_responses_total{") and 'status="5' in name
        ),
        num_blocks_used=after['headway_kv_cache_blocks{state="used"}'],
        num_rows_used=after["headway_num_requests_running"],
        num_rounds_launched=_rounds_launched(before, after),
        api_bytes=_process_bytes(server.process.pid, "VmRSS"),
        engine_bytes=_engine_bytes(server),
        engine_file_bytes=_process_bytes(server.engine_pid(), "RssFile"),
        device_bytes=_device_bytes() if has_gpu else None,
    )


def _rounds(before: dict[str, float], after: dict[str, float]) -> Rounds:
    tokens, row_rounds = (f"headway_tokens_per_round_{part}" for part in ("sum", "count"))
    return Rounds(after[tokens] - before[tokens], after[row_rounds] - before[row_rounds])


def _rounds_launched(before: dict[str, float], after: dict[str, float]) -> float:
    """Returns the number of rounds that were no graph's."""
    rounds, replays = "headway_spec_decode_depth_count", "headway_graph_replays_total"
    return after[rounds] - before[rounds] - (after[replays] - before[replays])


def _engine_bytes(server: Server) -> int:
    return _process_bytes(server.engine_pid(), "VmRSS")


def _process_bytes(pid: int, name: str) -> int:
    """Returns a field of the process. name: as proc(5) has it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def _device_bytes() -> int:
    """Returns the memory in use on the first GPU, which nothing else is to use."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout) << 20
