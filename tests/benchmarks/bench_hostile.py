"""How far hostile requests disturb 16 running streams; make bench-hostile.

A fake engine makes a round every 20 ms, for 15 quiet seconds, then while a client sends each hostile form in
turn, and then beside 16 connections of one attacker for each kind of attack: grammars that take long to
check, bodies that stop, chats that the template takes long over. Meanwhile another asks for small grammars
and for chats. Fails where a form is answered with anything but 200 and 400 or takes more than two seconds,
where the streams' 99th percentile of gaps between two chunks grows to more than 1.5 times (forms) or 3 times
(attacks) that of the quiet seconds, where a small grammar or a chat takes more than a second, or where a
minute after the last attack the server's memory is more than 10 % above what it was.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "support")]
from headway_testing.api_process import Process, Stream, api_process, resident_bytes
from headway_testing.hostile_grammars import HOSTILE

from bench_text import ROUND_SECONDS, body_of, drain, send, streams

QUIET_SECONDS = 15.0
MAX_SECONDS = 2.0
MAX_RATIO = 1.5
ATTACKS = ("grammars", "bodies", "chats")
NUM_ATTACKERS = 16
ATTACK_SECONDS = 15.0
MAX_ATTACK_RATIO = 3.0
MAX_SMALL_SECONDS = 1.0
REST_SECONDS = 60.0
MAX_MEMORY_RATIO = 1.1
PROMPT = "def f(x):\n    return x"


def p99_gap(running: list[Stream], since: float, until: float) -> float:
    gaps = [b[0] - a[0] for stream in running for a, b in pairwise(stream.pieces) if since <= a[0] < until]
    return statistics.quantiles(gaps, n=100)[98]


async def send_all(url: str) -> dict[str, tuple[int, float]]:
    """Returns of each form the status and the seconds."""
    answers = {}
    for name, form in HOSTILE.items():
        fields = json.dumps({"prompt": PROMPT, "max_tokens": 1, form.param: None})
        value = form.value if form.kind == "json_schema" else json.dumps(form.value)
        body = fields.replace("null", value)  # as it stands: json.dumps would not nest so deep
        since = time.monotonic()
        (status,) = await send(url, [body_of(url, "/v1/completions", body)])
        answers[name] = (status, time.monotonic() - since)
    return answers


async def attack(url: str, kind: str) -> None:
    """Returns after some seconds."""
    attackers = [
        asyncio.create_task(repeat(url, kind, random.Random(f"{kind}{i}"))) for i in range(NUM_ATTACKERS)
    ]
    await asyncio.sleep(ATTACK_SECONDS)
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)


async def repeat(url: str, kind: str, chance: random.Random) -> None:
    """One connection after the other, each with a hostile request that was not sent before."""
    stalled = body_of(url, "/v1/completions", {"prompt": "x" * 7_900_000})
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            if kind == "grammars":
                pattern = f"(a{{1000}}){{1000}}{chance.random()}"
                fields = {"prompt": PROMPT, "max_tokens": 1, "guided_regex": pattern}
                await send(url, [body_of(url, "/v1/completions", fields)])
            elif kind == "chats":
                messages = [{"role": "user", "content": f"slow {chance.random()}"}]
                body = {"messages": messages, "max_tokens": 1}
                await send(url, [body_of(url, "/v1/chat/completions", body)])
            else:
                await stall(url, stalled, chance)


async def ask(url: str, name: str) -> list[float]:
    """Returns how long a client waits for each small grammar that is new, and for each chat."""
    chance, ends = random.Random(name), time.monotonic() + ATTACK_SECONDS - 1
    waits = []
    while time.monotonic() < ends:
        await asyncio.sleep(0.4)
        fields: dict[str, object] = {"prompt": PROMPT, "max_tokens": 1, "guided_regex": f"a{chance.random()}"}
        since = time.monotonic()
        assert await send(url, [body_of(url, "/v1/completions", fields)]) == [200]
        between = time.monotonic()
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
        assert await send(url, [body_of(url, "/v1/chat/completions", chat)]) == [200]
        waits += [between - since, time.monotonic() - between]
    return waits


async def stall(url: str, request: bytes, chance: random.Random) -> None:
    """Sends all but the end, and leaves after a while."""
    _, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    try:
        writer.write(request[:-10])
        await writer.drain()
        await asyncio.sleep(chance.uniform(0.2, 3.0))
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds and bytes. attacks: by kind, the 99th percentile of gaps and the longest wait of another."""

    quiet: float
    forms: float
    answers: dict[str, tuple[int, float]]
    attacks: dict[str, tuple[float, float]]
    memory_before: int
    memory_after: int


