"""What the runner does before the first request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from headway_testing.checkpoints import constructed_mimo, random_qwen2
from headway_testing.eagle import constructed_eagle
from headway_testing.families import save, tiny_model
from headway_testing.hybrid import HybridOracle
from headway_testing.local import GREEDY, LocalEngine, Output
from headway_testing.outline import outline
from headway_testing.padded import PaddedLaunches, SplitSteps
from torch.utils._python_dispatch import TorchDispatchMode

from headway.engine import build as assembly
from headway.engine.execution import graphs as graphs_module
from headway.engine.execution import prompt_ends as prompt_ends_module
from headway.engine.execution import step as step_module
from headway.engine.execution import step_key as step_key_module
from headway.engine.execution import warm_up as warm_up_module
from headway.engine.execution.graph_sizes import TakenMemory
from headway.engine.execution.graphs import GraphCache
from headway.engine.execution.step_key import StepGrid, StepKey, row_counts
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.protocol.logprobs import TokenLogprobs
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.resolve import Resolved, resolve
from headway.engine.sampling import sampler
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.speculation.drafter import PromptTokens
from headway.engine.state import transfer
from headway.kernels import MIN_ADDED_ROWS


def hybrid_folder(path: Path) -> Path:
    return HybridOracle().save(path)


@pytest.mark.parametrize("make", [constructed_mimo, random_qwen2], ids=lambda make: make.__name__)
def test_warming_up_a_prefill_leaves_nothing_behind(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, warmed = (LocalEngine(EngineConfig(model_path=str(make(tmp_path / name)))) for name in "ab")
    runner = warmed.engine.runner
    picks: list[bool] = []

    def pick_tokens(logits: torch.Tensor, rows: Any, *rest: Any, **options: Any) -> torch.Tensor:
        picks.append(rows.processors is not None)
        return sampler.pick_tokens(logits, rows, *rest, **options)

    monkeypatch.setattr(prompt_ends_module, "pick_tokens", pick_tokens)
    with torch.inference_mode():
        runner.warm_up.run_prompts()
    assert picks == [False, True]
    for tensor in runner.pool.by_block():
        assert not bool(tensor.any())
    prompt = list(range(1, 40))
    assert warmed.generate(prompt, max_tokens=20) == fresh.generate(prompt, max_tokens=20)


# By PyTorch's allocator, by CUDA where a graph is instantiated, by Triton where a kernel is loaded, by
# cuBLAS.
FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", FULL, ids=["allocator", "cuda", "triton", "cublas"])
def test_rounds_that_do_not_fit_are_refused_with_a_remedy(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(constructed_mimo(tmp_path / "model"))
    runner = LocalEngine(EngineConfig(model_path=path, max_running=7)).engine.runner

    def capture_all(*_: Any, **__: Any) -> None:
        raise error

    # As on a GPU.
    monkeypatch.setattr(runner, "graphs", SimpleNamespace(capture_all=capture_all))
    monkeypatch.setattr(runner, "grid", StepGrid.of(7))
    monkeypatch.setattr(runner.warm_up, "_compile", lambda *_: None)
    with pytest.raises(ConfigError, match=r"rounds of 7 requests and 3 drafts .* set --max-running"):
        runner.capture([0, 3], progress=lambda _: None)


class FakeMemory:
    """Of which each graph takes 100 bytes."""

    is_rehearsing = False

    def __init__(self, *, free: int = 1000, reserve: int = 0, error: RuntimeError | None = None) -> None:
        self.free, self.reserve_bytes, self._error = free, reserve, error

    def has_room(self, num_bytes: int) -> bool:
        return self.free - num_bytes >= self.reserve_bytes

    def capture(self, launch: Callable[[], object]) -> tuple[Any, object]:
        if self._error is not None:
            raise self._error
        self.free -= 100
        return SimpleNamespace(replay=lambda: None), launch()


def graphs_in(memory: FakeMemory) -> GraphCache[int, int]:
    return GraphCache(lambda key: 10 * key, memory)  # type: ignore[arg-type]


def test_what_ran_before_is_captured_while_enough_is_left_for_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "bytes_taken_by", lambda run: (run(), 100))
    memory = FakeMemory(free=450, reserve=300)
    graphs = graphs_in(memory)
    assert [graphs.run(2) for _ in range(3)] == [(20, False), (20, True), (20, True)]
    assert not caplog.records
    assert [graphs.run(3) for _ in range(3)] == [(30, False)] * 3
    assert memory.free == 350
    (warning,) = caplog.records
    for part in (
        "3, of 100 bytes",
        "the 300 bytes that prompts and rounds may need",
        "Set --kv-cache-memory",
    ):
        assert part in warning.getMessage()
    assert graphs.run(2) == (20, True)


def test_frozen_graphs_are_replayed_and_none_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "bytes_taken_by", lambda run: (run(), 100))
    memory = FakeMemory()
    graphs = graphs_in(memory)
    graphs.capture(2)
    free = memory.free
    with graphs.frozen():
        assert graphs.run(2) == (20, True)
        assert [graphs.run(3) for _ in range(3)] == [(30, False)] * 3
    assert memory.free == free
    # What ran meanwhile does not count: the next run is the first.
    assert [graphs.run(3) for _ in range(2)] == [(30, False), (30, True)]


@pytest.mark.parametrize("error", FULL, ids=["allocator", "cuda", "triton", "cublas"])
def test_a_graph_for_which_memory_is_too_little_is_launched_kernel_by_kernel(error: RuntimeError) -> None:
    graphs = graphs_in(FakeMemory(error=error))
    assert [graphs.run(2) for _ in range(3)] == [(20, False)] * 3
    ended = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    ended.__context__ = error
    graphs = graphs_in(FakeMemory(error=ended))
    assert [graphs.run(2) for _ in range(3)] == [(20, False)] * 3


def test_another_fault_while_a_graph_is_captured_is_no_matter_of_memory() -> None:
    graphs = graphs_in(FakeMemory(error=RuntimeError("CUDA error: an illegal memory access was encountered")))
    graphs.run(2)
    with pytest.raises(RuntimeError, match="illegal"):
        graphs.run(2)


class NumbersAssignedByIndex(TorchDispatchMode):
    """Counts assignments of one number, which make the host wait for a GPU: it is copied there and the copy
    awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_put_.default:
            self.count += args[2].dim() == 0
        elif func is torch.ops.aten.copy_.default:
            self.count += args[0].dim() == args[1].dim() == 0
        return func(*args, **(kwargs or {}))


