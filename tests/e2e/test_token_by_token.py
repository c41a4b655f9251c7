"""Answers over HTTP are what an oracle says that feeds tokens one by one and knows no rounds, no detokenizer.

Random requests: stop strings inside and across tokens, stop tokens, min_tokens, a few tokens more or less
than a round gives, and every limit around the context length; at once and as streams, many at a time, while
blocks run out. float64, where no two tokens tie by accident.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from headway_testing import tiny_tokenizers
from headway_testing.checkpoints import constructed_mimo, walk
from headway_testing.in_process import InProcessEngine
from headway_testing.one_by_one import Ask, answer, log_sum
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headway.engine.loading.checkpoint import load_model
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.server.app import create_app
from headway.server.generation.generation import choice_seed
from headway.server.requests.services import Services
from headway.server.telemetry.metrics import Metrics
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.timeout(1200)
AT_ONCE = 25
VOCAB, CONTEXT, DEPTH = 600, 48, 3
BLOCK_BYTES = (2 * 3 * 16 * 2 * 16 + 64) * 8  # keys and values of three layers, and a hidden state
NUM_BLOCKS = 8  # two requests at their longest: more than that run, so that some are preempted
END = 0  # the tokenizer's own end of text, which is no text
DEFAULT_MAX_TOKENS = 16
BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is right about most of its drafts, and whose text is full of broken characters."""
    path = constructed_mimo(
        tmp_path_factory.mktemp("model"), noise=0.06, vocab_size=VOCAB, max_position_embeddings=CONTEXT
    )
    config = (path / "config.json").read_text()
    tiny_tokenizers.save(path, tiny_tokenizers.byte_level(VOCAB))
    (path / "config.json").write_text(config)
    return path


@dataclass(frozen=True)
class Expected:
    """token_ids: all that usage counts."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    num_completion_tokens: int
    finish_reason: str


class Oracle:
    """The model, one token after the other, and the rules of docs/api.md in plain Python."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(
            str(folder),
            device=torch.device("cpu"),
            dtype="float64",
            make_draft=None,
            progress=lambda _: None,
        ).target
        content = json.loads((folder / "tokenizer.json").read_text())
        self._bytes = {
            token_id: bytes(BYTE_OF_CHARACTER[character] for character in token)
            for token, token_id in content["model"]["vocab"].items()
            if token_id != END
        } | {END: b""}

    def generate(self, body: dict[str, Any], max_tokens: int) -> tuple[list[int], list[float], FinishReason]:
        stop = {*body.get("stop_token_ids", ()), *(() if body.get("ignore_eos") else (END,))}
        sampling = SamplingParams(
            temperature=body["temperature"],
            min_tokens=body.get("min_tokens", 0),
            seed=choice_seed(body["seed"], 0),
        )
        made = answer(self._model, Ask(tuple(body["prompt"]), max_tokens, sampling, tuple(stop)))
        logprobs = [
            raw[token_id] - log_sum(raw)
            for token_id, raw in zip(made.token_ids, made.raw_logits, strict=True)
        ]
        return made.token_ids, logprobs, made.finish_reason

    def text(self, token_ids: list[int], *, is_whole: bool = True) -> str:
        """is_whole: an incomplete character at the end is shown as broken; else it is left out."""
        data = b"".join(self._bytes.get(token_id, b"") for token_id in token_ids)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=is_whole)

    def expected(self, body: dict[str, Any], max_tokens: int) -> Expected:
        ids, logprobs, reason = self.generate(body, max_tokens)
        shows_stop = body.get("include_stop_str_in_output", False)
        visible = ids[:-1] if reason is FinishReason.STOP and not shows_stop else ids
        stop, min_tokens = body.get("stop", []), body.get("min_tokens", 0)
        ripe = len(self.text(visible[:min_tokens], is_whole=False)) if min_tokens else 0
        for count in range(min_tokens + 1, len(visible) + 1):
            so_far = self.text(visible[:count], is_whole=False)
            if (cut := self._cut(so_far, stop, ripe, shows_stop=shows_stop)) is not None:
                return Expected(cut, ids[:count], logprobs[:count], count, "stop")
        text = self.text(visible)
        is_ripe = len(visible) > min_tokens or not min_tokens
        if is_ripe and (cut := self._cut(text, stop, ripe, shows_stop=shows_stop)) is not None:
            return Expected(cut, ids, logprobs, len(ids), "stop")
        return Expected(text, ids, logprobs, len(ids), reason.value)

    def _cut(self, text: str, stop: list[str], ripe: int, *, shows_stop: bool) -> str | None:
        """The stop string that ends first behind `ripe`, the longest of those that end together."""
        found = ((s, text.find(s, max(0, ripe - len(s) + 1))) for s in stop)
        places = [(start + len(s), start) for s, start in found if start >= 0]
        if not places:
            return None
        end, start = min(places)
        return text[: end if shows_stop else start]


