"""The engine on a GPU: bfloat16, rounds replayed from graphs. What the CPU's tests promise in fp32 they
promise here too when they run on a machine with a GPU; this file has what only a GPU can show.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.exactness import Case, generate, generate_with, logits_of
from headway_testing.families import CLASSES
from headway_testing.local import LateRunner, LocalEngine
from headway_testing.oracle import bfloat16_logits
from headway_testing.padded import PaddedLaunches, SplitSteps
from headway_testing.poison import PoisoningRunner

from headway.engine.bench.shape import SHAPES
from headway.engine.demo.heldout import heldout_prompts
from headway.engine.execution import graphs
from headway.engine.execution.results import StepHandle
from headway.engine.execution.runner import Runner
from headway.engine.loop import EngineLoop
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams, ThinkingBudget
from headway.engine.scheduling.plan import Plan
from headway.kernels import has_float8_products
from headway.kernels.linear import _hopper_core as _streamed
from headway.kernels.linear import dispatch

pytestmark = pytest.mark.gpu

DEMO = files("headway.engine.demo")
MODEL = str(DEMO)
MAX_ULPS, MAX_NOISE, MAX_SHARE_BEYOND = 2, 8, 0.05
NARROW = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
GREEDY = SamplingParams(temperature=0.0)
# Of a log-probability, where products round their sums otherwise.
MAX_SCORE_ERROR = 0.1
MAX_LEFT_BYTES = 64 << 20
SPARE_BYTES = 64 << 20
# Its arguments: a configuration, prompts. Prints the kernels compiled, the bytes reserved, and the texts.
START = """
import json, sys
import torch, triton
from headway_testing.local import LocalEngine
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.logs import configure_logging

