"""Sends the same prompts to a running server twice, by the official client: cold, then warm. The texts must
be the same.

Any server of OpenAI's API will do. Each run of this script begins its prompts with a line of its own, so that
no cache holds them. Half of the requests are greedy, half are sampled with a seed.

    python tests/clients/same_texts.py http://localhost:8000/v1
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

try:
    import openai
except ModuleNotFoundError:
    sys.exit(f"the package openai is not installed: {sys.executable} -m pip install openai")

PROMPTS = Path(__file__).resolve().parents[2] / "engine/demo/heldout_prompts.json"
TEMPERATURE = 0.8
TELL_EVERY = 10  # texts


@dataclass(frozen=True)
class Run:
    """One run of all prompts."""

    name: str
    texts: list[str]
    num_cached: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a text differs."""
    arguments = _arguments(argv)
    prompts = _prompts(arguments.prompts, arguments.run or secrets.token_hex(4))
    with openai.OpenAI(base_url=arguments.url, api_key=arguments.api_key, timeout=600) as client:
        model = arguments.model or client.models.list().data[0].id
        send = partial(_run, client, model, prompts, arguments.max_tokens)
        most = arguments.concurrency
        cold, *warm = send("cold", 1), send("warm", 1), send(f"warm, {most} at once", most)
    has_difference = False
    print(
        f"cold: {len(prompts)} texts in {cold.seconds:.1f} s, {cold.num_cached:,} prompt tokens found in the cache"
    )
    for run in warm:
        differing = [i for i, (a, b) in enumerate(zip(cold.texts, run.texts, strict=True)) if a != b]
        has_difference |= bool(differing)
        print(
            f"{run.name}: {len(prompts) - len(differing)} of {len(prompts)} texts are the same, "
            f"{run.seconds:.1f} s, {run.num_cached:,} prompt tokens found in the cache"
        )
        for index in differing[:1]:
            print(f"prompt {index}:\n  cold: {cold.texts[index]!r}\n  then: {run.texts[index]!r}")
    return int(has_difference)


def _run(
    client: openai.OpenAI, model: str, prompts: Sequence[str], max_tokens: int, name: str, concurrency: int
) -> Run:
    done: list[int] = []

    def complete(index: int) -> tuple[str, int]:
        answer = client.completions.create(
            model=model,
            prompt=prompts[index],
            max_tokens=max_tokens,
            temperature=0.0 if index % 2 == 0 else TEMPERATURE,
            seed=index,
        )
        done.append(index)
        if len(done) % TELL_EVERY == 0:
            left = (time.monotonic() - started) / len(done) * (len(prompts) - len(done))
            print(
                f"{name}: {len(done)} of {len(prompts)}, about {left:.0f} s left", file=sys.stderr, flush=True
            )
        details = answer.usage and answer.usage.prompt_tokens_details
        return answer.choices[0].text, (details and details.cached_tokens) or 0

    started = time.monotonic()
    with ThreadPoolExecutor(concurrency) as threads:
        texts, cached = zip(*threads.map(complete, range(len(prompts))), strict=True)
    return Run(name, list(texts), sum(cached), time.monotonic() - started)


def _prompts(count: int, first_line: str) -> list[str]:
    """Source code that the embedded model has not seen, after a line of this run's own."""
    entries = json.loads(PROMPTS.read_text())
    return [f"# {first_line} {i}\n{entries[i % len(entries)]['text']}" for i in range(count)]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", metavar="URL", help="such as http://localhost:8000/v1")
    parser.add_argument("--prompts", type=int, default=100, help="(default: 100)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each text (default: 128)")
    parser.add_argument("--concurrency", type=int, default=32, help="of the last run (default: 32)")
    parser.add_argument("--model", help="(default: the server's first)")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--run", help="the first line of the prompts (default: random)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