def random_bodies(oracle: Oracle, num_requests: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [random_body(oracle, chance) for _ in range(num_requests)]


def random_body(oracle: Oracle, chance: random.Random) -> dict[str, Any]:
    """max_tokens from 1 to 2 K + 3, or more than a block, so that the request asks for blocks while it runs;
    every other prompt ends a few tokens before, at or behind the context's end."""
    is_long = chance.random() < 0.4
    max_tokens = chance.randint(17, 28) if is_long else chance.randint(1, 2 * DEPTH + 3)
    length = chance.choice([chance.randint(1, 20), CONTEXT - max_tokens + chance.choice([-1, 0, 0, 1])])
    prompt = walk(chance.randrange(1, VOCAB), min(length, CONTEXT), VOCAB)
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": chance.choice([0, 0, 1.0]),
        "seed": chance.getrandbits(63),
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": chance.random() < 0.3,
        "include_stop_str_in_output": chance.random() < 0.3,
        "speculation": {"max_draft_tokens": chance.choice([None, None, 0, 1, 2])},
        "stream": chance.random() < 0.5,
    }
    if chance.random() < 0.1:
        del body["max_tokens"]  # what the context leaves, at most the default
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    room = CONTEXT - len(prompt)
    likely = oracle.generate(body, max(1, min(room, max_tokens)))[0]
    if chance.random() < 0.5:
        body["stop_token_ids"] = [chance.randrange(VOCAB), *chance.sample(likely, 1)]
        most = min(body.get("max_tokens", DEFAULT_MAX_TOKENS), max(0, room))
        body["min_tokens"] = chance.randint(0, most)
    if chance.random() < 0.6:
        text = oracle.text(likely)
        body["stop"] = [piece_of(text, chance) for _ in range(chance.randint(1, 3))]
    return body


def piece_of(text: str, chance: random.Random) -> str:
    """Some of the text, now and then with an end that it does not go on with."""
    start = chance.randrange(max(1, len(text)))
    piece = text[start : start + chance.randint(1, 6)]
    return piece + chance.choice(["", "", "#"]) or "#"


async def send(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body; a stream is put together to the body that it says."""
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200 or not body["stream"]:
        return response.status_code, response.json()
    *lines, last = [line[6:] for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    *chunks, end = [json.loads(line) for line in lines]
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert [piece["finish_reason"] is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    whole = {
        "text": "".join(piece["text"] for piece in pieces),
        "finish_reason": pieces[-1]["finish_reason"],
        "token_ids": [i for piece in pieces for i in piece["token_ids"]],
        "logprobs": {"token_logprobs": [v for p in pieces for v in p["logprobs"]["token_logprobs"]]},
    }
    return 200, {"choices": [whole], "usage": end["usage"]}


def compare(body: dict[str, Any], status: int, got: dict[str, Any], oracle: Oracle) -> str:
    """Returns how the request ended."""
    length, room = len(body["prompt"]), CONTEXT - len(body["prompt"])
    if body.get("max_tokens", 1) > room:
        assert (status, got["error"]["code"]) == (400, "context_length_exceeded"), body
        return "refused"
    assert status == 200, (body, got)
    wanted = oracle.expected(body, body.get("max_tokens", min(DEFAULT_MAX_TOKENS, room)))
    (choice,) = got["choices"]
    assert choice["text"] == wanted.text, body
    assert choice["token_ids"] == wanted.token_ids, body
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted.logprobs, abs=1e-4), body
    assert choice["finish_reason"] == wanted.finish_reason, body
    usage = got["usage"]
    counts = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    num_tokens = wanted.num_completion_tokens
    assert counts == [length, num_tokens, length + num_tokens], body
    return "stop string" if wanted.finish_reason == "stop" and "stop" in body else wanted.finish_reason


def services_of(engine: InProcessEngine, tokenizer: Tokenizer) -> Services:
    return Services("tiny", engine, tokenizer, Metrics(lambda: engine.stats, lambda: 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_requests", [30, pytest.param(250, marks=pytest.mark.long)])
@pytest.mark.parametrize("reads_late", [False, True], ids=["read-at-once", "one-step-in-flight"])
async def test_random_requests_are_answered_as_if_tokens_came_one_by_one(
    folder: Path, reads_late: bool, num_requests: int
) -> None:
    oracle = Oracle(folder)
    config = EngineConfig(
        model_path=str(folder),
        dtype="float64",
        depth=DEPTH,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
        prefill_chunk=32,
    )
    bodies = random_bodies(oracle, num_requests, seed=10 if reads_late else 4)  # few, too, are of all kinds
    ends: list[str] = []
    async with InProcessEngine(config, reads_late=reads_late).running() as engine:
        transport = httpx.ASGITransport(create_app(services_of(engine, load_tokenizer(folder))))
        async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
            for first in range(0, len(bodies), AT_ONCE):
                some = bodies[first : first + AT_ONCE]
                answers = await asyncio.gather(*(send(client, body) for body in some))
                pairs = zip(some, answers, strict=True)
                ends += [compare(body, *given, oracle) for body, given in pairs]
        while engine.local.engine.scheduler.has_work:
            await asyncio.sleep(0.001)
    stats = engine.local.engine.scheduler.snapshot()
    assert (stats.num_kv_blocks_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
    counts = {end: ends.count(end) for end in ("refused", "stop string", "stop", "length")}
    assert min(counts.values()) >= num_requests // 25, f"too few of a kind: {counts}"
    assert stats.num_preemptions >= max(1, num_requests // 31), "blocks do not run out often enough"
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