configure_logging("info", "text")
compiled = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else compiled.append(src.name)
engine = LocalEngine(EngineConfig(**json.loads(sys.argv[1])))
engine.engine.runner.capture(range(engine.engine.info.depth + 1), progress=lambda _: None)
torch.cuda.empty_cache()
reserved = torch.cuda.memory_reserved()
ids = [engine.submit(prompt, max_tokens=24) for prompt in json.loads(sys.argv[2])]
engine.run()
print(json.dumps([len(compiled), reserved, [engine.outputs[i].token_ids for i in ids]]))
"""


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return [tuple(text) for text in heldout_prompts()[:64]]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the 7B shape, two layers of it: its products take kernels that narrow ones do not."""
    return folder_of(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def middle_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As wide as models are that take few launches, without drafts: some of its products stream."""
    folder = tmp_path_factory.mktemp("middle")
    return folder_of(folder, hidden_size=2048, num_attention_heads=16, num_nextn_predict_layers=0)


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a Qwen3.5 shape: three layers with recurrent state and one of attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = json.loads((SHAPES / "qwen3.5-0.8b" / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 4, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def folder_of(folder: Path, **changes: int) -> str:
    shape = json.loads((SHAPES / "mimo-7b" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 2} | changes))
    return str(folder)


def forget_compiled_kernels() -> None:
    """As in a new process: else a kernel that an earlier test compiled would not count as missing."""
    triton = pytest.importorskip("triton")
    for kernel in gc.get_objects():
        # isinstance would ask some objects for attributes that warn.
        if issubclass(type(kernel), triton.JITFunction):
            kernel.device_caches.clear()


def config_of(**changes: object) -> EngineConfig:
    return EngineConfig(**({"model_path": MODEL, "dtype": "bfloat16", "depth": 3} | changes))  # type: ignore[arg-type]


@dataclass
class Flips:
    """Texts that differ; of these, those where the two tokens' exact logits are more than MAX_ULPS of
    bfloat16 apart."""

    count: int = 0
    beyond: int = 0


def count_flips(cases: list[Case], wanted: list[list[int]], got: list[list[int]]) -> Flips:
    """Each differs at a place where the exact logits are within MAX_ULPS, or within what rounding does there.

    Where the residual stream is large, bfloat16 rounds it by far more than MAX_ULPS of a logit. The measure
    is transformers: the root mean square of its bfloat16 logits' errors at that place, of which two of its
    own logits are up to 7 apart (24 held-out prompts, 2,400 places).
    """
    flips = Flips()
    for case, first, second in zip(cases, wanted, got, strict=True):
        if first == second:
            continue
        flips.count += 1
        place = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
        tokens = [*case.prompt, *first[:place]]
        logits = logits_of(MODEL, tokens)
        a, b = float(logits[first[place]]), float(logits[second[place]])
        ulp = 2.0 ** (math.floor(math.log2(max(abs(a), abs(b)))) - 7)
        noise = float((bfloat16_logits(MODEL, tokens) - logits).pow(2).mean().sqrt())
        gap = f"{abs(a - b) / ulp:.2f} ulps, {abs(a - b) / noise:.1f} times transformers' rounding errors"
        print(f"token {place}: {first[place]} or {second[place]}, {gap} apart")
        if abs(a - b) > MAX_ULPS * ulp:
            flips.beyond += 1
            assert abs(a - b) <= MAX_NOISE * noise
    return flips


@pytest.mark.timeout(300)
def test_depth_and_batch_change_bfloat16_text_at_ties_only(prompts: list[tuple[int, ...]]) -> None:
    cases = [Case(prompt, 100, GREEDY) for prompt in prompts]
    alone = LocalEngine(config_of(depth=0, prefix_caching=False))
    wanted = [generate_with(alone, [case])[0] for case in cases]
    total = Flips()
    for depth in range(5):
        flips = count_flips(cases, wanted, generate(cases, config_of(depth=depth)))
        print(f"depth {depth}, {len(cases)} rows: {flips.count} texts differ from those of depth 0, one row")
        total = Flips(total.count + flips.count, total.beyond + flips.beyond)
    print(f"{total.beyond} of {total.count} at logits more than {MAX_ULPS} ulps apart")
    assert total.beyond <= MAX_SHARE_BEYOND * 5 * len(cases)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("dtype", "depth", "chunk"), [("float32", 3, 256), ("bfloat16", 3, 256), ("bfloat16", 0, 1024)]
)
def test_graphs_replay_what_launches_do(
    prompts: list[tuple[int, ...]], dtype: str, depth: int, chunk: int
) -> None:
    """The same kernels over the same rows: equal to the last bit, penalties and log-probabilities included.

    Results are read late by both, or the faster would see its rows end sooner, and other rows round
    otherwise.
    """
    changes = [{}, {"temperature": 0.8, "top_p": 0.95}, {"frequency_penalty": 0.5}, {"num_logprobs": 3}]
    cases = [
        Case(prompt, 60, SamplingParams(**({"temperature": 0.0, "seed": i} | changes[i % 4])))  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts[:24])
    ]
    config = config_of(dtype=dtype, depth=depth, prefix_caching=False, prefill_chunk=chunk)
    engines = [LocalEngine(config, reads_late=True) for _ in range(2)]
    engines[0].engine.runner.capture([depth], progress=lambda _: None)
    launching = engines[1].engine.runner
    assert launching.grid is not None
    padded = PaddedLaunches(launching, launching.grid)
    assert generate_with(engines[0], cases) == generate_with(engines[1], cases)
    for i in range(3, 24, 4):
        assert engines[0].outputs[i].logprobs == engines[1].outputs[i].logprobs
    assert max(key.num_prompt_tokens for key in padded.prompts) == chunk, (
        "prefills of several sizes are compared too"
    )
    for engine in engines:
        for i, prompt in enumerate(prompts[24:48]):
            engine.submit(prompt, max_tokens=60 + i)
            if i >= 20:
                engine.step()
    assert [o.token_ids for o in engines[0].run().values()] == [
        o.token_ids for o in engines[1].run().values()
    ]
    assert padded.mixed, "and rounds with prompts"


@pytest.mark.timeout(300)
def test_replayed_catching_up_leaves_what_launches_leave(prompts: list[tuple[int, ...]]) -> None:
    """Spells of rounds without drafts, long enough to fill the pending places: the drafts after them are
    accepted alike."""
    engines = [LocalEngine(config_of(prefix_caching=False), reads_late=True) for _ in range(2)]
    engines[0].engine.runner.capture(range(4), progress=lambda _: None)
    launching = engines[1].engine.runner
    assert launching.grid is not None
    padded = PaddedLaunches(launching, launching.grid)
    results = []
    for engine in engines:
        for prompt in prompts[:5]:
            engine.submit(prompt, max_tokens=260)
        for depth in (0, 3):
            engine.engine.scheduler.set_depth(depth)
            for _ in range(90):
                engine.step()
        results.append([(o.token_ids, o.num_accepted) for o in engine.run().values()])
    assert results[0] == results[1]
    assert sum(key.catches_up for key in padded.launched) > 1
    assert sum(accepted for _, accepted in results[0]) > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("depth", [0, 3])
def test_two_graphs_of_a_step_give_what_one_gives(prompts: list[tuple[int, ...]], depth: int) -> None:
    """One up to the logits, one from sampling on: rounds, prompts, and rounds with prompts."""
    config = config_of(depth=depth, prefix_caching=False, prefill_chunk=256, mixed_above_tokens=4)
    engines = [LocalEngine(config, reads_late=True) for _ in range(2)]
    engines[0].engine.runner.capture([depth], progress=lambda _: None)
    runner = engines[1].engine.runner
    assert runner.grid is not None
    split = SplitSteps(runner, runner.grid)
    for engine in engines:
        for i, prompt in enumerate(prompts[:32]):
            wish: dict[str, object] = {"temperature": 0.7 * (i % 2), "seed": i}
            engine.submit(prompt, max_tokens=50 + i, sampling=SamplingParams(**wish))  # type: ignore[arg-type]
            if i > 16:
                engine.step()
    assert [o.token_ids for o in engines[0].run().values()] == [
        o.token_ids for o in engines[1].run().values()
    ]
    replayed = set(split._halves)
    assert any(key.num_rows and key.num_prompt_tokens for key in replayed), "rounds with prompts"
    assert any(key.num_rows and not key.num_prompt_tokens for key in replayed), "rounds"


class NeverWaiting:
    """A runner for which to wait for the device is an error, but where a round is run for the first time, or
    captured."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def launch(self, plan: Plan) -> StepHandle:
        try:
            torch.cuda.set_sync_debug_mode("error")
            return self._runner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(("depth", "chunk"), [(3, 256), (0, 600)])
def test_launches_never_wait_for_the_device(prompts: list[tuple[int, ...]], depth: int, chunk: int) -> None:
    """Whatever a request asks for, long prompts, found prefixes and rows that come and go among them."""
    config = config_of(max_running=8, prefill_chunk=chunk, depth=depth, mixed_above_tokens=4)
    engine = LocalEngine(config, reads_late=True)
    engine.engine.runner.capture([depth], progress=lambda _: None)
    late = LateRunner(NeverWaiting(engine.engine.runner))
    engine.loop = EngineLoop(engine.engine.scheduler, late, engine.post)
    wishes: list[dict[str, object]] = [
        {},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
        {"thinking_budget": ThinkingBudget(4, 77)},
        {"logit_bias": {5: 3.0}, "min_tokens": 4, "bad_words_token_ids": [[7], [8, 9]]},
        {"allowed_token_ids": list(range(100, 400))},
        {"num_logprobs": 2, "num_prompt_logprobs": 1, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ]
    for i, prompt in enumerate(prompts[:20]):
        sampling = SamplingParams(seed=i, **wishes[i % len(wishes)])  # type: ignore[arg-type]
        engine.submit(prompt * (9 if i % 7 == 0 else 1), max_tokens=3 + 5 * (i % 4), sampling=sampling)
    outputs = engine.run()
    assert all(output.finish_reason is not None for output in outputs.values())


def test_graphs_captured_later_leave_prompts_their_memory(
    wide_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card with little more than what the largest step takes: rounds whose logits are kept, of ever
    other sizes, find a graph or none, and a prompt as long as a step allows is computed behind them."""
    chunks = {"prefill_chunk": 8192}
    sizes = {"max_running": 128, "kv_cache_memory_bytes": 1 << 30}
    engine = LocalEngine(config_of(model_path=wide_model, load_format="dummy", **chunks, **sizes))
    runner = engine.engine.runner
    runner.capture(range(4), progress=lambda _: None)
    assert runner.graphs is not None
    memory = runner.graphs.memory
    torch.cuda.empty_cache()
    total = torch.cuda.memory_reserved() + memory.reserve_bytes + SPARE_BYTES

    def available(device: torch.device) -> int:
        torch.cuda.empty_cache()
        return total - torch.cuda.memory_reserved()

    monkeypatch.setattr(graphs, "available_bytes", available)
    torch.cuda.set_per_process_memory_fraction(total / torch.cuda.get_device_properties(0).total_memory)
    try:
        sampling = SamplingParams(seed=1, num_logprobs=2, logit_bias={5: 1.0})
        for i in range(128):
            engine.submit([i + 1] * 8, max_tokens=8 + 4 * i, sampling=sampling)
        engine.run()
        prompt = engine.submit([7] * 8192, max_tokens=4)
        texts = engine.run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert runner.graphs is not None
    assert {text.finish_reason for text in texts.values()} == {FinishReason.LENGTH}
    assert any(key.keeps_logits for key in runner.graphs._graphs), "some found room"
    assert runner.graphs._is_too_large, "and some none"
    assert len(texts[prompt].token_ids) == 4


@pytest.mark.parametrize("tokens", [5, 17, 40])
def test_products_whose_weights_stream_give_the_same_probabilities(
    wide_model: str, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Of a prompt's tokens, scored as it is computed, and of the text, for as long as it is the same: alone,
    and with two others, whose prompts are 18 and 54 tokens together, then more than stream."""
    chance = random.Random(tokens)
    prompts = [[chance.randrange(100_000) for _ in range(tokens + i)] for i in range(3)]
    sampling = SamplingParams(temperature=0.0, num_logprobs=1, num_prompt_logprobs=1)
    runs = []
    for streams in (True, False):
        if not streams:
            monkeypatch.setattr(_streamed, "has_bulk_copies", lambda x: False)
        engine = LocalEngine(
            config_of(model_path=wide_model, load_format="dummy", max_running=4, fast_math=True)
        )
        for prompt in prompts:
            engine.submit(prompt, max_tokens=8, sampling=sampling)
            engine.run()
        for prompt in prompts:
            engine.submit(prompt, max_tokens=8, sampling=sampling)
        runs.append(list(engine.run().values()))
        del engine
        torch.cuda.empty_cache()
    found: list[tuple[float, float]] = []
    for streamed, plain in zip(*runs, strict=True):
        assert streamed.prompt_logprobs is not None
        assert plain.prompt_logprobs is not None
        found += zip(streamed.prompt_logprobs.logprobs, plain.prompt_logprobs.logprobs, strict=True)
        texts = zip(streamed.token_ids, plain.token_ids, strict=True)
        num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], texts))
        found += zip(streamed.logprobs.logprobs[:num_same], plain.logprobs.logprobs[:num_same], strict=True)
    assert len(found) > 6 * tokens
    assert max(abs(a - b) for a, b in found) < MAX_SCORE_ERROR
    if torch.cuda.get_device_capability()[0] == 9:
        assert any(a != b for a, b in found), "both took the same kernels"


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"]
)
def test_fused_products_give_the_same_probabilities(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a narrow model of each family: scores of prompts and of the text, for as long as it is the same."""
    config = CLASSES[architecture][0](**NARROW, architectures=[architecture])
    config.save_pretrained(tmp_path)
    chance = random.Random(0)
    prompts = [[chance.randrange(4096) for _ in range(5 + i)] for i in range(3)]
    sampling = SamplingParams(temperature=0.0, num_logprobs=1, num_prompt_logprobs=1)
    runs = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr(dispatch, "is_short_stream", lambda *_: False)
        config = config_of(
            model_path=str(tmp_path), load_format="dummy", depth=0, max_running=4, fast_math=True
        )
        engine = LocalEngine(config)
        for prompt in prompts:
            engine.submit(prompt, max_tokens=8, sampling=sampling)
        runs.append(list(engine.run().values()))
        del engine
        torch.cuda.empty_cache()
    found: list[tuple[float, float]] = []
    for fused, single in zip(*runs, strict=True):
        assert fused.prompt_logprobs is not None
        assert single.prompt_logprobs is not None
        found += zip(fused.prompt_logprobs.logprobs, single.prompt_logprobs.logprobs, strict=True)
        texts = zip(fused.token_ids, single.token_ids, strict=True)
        num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], texts))
        found += zip(fused.logprobs.logprobs[:num_same], single.logprobs.logprobs[:num_same], strict=True)
    assert len(found) >= 15
    assert max(abs(a - b) for a, b in found) < MAX_SCORE_ERROR
    assert any(a != b for a, b in found), "both used the same kernels"


@pytest.mark.parametrize(
    ("depth", "head", "width"),
    [
        (0, "auto", ""),
        (3, "auto", ""),
        (3, "int4", ""),
        (0, "auto", "middle"),
        (0, "auto", "wide"),
        (3, "auto", "wide"),
        (0, "auto", "hybrid"),
        (3, "auto", "hybrid"),
    ],
)
def test_nothing_is_compiled_once_requests_are_served(
    prompts: list[tuple[int, ...]],
    wide_model: str,
    middle_model: str,
    hybrid_model: str,
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    head: str,
    width: str,
) -> None:
    """A kernel takes about a second to compile, in which no stream gets a token. Not so after more than 8,192
    keys."""
    triton = pytest.importorskip("triton")
    if head == "int4" and not has_float8_products(torch.device("cuda")):
        pytest.skip("the device has no products of float8")
    path = {"": None, "middle": middle_model, "wide": wide_model, "hybrid": hybrid_model}[width]
    model = {"model_path": path, "load_format": "dummy"} if path else {}
    forget_compiled_kernels()
    config = config_of(max_running=32, prefill_chunk=4096, depth=depth, draft_lm_head=head, **model)
    engine = LocalEngine(config)
    engine.engine.runner.capture([depth], progress=lambda _: None)
    compiled: list[str] = []

    def note(*, fn: Any, key: str, **_: object) -> None:
        compiled.append(f"{fn.name} {key}")

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    for num_prompts in (1, 2, 3, 5, 8, 15, 16, 31):
        for tokens in (1, 7, 100, 128, 600, 700, 1024, 1500, *([3000] if num_prompts <= 3 else [])):
            long = prompts[num_prompts] * 32
            for i in range(num_prompts):
                sampling = GREEDY if i % 2 else SamplingParams(temperature=0.8, top_p=0.9, seed=i)
                if i == 1:
                    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
                if i == 4:
                    sampling = SamplingParams(
                        frequency_penalty=0.5, min_tokens=3, bad_words_token_ids=[[5, 6]], seed=i
                    )
                engine.submit(long[i : i + tokens - i % 2 * (tokens > 1)], max_tokens=9, sampling=sampling)
            engine.run()
    assert not compiled, "\n".join(compiled)


def start_alone(cache: Path, prompts: list[tuple[int, ...]]) -> tuple[int, int, list[list[int]], str]:
    """(kernels compiled, bytes reserved, texts, log) of an engine in a process of its own."""
    config = {
        "model_path": MODEL,
        "dtype": "bfloat16",
        "depth": 3,
        "max_running": 16,
        "kv_cache_memory_bytes": 1 << 30,
    }
    command = [sys.executable, "-P", "-c", START, json.dumps(config), json.dumps(prompts)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return *json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_cold_start_compiles_in_worker_processes_and_leaves_nothing_else(
    prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    cold, cold_bytes, cold_texts, cold_log = start_alone(tmp_path, prompts[:8])
    warm, warm_bytes, warm_texts, warm_log = start_alone(tmp_path, prompts[:8])
    found = re.search(r"compiled (\d+) kernels", cold_log)
    assert found is not None, cold_log
    print(f"{found[0]} in all, {cold} in the engine's own process")
    assert int(found[1]) > 2 * cold, "most of them in worker processes"
    assert warm == 0
    assert not re.search(r"compiled \d+ kernels|rehearsed", warm_log), "nothing to rehearse"
    assert "the rehearsal failed" not in cold_log + warm_log
    assert "were not compiled by worker processes" not in cold_log + warm_log
    assert abs(cold_bytes - warm_bytes) < MAX_LEFT_BYTES
    assert (
        cold_texts
        == warm_texts
        == generate([Case(p, 24, GREEDY) for p in prompts[:8]], config_of(max_running=16))
    )


@pytest.mark.timeout(500)
def test_every_number_of_rows_in_every_wave(tmp_path: Path) -> None:
    """1 to 130 at once on graphs of few sizes, then waves that shrink to one, aborts and block boundaries;
    rows and blocks that belong to nobody hold NaN."""
    path = str(constructed_mimo(tmp_path / "model", noise=0.06, max_position_embeddings=160))
    chance = random.Random(0)
    cases = [
        Case(tuple(chance.randrange(128) for _ in range(14 + i % 37)), 1 + i % 9, GREEDY) for i in range(130)
    ]
    plain = LocalEngine(
        EngineConfig(model_path=path, dtype="float32", depth=0, device="cpu", max_running=130)
    )
    wanted = generate_with(plain, cases)
    config = EngineConfig(model_path=path, dtype="float32", depth=3, max_running=130)
    engine = LocalEngine(config)
    poisoned = PoisoningRunner(engine.engine.runner, engine.engine.scheduler)
    engine.loop = EngineLoop(engine.engine.scheduler, LateRunner(poisoned), engine.post)
    for num_rows in range(1, 131):
        assert generate_with(engine, cases[:num_rows]) == wanted[:num_rows], num_rows
    ids = {}
    for _ in range(40):
        ids |= {
            engine.submit(c.prompt, max_tokens=c.max_tokens, max_draft_tokens=chance.choice((0, 1, None))): i
            for i, c in enumerate(cases[: chance.choice((3, 40))])
        }
        for _ in range(chance.randint(1, 9)):
            engine.step()
        aborted = [i for i in ids if engine.outputs[i].finish_reason is None and chance.random() < 0.2]
        for request_id in aborted:
            engine.loop._scheduler.abort(request_id)
            engine.outputs[request_id].finish_reason = FinishReason.ABORT
    engine.run()
    for request_id, case in ids.items():
        found = engine.outputs[request_id].token_ids
        assert found == wanted[case][: len(found)]
        if engine.outputs[request_id].finish_reason is not FinishReason.ABORT:
            assert found == wanted[case]
    stats = engine.engine.scheduler.snapshot()
    assert stats.num_kv_blocks_used == 0
    assert stats.rounds_by_depth.keys() == {0, 1, 3}
    assert stats.num_graph_replays > 100
    captured = engine.engine.runner.graphs
    assert captured is not None
    assert any(key.num_rows and key.num_prompt_tokens for key in captured._graphs), "prompts shared rounds"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_layers", [2, 3])
def test_several_mtp_layers_draft_as_on_the_cpu(num_layers: int, tmp_path: Path) -> None:
    """The same drafts are accepted at every depth, with prompts that are computed in chunks and found in the
    cache."""
    sizes = {"num_nextn_predict_layers": num_layers, "max_position_embeddings": 160}
    path = str(constructed_mimo(tmp_path / "model", noise=0.06, **sizes))
    chance = random.Random(0)
    cases = [Case(tuple(chance.randrange(128) for _ in range(1 + 5 * i)), 10 + i, GREEDY) for i in range(20)]
    for depth in (0, 1, num_layers, 4):
        texts, counts = [], []
        for device in ("cpu", "auto"):
            engine = LocalEngine(
                EngineConfig(model_path=path, dtype="float32", depth=depth, device=device, prefill_chunk=32)
            )
            texts.append([generate_with(engine, cases) for _ in ("computed", "found")])
            stats = engine.engine.scheduler.snapshot()
            assert stats.num_cached_prompt_tokens > 0
            counts.append((stats.draft_tokens_per_position, stats.accepted_tokens_per_position))
        assert texts[0] == texts[1], depth
        assert counts[0] == counts[1], depth
        assert depth == 0 or 0 < sum(counts[0][1]) < sum(counts[0][0]), "some drafts are rejected"


@pytest.mark.timeout(120)
def test_drafts_by_few_bits_leave_the_text_as_it_is(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "vocab_size": 256, "max_position_embeddings": 160}
    path = str(constructed_mimo(tmp_path / "model", noise=0.06, **sizes))
    chance = random.Random(0)
    cases = [Case(tuple(chance.randrange(256) for _ in range(9 + i)), 40, GREEDY) for i in range(20)]
    float8 = (
        [("fp8", "full"), ("int4", "full"), ("full", "fp8")]
        if has_float8_products(torch.device("cuda"))
        else []
    )
    engines = [
        LocalEngine(EngineConfig(model_path=path, dtype="bfloat16", draft_lm_head=head, draft_layers=layers))  # type: ignore[arg-type]
        for head, layers in (("full", "full"), *float8)
    ]
    for num_rows in (1, 16, 20):
        full, *quantized = (generate_with(engine, cases[:num_rows]) for engine in engines)
        assert all(texts == full for texts in quantized)
    full_accepted, *accepted = (engine.engine.scheduler.snapshot().num_accepted_tokens for engine in engines)
    assert all(count > 0.9 * full_accepted for count in accepted), (full_accepted, accepted)


@pytest.mark.timeout(300)
def test_nothing_changes_bfloat16_text(prompts: list[tuple[int, ...]]) -> None:
    """Neither depth nor batch, nor how a prompt is cut, found in the cache or computed anew; drawn tokens
    too."""
    drawn = [Case(p, 100, SamplingParams(temperature=0.8, seed=i)) for i, p in enumerate(prompts[:16])]
    cases = [Case(prompt, 100, GREEDY) for prompt in prompts] + drawn
    alone = LocalEngine(config_of(depth=0, prefix_caching=False))
    wanted = [generate_with(alone, [case])[0] for case in cases]
    few_blocks = {"prefill_chunk": 48, "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20}
    layers = {"draft_layers": "fp8" if has_float8_products(torch.device("cuda")) else "full"}
    for changes in ({"depth": 0}, {"depth": 1}, {"depth": 2}, {"depth": 3}, layers, {"depth": 4}, few_blocks):
        engine = LocalEngine(config_of(**changes))
        for prefixes in ("computed", "found"):
            got = generate_with(engine, cases)
            num_differing = sum(a != b for a, b in zip(wanted, got, strict=True))
            print(f"{changes}, prefixes {prefixes}: {num_differing} of {len(cases)} texts differ")
            assert num_differing == 0
    assert engine.engine.scheduler.snapshot().num_preemptions > 0