def test_taking_a_request_in_does_not_wait_for_the_device(tmp_path: Path) -> None:
    engine = LocalEngine(EngineConfig(model_path=str(constructed_mimo(tmp_path / "model"))))
    runner, numbers = engine.engine.runner, NumbersAssignedByIndex()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with numbers:
                return function(*args)

        return call

    for owner, name in ((runner.table, "update"), (runner.prompt_ends, "start_rows")):
        setattr(owner, name, counted(getattr(owner, name)))
    picky = SamplingParams(
        repetition_penalty=1.1, allowed_token_ids=[4, 5, 6], bad_words_token_ids=[[4], [5, 6]], min_tokens=2
    )
    for sampling in (SamplingParams(), picky):
        engine.submit([1, 2, 3], sampling=sampling, max_tokens=5)
    engine.run()
    assert numbers.count == 0


@pytest.mark.parametrize(
    ("depth", "wanted"),
    [(0, [100, 300, MIN_ADDED_ROWS - 1]), (2, [100, 300])],
    ids=["without-drafts", "drafts"],
)
def test_the_warm_up_computes_short_and_long_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, wanted: list[int]
) -> None:
    """Otherwise the first step with such prompts would compile kernels while streams wait."""
    path = str(constructed_mimo(tmp_path / "model", noise=0.06))
    runner = LocalEngine(EngineConfig(model_path=path, prefill_chunk=100, depth=depth)).engine.runner
    monkeypatch.setattr(runner.warm_up, "policy", PrefillPolicy.uniform(300))
    monkeypatch.setattr(warm_up_module, "WARM_UP_TOKENS", 100)
    sizes: list[int] = []
    launch = runner.launcher.launch_tokens

    def noting(tokens: PromptTokens) -> torch.Tensor:
        hidden = launch(tokens)
        sizes.append(len(hidden))
        return hidden

    monkeypatch.setattr(runner.launcher, "launch_tokens", noting)
    with torch.inference_mode():
        runner.warm_up.run_prompts()
    assert sizes == wanted


