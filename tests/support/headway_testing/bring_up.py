"""Rounds of every kind that a GPU replays as a graph, asked for before memory is watched.

Plain rounds are captured when the engine starts, those of rare kinds when they come a second time: with
logits that are adjusted, or kept for log-probabilities, at any depth, for any of the padded numbers of rows.
Under load that goes on for very long, and each graph takes memory of the engine process. What sets up a row
takes page-locked memory, which is kept: the most that it takes at once is asked for here too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx

from headway_testing.daemon import Server

# The first round of a kind is launched kernel by kernel, the second captured.
ROUNDS_OF_EACH_KIND = 3
# Rounds of 64 rows or more are padded to multiples of 16, smaller ones to finer steps.
MAX_STEP = 16
WAITING_SECONDS = 30.0
ADJUSTED: Mapping[str, object] = {
    "presence_penalty": 0.5, "logit_bias": {"17": 2.0}, "bad_words": ["self"],
    "allowed_token_ids": list(range(1, 2000)),
}  # fmt: skip
SCORED: Mapping[str, object] = {"logprobs": 3}


def bring_up_rounds(server: Server, admin_key: str, *, max_rows: int, max_depth: int) -> None:
    """Runs rounds of 1 to max_rows rows and 0 to max_depth drafts. The server serves the embedded model, and
    has no other clients."""
    headers = {"Authorization": f"Bearer {admin_key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        for depth in range(max_depth + 1):
            for fields in (ADJUSTED, SCORED, {**ADJUSTED, **SCORED}):
                _run_down(server, client, list(_bodies(max_rows, depth, fields)), max_rows)


def falling_rows(max_rows: int) -> list[int]:
    """From max_rows to 1: 40 -> 40, 35, 31, 28, ..., 3, 2, 1."""
    counts = [max_rows]
    while counts[-1] > 1:
        counts.append(counts[-1] - min(max(counts[-1] // 8, 1), MAX_STEP))
    return counts


def _bodies(max_rows: int, depth: int, fields: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yields requests whose rows all get the same tokens. Those with the same max_tokens end together, and
    each number of rows that is left has some rounds, however many drafts are right."""
    for place, (before, after) in enumerate(pairwise([*falling_rows(max_rows), 0]), start=1):
        yield {
            "prompt": ["def"] * (before - after),
            "max_tokens": 1 + place * ROUNDS_OF_EACH_KIND * (depth + 1),
            "temperature": 0.0,
            "ignore_eos": True,
            "speculation": {"max_draft_tokens": depth},
            **fields,
        }


def _run_down(
    server: Server, client: httpx.Client, bodies: Sequence[Mapping[str, object]], max_rows: int
) -> None:
    """Starts all requests at once."""
    client.post("/pause").raise_for_status()
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(client.post, "/v1/completions", json=body) for body in bodies]
        num_waiting, deadline = 0.0, time.monotonic() + WAITING_SECONDS
        while num_waiting < max_rows and time.monotonic() < deadline:
            time.sleep(0.05)
            num_waiting = server.metric("headway_num_requests_waiting")
        client.post("/resume").raise_for_status()
        for answer in answers:
            answer.result().raise_for_status()
    assert num_waiting == max_rows, f"{num_waiting} of {max_rows} rows began at once"
