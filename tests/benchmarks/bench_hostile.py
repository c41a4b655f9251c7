"""How far hostile grammars disturb 16 running streams; make bench-hostile.

A fake engine makes a round every 20 ms, for 15 quiet seconds and then while a client sends each form in turn. Fails where a form
takes more than two seconds, is answered with anything but 200 and 400, or where the streams' 99th percentile of gaps between two
chunks grows to more than 1.5 times that of the quiet seconds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "support")]
from bench_text import ROUND_SECONDS, body_of, drain, send, streams
from headway_testing.api_process import Stream, api_process
from headway_testing.hostile_grammars import HOSTILE

QUIET_SECONDS = 15.0
MAX_SECONDS = 2.0
MAX_RATIO = 1.5
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


async def measure() -> tuple[float, float, dict[str, tuple[int, float]]]:
    """Returns the 99th percentiles of the gaps in the quiet seconds and beside the forms, and the answers."""
    with api_process(ROUND_SECONDS) as (process, url):
        threading.Thread(target=drain, args=[process], daemon=True).start()
        running = streams(url, num_events=20_000)
        readers = [asyncio.create_task(stream.read(url)) for stream in running]
        await asyncio.sleep(2)
        since = time.monotonic()
        await asyncio.sleep(QUIET_SECONDS)
        between = time.monotonic()
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-P", __file__, "send", url, stdout=asyncio.subprocess.PIPE
        )
        answers = json.loads((await sender.communicate())[0])
        until = time.monotonic()
        assert not any(reader.done() for reader in readers), "a stream ended before its time"
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        return p99_gap(running, since, between), p99_gap(running, between, until), answers


def main() -> int:
    quiet, beside, answers = asyncio.run(measure())
    ratio = beside / quiet
    slowest = max(answers, key=lambda name: answers[name][1])
    print(f"p99 gap {quiet * 1e3:.1f} ms, beside hostile grammars {beside * 1e3:.1f} ms, {ratio:.2f} times")
    print(
        f"slowest form {slowest}, {answers[slowest][1]:.2f} s; answers {[answers[name][0] for name in answers]}"
    )
    is_answered = all(status in (200, 400) and took <= MAX_SECONDS for status, took in answers.values())
    return 0 if is_answered and ratio <= MAX_RATIO else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["send"]:
        print(json.dumps(asyncio.run(send_all(sys.argv[2]))))
    else:
        sys.exit(main())