class Operations(TorchDispatchMode):
    """Notes what is computed, by the names and the shapes of the operands."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [str(tuple(arg.shape)) for arg in args if isinstance(arg, torch.Tensor)]
        self.found.add((str(func), *shapes))
        return func(*args, **(kwargs or {}))


class FakeRehearsal:
    """Launches what a GPU would only record, and lets nothing be copied from the host meanwhile, which a
    capture would not survive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations, self._monkeypatch = Operations(), monkeypatch

    def rehearsal(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rehearse(self, launch: Callable[[], object]) -> None:
        with self._monkeypatch.context() as patch, self.operations:
            patch.setattr(transfer, "_on_host", Mock(side_effect=AssertionError("copied from the host")))
            launch()


def eagle3_folders(path: Path) -> dict[str, str]:
    model, drafter = constructed_eagle(path, "speculators")
    return {"model_path": str(model), "drafter_path": str(drafter), "drafter": "auto,ngram"}


def draft_model_folders(path: Path) -> dict[str, str]:
    """The draft model has experts, of other sizes than the model's layers."""
    target, draft = (tiny_model(name) for name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"))
    save(target, "Qwen3ForCausalLM", path / "model")
    save(draft, "Qwen3MoeForCausalLM", path / "draft")
    return {"model_path": str(path / "model"), "drafter_path": str(path / "draft")}


DRAFTERS: dict[str, Callable[[Path], dict[str, str]]] = {
    "attention": lambda path: {"model_path": str(constructed_mimo(path))},
    "recurrent": lambda path: {"model_path": str(hybrid_folder(path))},
    "eagle3": eagle3_folders,
    "draft-model": draft_model_folders,
}


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_the_warm_up_multiplies_by_the_drafters_weights(
    make: Callable[[Path], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those kernels are chosen by the number of rows, of which prompts have any."""
    engine = LocalEngine(EngineConfig(**make(tmp_path), device="cpu", max_running=4)).engine  # type: ignore[arg-type]
    warm_up, drafts = engine.runner.warm_up, engine.runner.launcher.context.drafter.model
    assert drafts is not None
    seen: list[object] = []
    for name in ("compile_linears", "compile_experts"):
        monkeypatch.setattr(warm_up_module, name, lambda layers, _: seen.extend(layers))
    shapes: list[tuple[int, int]] = []
    monkeypatch.setattr(warm_up_module, "most_gated_rows", lambda most, shape, *_: shapes.append(shape) or 0)
    with torch.inference_mode():
        warm_up.run_prompts()
    of_prompts = (linear for linear in drafts.linears() if linear.shape != drafts.lm_head_shape)
    assert {*of_prompts, *drafts.experts()} <= set(seen)
    assert {linear.shape for linear in drafts.linears() if linear.is_gate} <= set(shapes)


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_a_rehearsal_sees_all_that_is_launched_kernel_by_kernel(
    make: Callable[[Path], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several sizes, products of their tiles, scores, first tokens, and the largest round with its
    logits adjusted, masked and scored: what it did not see would be compiled one after the other."""
    runner = LocalEngine(
        EngineConfig(**make(tmp_path), device="cpu", prefill_chunk=128, max_running=4)  # type: ignore[arg-type]
    ).engine.runner
    workers = nullcontext(SimpleNamespace(has_missing=True, num_compiled=1, num_workers=1))
    monkeypatch.setattr(warm_up_module, "compile_in_workers", lambda *_, **__: workers)
    monkeypatch.setattr(warm_up_module, "compile_linears", lambda *_: torch.ones(5).cumsum(0))
    monkeypatch.setattr(warm_up_module, "compile_experts", lambda *_: None)  # for a GPU's formats
    fake, warm_up = FakeRehearsal(monkeypatch), runner.warm_up
    graphs: Any = SimpleNamespace(capture=lambda key: None, capture_all=lambda *_, **__: None, memory=fake)
    with torch.inference_mode():
        warm_up._compile([StepKey(4, 3)], graphs, lambda _: None)
        inputs = Operations()
        with inputs:
            for lengths in warm_up._tried_lengths(warm_up.policy.most_tokens):
                warm_up._pass_of(lengths)
        earnest = Operations()
        with earnest:
            warm_up._try_largest_steps(3)
    assert fake.operations.found
    assert earnest.found - fake.operations.found <= inputs.found
    assert any(name.startswith("aten.cumsum") for name, *_ in fake.operations.found)


def test_the_largest_round_that_is_tried_is_adjusted_masked_and_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a round has its logits three times: raw, masked, and adjusted."""
    path = str(random_qwen2(tmp_path / "model"))
    runner = LocalEngine(EngineConfig(model_path=path, max_running=4, depth=2, drafter="ngram")).engine.runner
    picks: list[tuple[object, ...]] = []

    def pick_tokens(logits: torch.Tensor, rows: Any, *rest: Any, **options: Any) -> torch.Tensor:
        masks = options["masks"] is not None
        picks.append((tuple(logits.shape[:2]), rows.processors is not None, masks, options["keeps_logits"]))
        return sampler.pick_tokens(logits, rows, *rest, **options)

    monkeypatch.setattr(step_module, "pick_tokens", pick_tokens)
    with torch.inference_mode():
        runner.warm_up._try_largest_round(2)
    assert picks == [((4, 3), True, True, True)]


def test_each_graph_that_is_measured_replays_the_prompts_that_were_packed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller graph must not read the chunks of a larger one. Of 2 graphs PyTorch takes 300 bytes and CUDA
    20 for itself; the key that is left out keeps 4 hidden states of 64 float32; steps take 1,000."""
    path = str(constructed_mimo(tmp_path / "model"))
    runner = LocalEngine(EngineConfig(model_path=path, device="cpu", prefill_chunk=64)).engine.runner
    warm_up, calls = runner.warm_up, []
    taken = iter([TakenMemory(5000, 100), TakenMemory(5320, 400)])
    monkeypatch.setattr(warm_up_module, "TakenMemory", SimpleNamespace(now=lambda _: next(taken)))
    monkeypatch.setattr(warm_up_module, "bytes_taken_by", lambda run: (run(), 1000))
    monkeypatch.setattr(warm_up_module, "sampled_keys", lambda keys: [keys[0], keys[2]])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(warm_up, "_compile", lambda *_: None)
    monkeypatch.setattr(warm_up, "_try_largest_steps", lambda depth: calls.append(("try", depth)))
    monkeypatch.setattr(runner.launcher, "pack", lambda chunks, key: calls.append(("pack", key)))
    graphs: Any = SimpleNamespace(
        capture=lambda key: calls.append(("capture", key)), run=lambda key: calls.append(("run", key))
    )
    large, between, small = (StepKey(num_prompt_tokens=n) for n in (16, 4, 1))
    found = warm_up.measured_bytes([large, between, small], graphs, lambda _: None)
    assert found == 1000 + 300 + 4 * 64 * 4 + 20 * 3 // 2
    steps = [(verb, key) for key in (large, small) for verb in ("pack", "capture", "run")]
    assert calls == [("try", 0), *steps]


def test_what_steps_take_is_measured_with_few_blocks_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,000 bytes that weights left libraries have taken 50; the largest steps and all graphs take 300."""
    config = EngineConfig(model_path=str(constructed_mimo(tmp_path / "model")), device="cpu")
    engine = LocalEngine(config).engine
    sizes: list[int] = []

    def build_device(resolved: Resolved, *_: Any, is_tried: bool) -> Any:
        assert is_tried
        sizes.append(resolved.num_blocks)
        return SimpleNamespace(measured_bytes=lambda depths, *, progress: 100 * len(depths))

    monkeypatch.setattr(assembly, "build_device", build_device)
    monkeypatch.setattr(assembly, "available_bytes", lambda _: 950)
    shape = outline(device="cpu", dtype=torch.float32)
    resolved = replace(
        resolve(EngineConfig(model_path="", depth=2), shape), outline=replace(shape, available=1000)
    )
    models: Any = SimpleNamespace(target=engine.runner.model)
    assert assembly.measured_steps_bytes(resolved, models, None, lambda _: None) == 350
    assert sizes == [16]


def test_the_warm_up_of_short_contexts_stays_within_their_block_tables(tmp_path: Path) -> None:
    path = str(constructed_mimo(tmp_path / "model", noise=0.06))
    config = EngineConfig(model_path=path, prefill_chunk=16, depth=0, max_model_len=32)
    with torch.inference_mode():
        LocalEngine(config).engine.runner.warm_up.run_prompts()


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("context", [48, 41], ids=["whole-blocks", "broken-block"])
def test_a_prompt_of_the_whole_context_is_scored(tmp_path: Path, depth: int, context: int) -> None:
    """Beside a request that goes on, with the log-probabilities that a larger context gives."""
    path = str(constructed_mimo(tmp_path / "model", noise=0.06))
    prompt = [(7 * i) % 90 for i in range(context)]
    sampling = msgspec.structs.replace(GREEDY, num_prompt_logprobs=1)
    scores = []
    for max_model_len in (context, context + 64):
        config = EngineConfig(model_path=path, prefill_chunk=16, depth=depth, max_model_len=max_model_len)
        engine = LocalEngine(config, reads_late=True)
        engine.submit(prompt[:5], max_tokens=20)
        number = engine.submit(prompt, max_tokens=1, sampling=sampling)
        output = engine.run()[number]
        assert len(output.token_ids) == 1
        scores.append(output.prompt_logprobs)
    assert scores[0] is not None
    assert len(scores[0].logprobs) == context - 1
    assert scores[0] == scores[1]


def check_equal(*engines: LocalEngine, sampling: SamplingParams = GREEDY) -> None:
    prompts = [[(7 * i + length) % 90 for i in range(length)] for length in (20, 20, 5, 60, 33)]
    ids = [
        [engine.submit(prompt, max_tokens=30, sampling=sampling) for prompt in prompts] for engine in engines
    ]
    outputs = [engine.run() for engine in engines]
    assert ids[0] == ids[1]
    assert [outputs[0][i].token_ids for i in ids[0]] == [outputs[1][i].token_ids for i in ids[1]]
    assert [outputs[0][i].prompt_logprobs for i in ids[0]] == [outputs[1][i].prompt_logprobs for i in ids[1]]


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_prefills_among_padding_give_the_same_text(
    tmp_path: Path, depth: int, *, prefix_caching: bool
) -> None:
    """Several chunks at once, prompts over several steps, prefixes found in the cache, a single short chunk,
    and prompts that are scored: keys, values and the states that are kept equal those of prefills without
    padding."""
    path = str(constructed_mimo(tmp_path / "model", noise=0.06))
    config = EngineConfig(
        model_path=path, prefill_chunk=48, depth=depth, prefix_caching=prefix_caching, dtype="float64"
    )
    engines = [LocalEngine(config) for _ in range(2)]
    runner = engines[1].engine.runner
    padded = PaddedLaunches(runner, StepGrid(row_counts(len(runner.table)), prompt_counts=(16, 32, 48)))
    prompts = [[(7 * i + length) % 90 for i in range(length)] for length in (20, 20, 5, 60, 33, 1, 16)]
    greedy = SamplingParams(temperature=0.0, num_logprobs=1)
    scored = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    for some, sampling in (
        (prompts, greedy),
        (prompts, greedy),
        ([[*prompts[4], 3, 4]], greedy),
        (prompts, scored),
    ):
        ids = [
            [engine.submit(prompt, max_tokens=30, sampling=sampling) for prompt in some] for engine in engines
        ]
        outputs = [engine.run() for engine in engines]
        assert [outputs[0][i].token_ids for i in ids[0]] == [outputs[1][i].token_ids for i in ids[1]]
        for i in ids[0]:
            check_scores(outputs[1][i].logprobs, outputs[0][i].logprobs)
            check_scores(outputs[1][i].prompt_logprobs, outputs[0][i].prompt_logprobs)
    assert len({key.num_prompt_tokens for key in padded.prompts}) > 1
    assert {key.is_window for key in padded.prompts} == {False, True}
    pools = [engine.engine.runner.pool for engine in engines]
    for one, other in zip(pools[1].by_block(), pools[0].by_block(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    counts = [engine.engine.scheduler.snapshot() for engine in engines]
    assert counts[0].accepted_tokens_per_position == counts[1].accepted_tokens_per_position
    assert bool(counts[1].num_cached_prompt_tokens) == prefix_caching


def check_scores(found: TokenLogprobs | None, wanted: TokenLogprobs | None) -> None:
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert (found.ranks, found.top_ids) == (wanted.ranks, wanted.top_ids)
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-6)


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_prompts_beside_rounds_give_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, *, prefix_caching: bool
) -> None:
    """In the round's own forward pass, or behind the round where no graph is for them: requests that come
    while others run, whole and in chunks. Beside penalties and log-probabilities they are computed before it.
    The round picks their first tokens if it is large enough for their rows."""
    path = str(constructed_mimo(tmp_path / "model", noise=0.06))
    config = EngineConfig(
        model_path=path, prefill_chunk=48, depth=depth, prefix_caching=prefix_caching, dtype="float64"
    )
    mixing = msgspec.structs.replace(config, mixed_above_tokens=0)
    engines = [LocalEngine(config), LocalEngine(mixing), LocalEngine(mixing)]
    runner = engines[1].engine.runner
    monkeypatch.setattr(step_key_module, "_LEAST_MIXED_TOKENS", 1)  # else all prompts end within the round
    # 48 prompt tokens take a pass of their own.
    padded = PaddedLaunches(runner, StepGrid(row_counts(len(runner.table)), mixed_counts=(16, 32)))
    ends = runner.prompt_ends
    start_rows, finish = ends.start_rows, ends.finish
    are_picked: list[bool] = []  # of the starts in mixed steps

    def noting_starts(*args: Any) -> None:
        are_picked.append(args[-2] is not None)
        start_rows(*args)

    def noting_mixed(*args: Any, sampled: torch.Tensor | None = None, **kwargs: Any) -> None:
        monkeypatch.setattr(ends, "start_rows", start_rows if sampled is None else noting_starts)
        finish(*args, sampled=sampled, **kwargs)

    monkeypatch.setattr(ends, "finish", noting_mixed)
    plain: list[dict[str, object]] = [{}, {"num_prompt_logprobs": 1}, {"temperature": 0.8}]
    wishes = plain * 5 + [{"num_logprobs": 2}, {}, {"frequency_penalty": 0.5}]
    prompts = [
        [(7 * i + length) % 90 for i in range(length)] for length in (20, 20, 5, 60, 33, 1, 16, 70, 31)
    ]
    outputs: list[dict[int, Output]] = []
    for engine in engines:
        for number, prompt in enumerate(prompts * 2):
            sampling = SamplingParams(**({"temperature": 0.0, "seed": number} | wishes[number]))  # type: ignore[arg-type]
            cap = 1 if number % 4 == 3 else None
            engine.submit(prompt, max_tokens=9 + number % 3, sampling=sampling, max_draft_tokens=cap)
            engine.step()
        outputs.append(engine.run())
    for other in outputs[1:]:
        for number, output in outputs[0].items():
            assert other[number].token_ids == output.token_ids, number
            check_scores(other[number].logprobs, output.logprobs)
            check_scores(other[number].prompt_logprobs, output.prompt_logprobs)
    assert {key.num_prompt_tokens for key in padded.mixed} == {16, 32}
    assert {key.depth for key in padded.mixed} == {depth}
    assert {key._replace(num_rows=0, depth=0, num_prompt_tokens=0) for key in padded.mixed} == {StepKey()}, (
        "of no rare kind"
    )
    assert set(are_picked) == {False, True}, "rows within the round's graph, and beyond it"


@pytest.mark.parametrize("depth", [0, 3])
def test_a_step_in_two_halves_gives_the_same_text(tmp_path: Path, depth: int) -> None:
    path = str(constructed_mimo(tmp_path / "model", noise=0.06))
    config = EngineConfig(model_path=path, prefill_chunk=48, depth=depth, mixed_above_tokens=0)
    engines = [LocalEngine(config) for _ in range(2)]
    runner = engines[1].engine.runner
    split = SplitSteps(runner, StepGrid(row_counts(len(runner.table)), (16, 32, 48), (16, 32)))
    outputs: list[list[Output]] = []
    for engine in engines:
        for number, length in enumerate((20, 20, 5, 60, 33, 1, 16, 70, 31, 24)):
            wish = {"temperature": 0.8 * (number % 2), "seed": number}
            sampling = SamplingParams(**wish, num_logprobs=1 if number == 5 else None)  # type: ignore[arg-type]
            prompt = [(7 * i + length) % 90 for i in range(length)]
            engine.submit(prompt, max_tokens=12 + number, sampling=sampling)
            engine.step()
        outputs.append(list(engine.run().values()))
    assert [output.token_ids for output in outputs[0]] == [output.token_ids for output in outputs[1]]
    assert outputs[0][5].logprobs == outputs[1][5].logprobs
    assert any(key.num_rows and key.num_prompt_tokens for key in split.launched), "rounds with prompts"
    assert any(key.keeps_logits for key in split.launched)


def test_steps_in_two_halves_leave_catching_up_whole(tmp_path: Path) -> None:
    path = str(constructed_mimo(tmp_path / "model", noise=0.06))
    engines = [LocalEngine(EngineConfig(model_path=path, depth=3)) for _ in range(2)]
    runner = engines[1].engine.runner
    split = SplitSteps(runner, StepGrid(row_counts(len(runner.table)), (16, 32), (16, 32)))
    outputs = []
    for engine in engines:
        engine.submit([(7 * i) % 90 for i in range(20)], max_tokens=60)
        for depth in (0, 3):
            engine.engine.scheduler.set_depth(depth)
            for _ in range(8):
                engine.step()
        outputs.append([(output.token_ids, output.num_accepted) for output in engine.run().values()])
    assert outputs[0] == outputs[1]
    assert any(key.catches_up for key in split.launched)


def test_prompts_that_end_in_one_step_are_picked_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five, two at a time: some adjusted, some scored, of which the second pair has none, where one is
    drawn."""
    path = str(random_qwen2(tmp_path / "model"))
    picked: list[int] = []

    def pick_tokens(logits: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        picked.append(len(logits))
        return sampler.pick_tokens(logits, *rest, **options)

    monkeypatch.setattr(prompt_ends_module, "pick_tokens", pick_tokens)
    wishes: list[dict[str, object]] = [
        {"num_logprobs": 2},
        {"logit_bias": {3: 50.0}},
        {},
        {"temperature": 1.0, "seed": 5},
        {"num_logprobs": 1, "logit_bias": {4: 50.0}},
    ]
    outputs: list[list[Output]] = []
    for at_once in (64, 2):
        monkeypatch.setattr(prompt_ends_module, "SCORED_AT_ONCE", at_once)
        engine = LocalEngine(EngineConfig(model_path=path, max_running=8))
        for i, wish in enumerate(wishes):
            sampling = SamplingParams(**({"temperature": 0.0} | wish))  # type: ignore[arg-type]
            engine.submit([i + 1] * (5 + i), max_tokens=3, sampling=sampling)
        outputs.append(list(engine.run().values()))
    assert picked == [5, 2, 2, 1]
    whole, parted = outputs
    assert [o.token_ids for o in whole] == [o.token_ids for o in parted]
    assert [whole[i].token_ids[0] for i in (1, 4)] == [3, 4]
    for i in (0, 4):
        assert len(parted[i].logprobs.logprobs) == 3
        assert parted[i].logprobs.logprobs == pytest.approx(whole[i].logprobs.logprobs, abs=1e-5)
