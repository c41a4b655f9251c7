"""Compares answers of a server whose engine is killed meanwhile with those that it gave before."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from headway_testing.daemon import Server
from headway_testing.exact_http import first_difference, lasting
from headway_testing.random_requests import Body, random_body

COMPANY = 16
JOINED = {"text", "content", "reasoning", "reasoning_content", "arguments"}
Request = tuple[str, Body]


@dataclass
class Killing:
    """What was found. longest_pause_seconds: between two pieces of one stream. Mutable."""

    differences: list[str] = field(default_factory=list)
    num_compared: int = 0
    num_kills: int = 0
    longest_pause_seconds: float = 0.0
    longest_restart_seconds: float = 0.0


def mixed_requests(seed: int, count: int, vocab_size: int) -> list[Request]:
    """Returns random requests that run long enough to be hit; every second one is streamed, with its
    usage."""
    chance, found = random.Random(seed), list[Request]()
    while len(found) < count:
        path, body = random_body(chance, vocab_size, has_thinking=True)
        if body["max_tokens"]:
            body["max_tokens"] *= 4
        if len(found) % 2 and "best_of" not in body:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        found.append((path, body))
    return found


def merged(old: Any, new: Any, key: str = "") -> Any:
    """Returns what two chunks of a stream say together: texts and lists are joined, choices and calls by
    their index."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: merged(old.get(name), value, name) for name, value in new.items()}
    if isinstance(old, str) and isinstance(new, str) and key in JOINED:
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        if key not in ("choices", "tool_calls"):
            return old + new
        by_index = {entry["index"]: entry for entry in old}
        for entry in new:
            by_index[entry["index"]] = merged(by_index.get(entry["index"]), entry)
        return [by_index[index] for index in sorted(by_index)]
    return old if new is None else new


async def ask(client: httpx.AsyncClient, request: Request, killing: Killing) -> Any:
    """Returns status and content."""
    path, body = request
    if not body.get("stream"):
        response = await client.post(path, json=body)
        return response.status_code, lasting(response.json())
    content: Any = None
    async with client.stream("POST", path, json=body) as response:
        last = time.monotonic()
        async for data in _events(response):
            killing.longest_pause_seconds = max(killing.longest_pause_seconds, time.monotonic() - last)
            last = time.monotonic()
            content = merged(content, json.loads(data))
    return response.status_code, lasting(content)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield line.removeprefix("data: ")
        elif response.status_code != 200:
            yield line


async def answers_before_and_during(
    server: Server, requests: Sequence[Request], num_kills: int, chance: random.Random, *, stops: bool
) -> Killing:
    """Asks each request undisturbed, then goes on asking while the engine is killed. stops: every fourth kill
    is a SIGSTOP."""
    killing = Killing()
    async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False) as client:
        wanted = await asyncio.gather(*(ask(client, request, killing) for request in requests))
        killing.longest_pause_seconds = 0.0
        killer = asyncio.create_task(_kill(client, server, num_kills, chance, killing, stops=stops))
        numbers = itertools.cycle(range(len(requests)))

        async def go_on() -> None:
            while not killer.done():
                number = next(numbers)
                found = await ask(client, requests[number], killing)
                killing.num_compared += 1
                if found != wanted[number]:
                    place, *values = first_difference(wanted[number], found)
                    killing.differences.append(f"{place}: {values}\n    {json.dumps(requests[number])}")

        await asyncio.gather(*(go_on() for _ in range(COMPANY)))
        await killer
    return killing


async def _kill(
    client: httpx.AsyncClient,
    server: Server,
    num_kills: int,
    chance: random.Random,
    killing: Killing,
    *,
    stops: bool,
) -> None:
    for number in range(num_kills):
        # Streams get some way between two kills on a slow machine, too.
        await asyncio.sleep(chance.uniform(0.1, 1.0) * max(1.5, killing.longest_restart_seconds))
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP if stops and number % 4 == 1 else signal.SIGKILL)
        killed, killing.num_kills = time.monotonic(), number + 1
        while (await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.02)
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.05)
        killing.longest_restart_seconds = max(killing.longest_restart_seconds, time.monotonic() - killed)
