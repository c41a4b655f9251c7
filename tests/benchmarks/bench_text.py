"""How far large bodies and long prompts disturb 16 running streams; make bench-text.

A fake engine makes a round every 20 ms. Meanwhile clients send a body of 30 MiB, four of 7.6 MiB at once and
20 long prompts at once. Prints the worst gap between two chunks of a stream, the slowest /health and the
resident memory before and after; fails where a limit is passed. The streams' reader and the sender of the
bodies are processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from headway_testing.api_process import (
    TOKENS_PER_EVENT,
    Process,
    Stream,
    api_process,
    request,
    resident_bytes,
    source_ids,
    tokenizer,
)

ROUND_SECONDS = 0.02
NUM_STREAMS = 16
QUIET_EVENTS = 500
MAX_GAP_SECONDS = 0.06
MAX_HEALTH_SECONDS = 0.1
MAX_MEMORY_RATIO = 1.2
LARGE_BYTES = 7_600_000
PROMPT_CHARACTERS = 100_000
WARM_CHARACTERS = 1_000_000  # the library's cache of words fills, to a bound


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Seconds and bytes of one run. statuses: of the requests of each phase."""

    undisturbed_gap: float
    worst_gap: float
    worst_health: float
    memory_before: int
    memory_after: int
    statuses: dict[str, list[int]]
    seconds: float


async def measure() -> Disturbance:
    with api_process(ROUND_SECONDS) as (process, url):
        threading.Thread(target=drain, args=[process], daemon=True).start()
        undisturbed = streams(url, num_events=QUIET_EVENTS)
        await asyncio.gather(*(stream.read(url) for stream in undisturbed))
        await send(url, [body_of(url, "/tokenize", {"prompt": text(WARM_CHARACTERS)})])
        await asyncio.sleep(2)
        memory_before = resident_bytes(process.pid)
        started = time.monotonic()
        running = streams(url, num_events=20_000)
        readers = [asyncio.create_task(stream.read(url)) for stream in running]
        health: list[float] = []
        prober = asyncio.create_task(probe(url, health))
        await asyncio.sleep(1)
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-P", __file__, "send", url, stdout=asyncio.subprocess.PIPE
        )
        statuses = json.loads((await sender.communicate())[0])
        await asyncio.sleep(1)
        assert not any(reader.done() for reader in readers), "a stream ended before its time"
        for task in (*readers, prober):
            task.cancel()
        await asyncio.gather(*readers, prober, return_exceptions=True)
        seconds = time.monotonic() - started
        await asyncio.sleep(2)
        return Disturbance(
            worst_gap(undisturbed),
            worst_gap(running),
            max(health),
            memory_before,
            resident_bytes(process.pid),
            statuses,
            seconds,
        )


def worst_gap(streams: Sequence[Stream]) -> float:
    """Seconds between two chunks of one stream."""
    return max(b[0] - a[0] for s in streams for a, b in pairwise(s.pieces))


def drain(process: Process) -> None:
    """Reads what the engine reports, which would hold it up once the pipe is full."""
    assert process.stderr is not None
    for _ in process.stderr:
        pass


def streams(url: str, *, num_events: int) -> list[Stream]:
    return [
        Stream(number, request(url, [number, *source_ids()], TOKENS_PER_EVENT * num_events))
        for number in range(NUM_STREAMS)
    ]


async def probe(url: str, seconds: list[float]) -> None:
    """Asks for /health ten times a second."""
    head = f"GET /health HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    try:
        while True:
            started = time.monotonic()
            writer.write(head)
            await read_answer(reader)
            seconds.append(time.monotonic() - started)
            await asyncio.sleep(0.1)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> int:
    """The status, once the whole body has been read."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
    return int(head.split()[1])


# --- the sender ------------------------------------------------------------------------------------------


def text(num_characters: int) -> str:
    source: str = tokenizer().decode(source_ids())
    return (source * (num_characters // len(source) + 1))[:num_characters]


def body_of(url: str, path: str, fields: dict[str, object] | str) -> bytes:
    """fields: or the body as it stands."""
    body = fields if isinstance(fields, str) else json.dumps(fields)
    head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def send(url: str, requests: list[bytes]) -> list[int]:
    return list(await asyncio.gather(*(send_one(url, request) for request in requests)))


async def send_one(url: str, request: bytes) -> int:
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port, limit=1 << 20)
    try:
        writer.write(request)
        return await read_answer(reader)
    finally:
        writer.close()


async def send_all(url: str) -> dict[str, list[int]]:
    completions = "/v1/completions"
    large = text(LARGE_BYTES * 95 // 100)  # line breaks take two bytes in JSON
    cut = {"prompt": large, "truncate_prompt_tokens": 2000, "max_tokens": 1}
    phases = {
        "30 MiB": [body_of(url, completions, {"prompt": "x" * (30 * 2**20)})],
        "4 x 7.6 MiB": [
            body_of(url, "/tokenize", {"prompt": large}),
            body_of(url, completions, cut),
            body_of(url, "/tokenize", {"prompt": large, "return_token_strs": False}),
            body_of(url, completions, {"prompt": large, "max_tokens": 1}),
        ],
        "20 long prompts": [
            body_of(url, completions, {"prompt": text(PROMPT_CHARACTERS), "max_tokens": 1}) for _ in range(20)
        ],
    }
    statuses = {}
    for name, requests in phases.items():
        statuses[name] = await send(url, requests)
        await asyncio.sleep(1)
    return statuses


def main() -> int:
    run = asyncio.run(measure())
    ratio = run.memory_after / run.memory_before
    print(f"{NUM_STREAMS} streams for {run.seconds:.0f} s; statuses {run.statuses}")
    print(
        f"worst gap {run.worst_gap * 1e3:.0f} ms (at most {MAX_GAP_SECONDS * 1e3:.0f}), undisturbed "
        f"{run.undisturbed_gap * 1e3:.0f} ms"
    )
    print(f"slowest /health {run.worst_health * 1e3:.0f} ms (at most {MAX_HEALTH_SECONDS * 1e3:.0f})")
    print(f"memory {run.memory_before >> 20} MiB, then {run.memory_after >> 20} MiB, {ratio:.2f} times")
    is_within = run.worst_gap <= MAX_GAP_SECONDS and run.worst_health <= MAX_HEALTH_SECONDS
    return 0 if is_within and ratio <= MAX_MEMORY_RATIO else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["send"]:
        print(json.dumps(asyncio.run(send_all(sys.argv[2]))))
    else:
        sys.exit(main())