async def measure() -> Run:
    with (
        TemporaryDirectory() as folder,
        api_process(ROUND_SECONDS, template=slow_template(folder)) as (process, url),
    ):
        threading.Thread(target=drain, args=[process], daemon=True).start()
        running = streams(url, num_events=50_000)
        readers = [asyncio.create_task(stream.read(url)) for stream in running]
        await warm_up(url)
        memory_before = server_bytes(process)
        since = time.monotonic()
        await asyncio.sleep(QUIET_SECONDS)
        quiet = p99_gap(running, since, since := time.monotonic())
        answers = await sent_from_elsewhere("send", url)
        forms = p99_gap(running, since, time.monotonic())
        attacks = {}
        for kind in ATTACKS:
            since = time.monotonic()
            _, waits = await asyncio.gather(
                sent_from_elsewhere("attack", url, kind), sent_from_elsewhere("ask", url, kind)
            )
            attacks[kind] = p99_gap(running, since, time.monotonic()), max(waits)
            await asyncio.sleep(3)
        await asyncio.sleep(REST_SECONDS)
        memory_after = server_bytes(process)
        assert not any(reader.done() for reader in readers), "a stream ended before its time"
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        return Run(quiet, forms, answers, attacks, memory_before, memory_after)


def slow_template(folder: str) -> str:
    """Returns the name of a template that takes all the time there is over some messages."""
    path = Path(folder) / "slow.jinja"
    path.write_text(
        "{% if messages[0].content.startswith('slow') %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    return str(path)


async def warm_up(url: str) -> None:
    """What is loaded once is no growth: one body, one grammar and one chat of each size."""
    for request in (
        body_of(url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "guided_regex": "a"}),
        body_of(
            url, "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
        ),
        body_of(url, "/tokenize", {"prompt": PROMPT * 50_000}),
    ):
        await send(url, [request])
    await asyncio.sleep(2)


async def sent_from_elsewhere(*arguments: str) -> Any:
    """Returns what this program prints in a process of its own."""
    sender = await asyncio.create_subprocess_exec(
        sys.executable, "-P", __file__, *arguments, stdout=asyncio.subprocess.PIPE
    )
    return json.loads((await sender.communicate())[0])


def server_bytes(process: Process) -> int:
    """Of the API process and of those that check grammars and render chats; pages that they share count for
    each."""
    found = [process.pid]
    for pid in found:
        command = ["pgrep", "-P", str(pid)]
        found += map(int, subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())
    return sum(map(resident_bytes, found))


def main() -> int:
    run = asyncio.run(measure())
    print(
        f"p99 gap {run.quiet * 1e3:.1f} ms; beside hostile forms {run.forms * 1e3:.1f} ms, {run.forms / run.quiet:.2f} times"
    )
    slowest = max(run.answers, key=lambda name: run.answers[name][1])
    print(
        f"slowest form {slowest}, {run.answers[slowest][1]:.2f} s; answers {[status for status, _ in run.answers.values()]}"
    )
    for kind, (gap, wait) in run.attacks.items():
        print(f"beside {NUM_ATTACKERS} connections of {kind}: p99 gap {gap * 1e3:.1f} ms, {gap / run.quiet:.2f} times; "
              f"longest wait for a small grammar or a chat {wait:.2f} s")  # fmt: skip
    ratio = run.memory_after / run.memory_before
    print(f"memory {run.memory_before >> 20} MiB, then {run.memory_after >> 20} MiB, {ratio:.2f} times")
    is_answered = all(status in (200, 400) and took <= MAX_SECONDS for status, took in run.answers.values())
    is_calm = all(
        gap <= MAX_ATTACK_RATIO * run.quiet and wait <= MAX_SMALL_SECONDS
        for gap, wait in run.attacks.values()
    )
    is_within = is_answered and is_calm and run.forms <= MAX_RATIO * run.quiet and ratio <= MAX_MEMORY_RATIO
    return 0 if is_within else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["send"]:
        print(json.dumps(asyncio.run(send_all(sys.argv[2]))))
    elif sys.argv[1:2] == ["attack"]:
        print(json.dumps(asyncio.run(attack(*sys.argv[2:]))))
    elif sys.argv[1:2] == ["ask"]:
        print(json.dumps(asyncio.run(ask(*sys.argv[2:]))))
    else:
        sys.exit(main())
