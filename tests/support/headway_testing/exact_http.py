"""Exactness over HTTP: what real servers answer to random requests in a crowd, with drafts of every kind and
with preemption, is what one without drafts answers to each of them alone: texts, ids, finish reasons, calls
and log-probabilities, to the last digit.

    python -m headway_testing.exact_http --requests 1000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from headway_testing.chat_models import CONTROL_TOKENS, HERMES_TEMPLATE, MARKUP_TOKENS, scripted_model
from headway_testing.daemon import Server, start_server, stop_server
from headway_testing.families import save, tiny_model
from headway_testing.hybrid import LAYERS, constructed_hybrid
from headway_testing.random_requests import Body, random_body
from headway_testing.tiny_tokenizers import byte_level
from headway_testing.tiny_tokenizers import save as save_tokenizer

COMPANY = 24
CONTEXT = 1024  # two tools in a prompt take half of it
# Gates of 500 columns: a thread's part of a prompt's pass, or of a crowd's, ends within a row.
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 500, "max_position_embeddings": CONTEXT}
# Names of fields that differ between two answers to one request.
VOLATILE = {"id", "created", "system_fingerprint", "prompt_tokens_details", "accepted_prediction_tokens", "rejected_prediction_tokens"}  # fmt: skip
HEADWAY = ("--max-model-len", str(CONTEXT), "--max-running", "32", "--log-level", "error")


def _embedded(folder: Path) -> Path:
    """Writes the embedded model with a template and its tokens, whose weights are those of its first
    tokens."""
    scripted_model(folder)
    file, num_added = folder / "model.safetensors", len(CONTROL_TOKENS) + len(MARKUP_TOKENS)
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name][100 : 100 + num_added]])
    save_file(tensors, file, {"format": "pt"})
    return folder


def _tiny(architecture: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        tokenizer = byte_level()
        tokenizer.add_special_tokens(list(CONTROL_TOKENS))
        tokenizer.add_tokens(list(MARKUP_TOKENS))
        save_tokenizer(folder, tokenizer)
        vocab_size = tokenizer.get_vocab_size()
        if architecture in LAYERS:
            constructed_hybrid(folder, noise=0.1, architecture=architecture, vocab_size=vocab_size, **SIZES)
        else:
            save(tiny_model(architecture, vocab_size=vocab_size, **SIZES), architecture, folder)
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": HERMES_TEMPLATE}))
        return folder

    return make


@dataclass(frozen=True)
class Family:
    make: Callable[[Path], Path]
    bytes_a_token: int  # of the KV cache, so that a small one has room for few requests of a crowd
    has_head: bool


FAMILIES = {
    "mimo": Family(_embedded, 8 * 2 * 2 * 64 * 4, has_head=True),
    "qwen3": Family(_tiny("Qwen3ForCausalLM"), 3 * 2 * 2 * 16 * 4, has_head=False),
    "llama": Family(_tiny("LlamaForCausalLM"), 3 * 2 * 2 * 16 * 4, has_head=False),
    "gemma3": Family(_tiny("Gemma3ForCausalLM"), 3 * 2 * 2 * 16 * 4, has_head=False),
    "qwen3.5": Family(_tiny("Qwen3_5ForCausalLM"), 5 * 2 * 2 * 16 * 4, has_head=True),
    "qwen3.5-moe": Family(_tiny("Qwen3_5MoeForCausalLM"), 5 * 2 * 2 * 16 * 4, has_head=True),
}


def settings_of(family: Family) -> dict[str, tuple[str, ...]]:
    """Returns the flags of the servers that are compared with the one of depth 0, by name."""
    drafter = () if family.has_head else ("--drafter", "ngram")
    small = ("--kv-cache-memory", str(CONTEXT * 9 // 8 * family.bytes_a_token))
    found = {f"depth {depth}": ("--depth", depth, *drafter) for depth in ("auto", "8")}
    found["depth 3, preempted"] = ("--depth", "3", *drafter, *small)
    if family.has_head:
        found["n-grams"] = ("--depth", "3", "--drafter", "ngram")
    return found


@dataclass
class Outcome:
    """Mutable: the check adds to it. num_compared: answers beside those of the references."""

    num_requests: int = 0
    num_compared: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def report(self) -> str:
        facts = ", ".join(f"{count:,} {name}" for name, count in sorted(self.coverage.items()))
        statuses = ", ".join(f"{count} with {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.num_requests} requests ({statuses}), {self.num_compared} answers compared, "
            f"{len(self.differences)} differ; {facts}"
        )


def check(
    family: str,
    num_threads: int,
    num_requests: int,
    seed: int,
    settings: Sequence[str] | None = None,
    cpu_weights: str = "full",
) -> Outcome:
    """Compares answers. settings: names of those that run beside a crowd at depth 0; None: all. cpu_weights:
    those of every server."""
    chance, outcome = random.Random(f"{family}-{num_threads}-{seed}"), Outcome()
    with tempfile.TemporaryDirectory() as folder:
        model = str(FAMILIES[family].make(Path(folder) / family))
        vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        requests = [random_body(chance, vocab_size, has_thinking=True) for _ in range(num_requests)]
        flags = (*HEADWAY, "--threads", str(num_threads), "--cpu-weights", cpu_weights)
        large = ("--kv-cache-memory", "64MiB")
        with _running(model, *flags, *large, "--depth", "0") as server:
            wanted = asyncio.run(answers(server.url, requests, 1))
            _compare(
                f"{family}, {num_threads} threads, depth 0",
                requests,
                wanted,
                asyncio.run(answers(server.url, requests, COMPANY)),
                outcome,
            )
        outcome.num_requests = num_requests
        outcome.statuses.update(status for status, _ in wanted)
        outcome.refusals.update(content["error"]["message"] for status, content in wanted if status != 200)
        for name, own in settings_of(FAMILIES[family]).items():
            if settings is None or name in settings:
                with _running(model, *flags, *(() if "--kv-cache-memory" in own else large), *own) as server:
                    found = asyncio.run(answers(server.url, requests, COMPANY))
                    _count(server, outcome)
                _compare(f"{family}, {num_threads} threads, {name}", requests, wanted, found, outcome)
    return outcome


@contextmanager
def _running(*arguments: str) -> Iterator[Server]:
    server = start_server(*arguments)
    try:
        yield server
    finally:
        stop_server(server)


def _count(server: Server, outcome: Outcome) -> None:
    for fact, metric in (
        ("drafts accepted", "headway_spec_decode_num_accepted_tokens_total"),
        ("preemptions", "headway_preemptions_total"),
    ):
        outcome.coverage[fact] += int(server.metric(metric))


async def answers(url: str, requests: Sequence[tuple[str, Body]], company: int) -> list[tuple[int, Any]]:
    """Returns status and content of each answer. company: requests that are sent at the same time."""
    turns = asyncio.Semaphore(company)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def answer(path: str, body: Body) -> tuple[int, Any]:
            async with turns:
                response = await client.post(path, json=body)
                return response.status_code, lasting(response.json())

        return await asyncio.gather(*(answer(path, body) for path, body in requests))


def lasting(content: Any) -> Any:
    """Returns the content without what differs between two answers to the same request."""
    if isinstance(content, dict):
        return {key: lasting(value) for key, value in content.items() if key not in VOLATILE}
    return [lasting(part) for part in content] if isinstance(content, list) else content


def _compare(
    name: str,
    requests: Sequence[tuple[str, Body]],
    wanted: Sequence[tuple[int, Any]],
    found: Sequence[tuple[int, Any]],
    outcome: Outcome,
) -> None:
    outcome.num_compared += len(found)
    for number, (request, one, other) in enumerate(zip(requests, wanted, found, strict=True)):
        if one != other:
            place, *values = first_difference(one, other)
            outcome.differences.append(
                f"{name}, request {number}: {place}: {values}\n    {request[0]} {json.dumps(request[1])}"
            )


def first_difference(one: Any, other: Any, place: str = "") -> tuple[str, Any, Any]:
    """Returns where two contents differ first, and what stands there."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(
            first_difference(one[key], other[key], f"{place}.{key}") for key in one if one[key] != other[key]
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(first_difference(a, b, f"{place}[{index}]") for index, (a, b) in pairs if a != b)
    return place, one, other


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=1000, help="of all families and numbers of threads together"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--cpu-weights", choices=("full", "int8", "int4"), default="full")
    options = parser.parse_args(argv)
    slices = [(family, threads) for family in options.families for threads in options.threads]
    num_differing = num_requests = num_compared = 0
    lines = []
    for number, (family, threads) in enumerate(slices):
        began = time.monotonic()
        share = options.requests * (number + 1) // len(slices) - options.requests * number // len(slices)
        outcome = check(family, threads, share, options.seed, cpu_weights=options.cpu_weights)
        seconds = time.monotonic() - began
        lines.append(f"{family}, {threads} threads: {outcome.report()}; {seconds:.0f} s")
        lines += [f"  {count} refused: {message}" for message, count in outcome.refusals.items()]
        lines += [f"  {difference}" for difference in outcome.differences]
        num_differing += len(outcome.differences)
        num_requests, num_compared = num_requests + share, num_compared + outcome.num_compared
    print("\n".join(lines))  # after all that the servers printed
    print(
        f"{num_requests} requests, {num_compared} answers compared with depth 0 alone: {num_differing} differ"
    )
    return 1 if num_differing else 0


if __name__ == "__main__":
    sys.exit(main())
