"""The offline benchmark: floors as they were stated for known shapes, and a whole run with its figures."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from headway_testing.checkpoints import mimo_config, random_mimo
from headway_testing.daemon import headway_command
from headway_testing.hybrid import HybridOracle
from headway_testing.local import LocalEngine
from safetensors.torch import load_file

from headway.engine.bench import __main__ as bench
from headway.engine.bench.floor import Costs, costs_of, measured_ceilings
from headway.engine.bench.measure import NUM_WARM_ROUNDS, Driver, least_new_tokens
from headway.engine.bench.settings import read_settings
from headway.engine.bench.shape import SHAPES
from headway.engine.loading.headers import outline_of, parameter_counts
from headway.engine.models.registry import read_model_spec
from headway.engine.models.spec import ExpertsSpec, ModelSpec
from headway.engine.protocol.config import DraftLayers, DraftLmHead, EngineConfig
from headway.engine.speculation.select import announced_head

SMALL = ["--output-len", "24", "--prefill", "none", "--device", "cpu", "--threads", "1"]


# Measured once for all runs in this process: it takes two seconds.
measured_once = cache(measured_ceilings)


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measured_ceilings", measured_once)


def costs_by(spec: ModelSpec, dtype: torch.dtype, *, has_draft_head: bool, **formats: Any) -> Costs:
    return costs_of(outline_of(spec, dtype, announced_head(spec) if has_draft_head else None), **formats)


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "report.json"
    assert bench.main([*arguments, "--json", str(file)]) == 0
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@pytest.mark.parametrize(("name", "milliseconds"), [("mimo-7b", 3.09), ("mimo-0.5b", 0.224)])
def test_the_floor_of_a_step_is_the_one_that_was_stated(name: str, milliseconds: float) -> None:
    """Weights once, at the 4,530 GB/s that an H200 reads."""
    costs = costs_by(read_model_spec(SHAPES / name), torch.bfloat16, has_draft_head=True)
    seconds = costs.round_bytes(batch=64, depth=0, context=0) / 4530e9
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=2e-3)


@pytest.mark.slow
def test_two_ranks_are_measured_beside_the_floor_of_one_of_them(tmp_path: Path) -> None:
    alone, two = (
        run(tmp_path, *SMALL, "--batch", "1", "--depth", "0", "--tp", str(size))["decode"][0]
        for size in (1, 2)
    )
    assert two["tokens_per_second"] > 0
    assert 0.4 < two["floor_milliseconds"] / alone["floor_milliseconds"] < 0.7


@pytest.mark.parametrize(("draft_lm_head", "itemsize"), [("full", 2), ("fp8", 1), ("int4", 0.5)])
@pytest.mark.parametrize(("draft_layers", "layer_itemsize"), [("full", 2), ("fp8", 1)])
def test_drafts_and_contexts_are_bytes_of_their_own(
    draft_lm_head: DraftLmHead, itemsize: float, draft_layers: DraftLayers, layer_itemsize: int
) -> None:
    config = read_model_spec(SHAPES / "mimo-7b")
    costs = costs_by(
        config, torch.bfloat16, has_draft_head=True, draft_lm_head=draft_lm_head, draft_layers=draft_layers
    )
    plain = costs.round_bytes(batch=2, depth=0, context=0)
    head = 4096 * (layer_itemsize * (2 * 4096 + 6144 + 2 * 11008) + 2 * (4096 + 11008))
    assert costs.round_bytes(batch=2, depth=3, context=0) - plain == 3 * (head + itemsize * 151_680 * 4096)
    of_many = costs.round_bytes(batch=17, depth=3, context=0) - plain
    assert of_many == 3 * (head + max(itemsize, 1) * 151_680 * 4096)
    token = 2 * 2 * 8 * 128
    assert costs.round_bytes(batch=2, depth=0, context=100) - plain == 2 * 100 * 36 * token
    without_drafts = costs.round_bytes(batch=2, depth=1, context=0)
    assert costs.round_bytes(batch=2, depth=1, context=100) - without_drafts == 2 * 100 * 37 * token


@pytest.mark.parametrize(
    ("name", "billions", "state_megabytes", "token_kilobytes"),
    [
        ("qwen3.5-0.8b", 0.75, 18.9 + 0.7, 12),
        ("qwen3.5-9b", 8.95, 50.3 + 1.2, 32),
        ("qwen3.5-27b", 26.90, 151 + 3.0, 64),
    ],
)
def test_hybrids_move_the_weights_states_and_caches_that_were_published(
    name: str, billions: float, state_megabytes: float, token_kilobytes: int
) -> None:
    """The state of each row is read and written; layers without attention keep no keys."""
    spec = read_model_spec(SHAPES / name)
    costs = costs_by(spec, torch.bfloat16, has_draft_head=True)
    embedding = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    assert (costs.trunk_bytes / 2 + embedding) / 1e9 == pytest.approx(billions, rel=3e-3)
    assert costs.state_bytes / 1e6 == pytest.approx(state_megabytes, rel=5e-3)
    assert costs.cache_bytes(1) == token_kilobytes * 1024
    plain = costs.round_bytes(batch=1, depth=0, context=0)
    assert costs.round_bytes(batch=3, depth=0, context=0) - plain == 2 * 2 * costs.state_bytes


@pytest.mark.parametrize(
    ("name", "billions", "active_billions", "head_billions"),
    [
        ("qwen3.5-35b-a3b", 34.66, 2.95, 0.84),
        ("qwen3-next-80b-a3b", 79.67, 3.56, 1.65),
        ("qwen3-30b-a3b", 30.53, 3.04, 0.0),
        ("mixtral-8x7b", 46.70, 12.75, 0.0),
    ],
)
def test_mixtures_of_experts_have_the_sizes_that_were_published(
    name: str, billions: float, active_billions: float, head_billions: float
) -> None:
    """Active are the weights that multiply a token, so that an embedding is not among them."""
    spec = read_model_spec(SHAPES / name)
    whole = outline_of(spec, torch.bfloat16, announced_head(spec))
    of_head = 0 if whole.draft is None else sum(t.numel() for t in whole.draft.tensors().values())
    assert (parameter_counts(whole)[0] - of_head) / 1e9 == pytest.approx(billions, rel=3e-3)
    assert of_head / 1e9 == pytest.approx(head_billions, rel=1e-2)
    active = outline_of(spec, torch.bfloat16).active_weights
    assert active / 1e9 == pytest.approx(active_billions, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("qwen3.5-35b-a3b", {1: 2.0, 4: 7.7, 8: 14.5, 16: 25.7, 32: 41, 64: 56, 128: 63, 256: 64}),
        ("qwen3-30b-a3b", {1: 3.6, 4: 13.2, 8: 23.4, 16: 37, 32: 51, 64: 57, 128: 58}),
        ("qwen3-next-80b-a3b", {1: 3.0, 4: 11.7, 8: 22.6, 16: 42, 32: 72, 64: 111, 128: 142, 256: 154}),
    ],
)
def test_a_floor_has_the_experts_that_its_tokens_are_expected_to_meet(
    name: str, gigabytes: dict[int, float]
) -> None:
    """E (1 - (1 - k / E)^N) of E experts a layer where each of N tokens chooses k, in all layers."""
    spec = read_model_spec(SHAPES / name)
    costs = costs_by(spec, torch.bfloat16, has_draft_head=False)
    experts = spec.layers[0].feed_forward
    assert isinstance(experts, ExpertsSpec)
    chosen = len(spec.layers) * experts.top_k * 3 * 2 * experts.intermediate_size * spec.hidden_size
    plain = costs.round_bytes(batch=1, depth=0, context=0) - chosen
    for tokens, wanted in gigabytes.items():
        state = costs.moved_state_bytes(tokens) - costs.moved_state_bytes(1)
        found = costs.round_bytes(batch=tokens, depth=0, context=0) - plain - state
        assert found / 1e9 == pytest.approx(wanted, abs=0.06 if wanted < 30 else 0.6)
    verified = costs.round_bytes(batch=1, depth=3, context=0) - plain
    assert verified / 1e9 == pytest.approx(gigabytes[4], abs=0.06)


def test_drafts_read_the_experts_of_their_rows() -> None:
    """The MTP layer of Qwen3.5-35B-A3B, with 8 of 256 experts of 6.3 MB: 8 for one row, 57 for 8 rows."""
    spec = read_model_spec(SHAPES / "qwen3.5-35b-a3b")
    costs, without = (costs_by(spec, torch.bfloat16, has_draft_head=has) for has in (True, False))
    drafts = [
        costs.round_bytes(batch=batch, depth=1, context=0)
        - without.round_bytes(batch=batch, depth=1, context=0)
        for batch in (1, 8)
    ]
    assert drafts[1] - drafts[0] == pytest.approx((256 * (1 - (1 - 8 / 256) ** 8) - 8) * 6_291_456)


def test_a_window_bounds_what_is_read_and_computed() -> None:
    whole = read_model_spec(SHAPES / "mimo-0.5b")
    layers = tuple(replace(layer, mixer=replace(layer.mixer, sliding_window=1024)) for layer in whole.layers)
    costs, windowed = (
        costs_by(spec, torch.bfloat16, has_draft_head=False)
        for spec in (whole, replace(whole, layers=layers))
    )
    assert windowed.cache_bytes(32_768) == windowed.cache_bytes(1024) == costs.cache_bytes(1024)
    assert windowed.prompt_flop(1024) == costs.prompt_flop(1024)
    assert costs.prompt_flop(2048) * 3 / 4 == windowed.prompt_flop(2048)


def test_a_round_with_drafts_reads_every_mtp_layer_once_and_then_the_last_again(tmp_path: Path) -> None:
    path = random_mimo(tmp_path, num_nextn_predict_layers=3)
    spec = read_model_spec(path)
    costs = costs_by(spec, torch.float32, has_draft_head=True)
    stored = load_file(path / "model.safetensors")
    prefix = "model.mtp_layers.1."
    layer = sum(t.nbytes for name, t in stored.items() if name.startswith(prefix) and t.dim() == 2)
    output = 4 * spec.vocab_size * spec.hidden_size
    token = costs.draft_kv_bytes
    plain = costs.round_bytes(batch=2, depth=0, context=100)
    for depth, passes in ((1, 3), (2, 3), (3, 3), (4, 4), (5, 5)):
        extra = costs.round_bytes(batch=2, depth=depth, context=100) - plain
        assert extra == passes * (layer + 2 * 100 * token) + depth * output


def test_drafts_without_a_head_read_no_weights() -> None:
    costs = costs_by(read_model_spec(SHAPES / "mimo-7b"), torch.bfloat16, has_draft_head=False)
    plain = costs.round_bytes(batch=2, depth=0, context=100)
    assert costs.round_bytes(batch=2, depth=3, context=100) == plain


def test_a_prompt_costs_two_operations_a_weight_and_attention() -> None:
    costs = costs_by(read_model_spec(SHAPES / "mimo-7b"), torch.bfloat16, has_draft_head=False)
    weights = 36 * 4096 * (6144 + 4096 + 3 * 11008)
    attention = 36 * 2 * 4096 * 1000**2
    assert costs.prefill_flop(num_prompts=3, length=1000) == 3 * (2 * weights * 1000 + attention)


@pytest.mark.parametrize("length", [1, 40, 64, 1000])
def test_a_prompt_of_a_hybrid_costs_its_delta_rule_too(length: int) -> None:
    """Qwen3.5-0.8B: 18 delta nets with 16 heads of 128 x 128 and 6 layers of attention with 8 heads of 256,
    hidden size 1,024. A head's state is multiplied three times a token. Within a piece of 64 tokens, a token
    meets as many before and after it, so that each of three products of 128 key dimensions and two of 128
    value dimensions takes one operation a dimension and token."""
    costs = costs_by(read_model_spec(SHAPES / "qwen3.5-0.8b"), torch.bfloat16, has_draft_head=True)
    feed_forward = 3 * 1024 * 3584
    delta_net = 1024 * (3 * 2048 + 2048 + 16 + 16) + 2048 * 1024
    attention = 1024 * (2 * 2048 + 2 * 512) + 2048 * 1024
    weights = 24 * feed_forward + 18 * delta_net + 6 * attention
    recurrence = 18 * 16 * (6 * 128 * 128 + min(length, 64) * 5 * 128)
    wanted = 2 * weights * length + recurrence * length + 6 * 2 * 2048 * length**2
    assert costs.prefill_flop(num_prompts=2, length=length) == 2 * wanted


@pytest.mark.parametrize(("batch", "depth", "share"), [(1, 0, 0.0060), (32, 0, 0.161), (32, 3, 0.138)])
def test_the_share_of_a_floor_that_state_takes_is_the_one_that_was_derived(
    batch: int, depth: int, share: float
) -> None:
    """Qwen3.5-27B, without a context: 154 MB of state a row are read and written, with 51.3 GB of weights;
    each of 3 drafts reads 0.84 GB of the head and 2.54 GB of lm_head."""
    costs = costs_by(read_model_spec(SHAPES / "qwen3.5-27b"), torch.bfloat16, has_draft_head=True)
    moved = costs.moved_state_bytes(batch)
    assert moved == pytest.approx(2 * batch * 154e6, rel=2e-3)
    assert moved / costs.round_bytes(batch=batch, depth=depth, context=0) == pytest.approx(share, rel=0.01)


def test_the_bench_reports_what_share_of_the_floor_state_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = HybridOracle().save(tmp_path / "model")
    report = run(tmp_path, str(folder), *SMALL, "--batch", "1,3", "--depth", "0", "--input-len", "20")
    costs = costs_by(read_model_spec(folder), torch.float32, has_draft_head=False)
    shown = capsys.readouterr().out
    for line in report["decode"]:
        batch, context = line["batch"], line["context"]
        num_bytes = costs.round_bytes(batch=batch, depth=0, context=context)
        assert line["state_share"] == pytest.approx(2 * batch * costs.state_bytes / num_bytes)
        assert f" {line['state_share']:.0%} " in shown


def test_ceilings_are_of_this_machine() -> None:
    ceilings = measured_once(torch.device("cpu"), torch.float32)
    assert 1e8 < ceilings.read_bytes < 1e13
    assert 1e8 < ceilings.matmul_flop < 1e15


@pytest.mark.slow
def test_every_cell_is_measured_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = random_mimo(tmp_path / "model")
    arguments = [
        "--batch",
        "1,3",
        "--depth",
        "2,0",
        "--input-len",
        "20,33",
        "--prefill",
        "2x40",
        "--runs",
        "2",
    ]
    arguments += ["--closed-loop", "1,3", "--synthetic-acceptance", "1,1"]
    report = run(tmp_path, str(folder), *SMALL, *arguments)
    cells = {(line["batch"], line["depth"], line["input_len"]): line for line in report["decode"]}
    assert cells.keys() == {(b, d, n) for b in (1, 3) for d in (0, 2) for n in (20, 33)}
    for (batch, depth, input_len), line in cells.items():
        assert line["tokens_per_round"] == depth + 1
        assert len(line["all_milliseconds"]) == 2
        assert min(line["all_milliseconds"]) <= line["milliseconds"] <= max(line["all_milliseconds"])
        assert input_len < line["context"] < input_len + 24
        plain = cells[batch, 0, input_len]["tokens_per_second"]
        speedup = line["tokens_per_second"] / plain
        assert line["conversion"] == (pytest.approx(speedup / (depth + 1)) if depth > 0 else None)
    costs = costs_by(read_model_spec(folder), torch.float32, has_draft_head=True)
    line = cells[3, 2, 33]
    num_bytes = costs.round_bytes(batch=3, depth=2, context=line["context"])
    assert line["floor_milliseconds"] == pytest.approx(1e3 * num_bytes / report["ceilings"]["read_bytes"])
    assert [(one["num_prompts"], one["length"], one["depth"]) for one in report["prefill"]] == [
        (2, 40, 0),
        (2, 40, 2),
    ]
    for one in report["prefill"]:
        assert one["tokens_per_second"] == pytest.approx(80e3 / one["milliseconds"])
    loops = [
        (one["num_streams"], one["depth"], one["input_len"], one["output_len"])
        for one in report["closed_loop"]
    ]
    assert loops == [(n, depth, 20, 24) for n in (1, 3) for depth in (0, 2)]
    assert list(report["startup_seconds"]) == ["imports", "load", "memory", "capture", "ready"]
    shown = capsys.readouterr().out
    assert "the text means nothing" in shown
    assert "GB/s" in shown


def test_what_does_not_fit_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(mimo_config()))
    lengths = ["--batch", "1", "--depth", "0", "--input-len", "20,250", "--prefill", "1x300"]
    report = run(tmp_path, str(folder), *SMALL, *lengths, "--load-format", "dummy")
    assert [line["input_len"] for line in report["decode"]] == [20]
    assert report["prefill"] == []
    assert report["left_out"] == [
        "decode of 1 x 250: with 24 new tokens each it does not fit",
        "prefill of 1 x 300: it does not fit",
    ]
    assert "left out: prefill of 1 x 300" in capsys.readouterr().out


@pytest.mark.parametrize("input_len", [32, 200])
def test_rounds_begin_when_all_prompts_are_computed(tmp_path: Path, input_len: int) -> None:
    """Those of 200 tokens take 38 steps, in which the first row could have got all of its 20."""
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path)), depth=0, prefix_caching=False, prefill_chunk=16, max_running=3
    )
    driver = Driver(LocalEngine(config).engine)
    for _ in range(2):
        rounds = driver.decode(batch=3, depth=0, input_len=input_len, output_len=20)
        assert rounds.tokens == 3 * rounds.num_rounds
        # The first of a row's tokens follows its prompt; two rounds settle, one starts the clock, the last
        # one is left out.
        assert rounds.num_rounds == 20 - 1 - 2 - 1 - 1
        assert rounds.context == input_len + (4 + 19) / 2


def test_a_warm_up_has_the_rounds_of_all_rows(tmp_path: Path) -> None:
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path)), depth=0, prefix_caching=False, prefill_chunk=16, max_running=3
    )
    engine = LocalEngine(config).engine
    Driver(engine).warm_up(batch=3, depth=0, input_len=200)
    assert engine.scheduler.snapshot().rounds_by_depth == {0: NUM_WARM_ROUNDS - 1}


def test_rows_that_cannot_start_together_are_not_waited_for(tmp_path: Path) -> None:
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path)), depth=0, prefix_caching=False, max_running=2, max_model_len=32,
        kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    driver = Driver(LocalEngine(config).engine)
    with pytest.raises(AssertionError, match="3 rows of 2"):
        driver.decode(batch=3, depth=0, input_len=5, output_len=12)
    with pytest.raises(AssertionError, match="do not fit at once"):
        driver.decode(batch=2, depth=0, input_len=30, output_len=12)


@pytest.mark.parametrize("depth", [0, 2])
def test_the_fewest_new_tokens_are_enough_for_a_round(tmp_path: Path, depth: int) -> None:
    """Where all drafts are right."""
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path)),
        depth=depth,
        prefix_caching=False,
        synthetic_acceptance=(1.0,) * depth or None,
    )
    driver = Driver(LocalEngine(config).engine)
    rounds = driver.decode(batch=2, depth=depth, input_len=5, output_len=least_new_tokens(depth))
    assert (rounds.num_rounds, rounds.tokens) == (1, 2 * (depth + 1))


def test_rounds_that_are_read_in_one_step_count_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU's short rounds two are over when the host looks."""
    config = EngineConfig(model_path=str(random_mimo(tmp_path / "model")), depth=0, prefix_caching=False)
    driver = Driver(LocalEngine(config).engine)
    step = driver._loop.step
    monkeypatch.setattr(driver._loop, "step", lambda: step() and step())
    rounds = driver.decode(batch=2, depth=0, input_len=5, output_len=12)
    assert rounds.tokens == 2 * rounds.num_rounds == 14


def test_rounds_of_all_rows_end_before_a_row_does_and_leave_the_engine_idle(tmp_path: Path) -> None:
    """One row has got its tokens long before the other. The second time the prompts are found in the prefix
    cache."""
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path)), depth=3, synthetic_acceptance=(0.5, 0.5, 0.5), max_running=2
    )
    engine = LocalEngine(config).engine
    driver = Driver(engine)
    prompts = [list(range(40)), list(range(50, 90))]
    for depth in (3, 1):
        engine.scheduler.fix_depth(depth)
        rounds = list(driver.rounds(prompts, output_len=30))
        assert {one.depth for one in rounds} == {depth}
        assert all(2 <= one.tokens <= 2 * (depth + 1) for one in rounds)
        assert 30 <= 1 + sum(one.tokens for one in rounds) < 60
        assert not engine.scheduler.has_work
    with closing(driver.rounds(prompts, output_len=30)) as unfinished:
        next(unfinished)
    assert not engine.scheduler.has_work
    stats = engine.scheduler.snapshot()
    assert stats.finished_by_reason == {"abort": 6}
    assert stats.num_cached_prompt_tokens == 2 * 2 * 32


def test_a_closed_loop_has_as_many_rows_as_streams_until_the_end(tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(random_mimo(tmp_path)), depth=0, prefix_caching=False, max_running=8)
    engine = LocalEngine(config).engine
    started = time.perf_counter()
    rate = Driver(engine).closed_loop(num_streams=3, depth=0, input_len=8, output_len=10, num_requests=9)
    assert rate > 90 / (time.perf_counter() - started)
    stats = engine.scheduler.snapshot()
    assert stats.num_generation_tokens == 90
    assert stats.finished_by_reason == {"length": 9}
    # Three requests one after the other in three rows: nine rounds each, a step between two of them.
    assert 27 <= stats.rounds_by_depth[0] <= 33


def test_held_out_prompts_are_the_same_for_each_depth(tmp_path: Path) -> None:
    """Greedy text is the same whatever the depth, so that drafts of a smaller one are right as often."""
    options = ["--prompts", "heldout", "--input-len", "100", "--depth", "1,2", "--batch", "2", "--runs", "1"]
    first, again = (run(tmp_path, *SMALL, *options)["decode"] for _ in range(2))
    assert [line["tokens_per_round"] for line in first] == [line["tokens_per_round"] for line in again]
    one, two = (line["tokens_per_round"] for line in first)
    assert 1.3 < one < two < 3


def test_prompts_are_taken_in_turn_from_the_first_after_each_warm_up(tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(random_mimo(tmp_path)), depth=0, prefix_caching=False)
    engine = LocalEngine(config).engine
    driver = Driver(engine, prompts=[[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    for _ in range(2):
        driver.warm_up(batch=2, depth=0, input_len=3)
        assert [driver._next_prompt(2) for _ in range(4)] == [[1, 2], [4, 5], [7, 8], [1, 2]]
    driver.prefill_seconds(num_prompts=1, length=20, depth=0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["mimo-7b", "--prompts", "heldout"], "--prompts is heldout, which are the embedded model's"),
        (
            ["--prompts", "heldout", "--input-len", "128,300"],
            "--input-len is 300, no held-out prompt has more",
        ),
        (
            ["no-such-shape"],
            "MODEL is 'no-such-shape', it must be a folder or one of llama-8b, mimo-0.5b, mimo-7b, mixtral-8x7b, qwen3-30b-a3b, qwen3-8b, qwen3-next-80b-a3b, qwen3.5-0.8b, qwen3.5-27b, qwen3.5-35b-a3b, qwen3.5-9b",
        ),
        (
            ["--depth", "0,2", "--synthetic-acceptance", "0.9"],
            "--synthetic-acceptance is 0.9, it must be as long",
        ),
        (["--depth", "9"], "--depth is 9, it must be 0 to 8"),
        (["--depth", "0,5"], "--output-len is 24, too few to time a round of up to 5 drafts; set 26 or more"),
        (["--json", "/nope/x.json"], "--json is /nope/x.json, and /nope is no folder; make it, or name"),
        (["--json", "/tmp"], "--json is /tmp, which is a folder; name a file"),
    ],
    ids=[
        "heldout-of-another",
        "longer-than-heldout",
        "model",
        "rates",
        "depth",
        "few-tokens",
        "no-folder",
        "folder",
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_1(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*SMALL, *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"headway: {complaint}")


def test_a_file_that_cannot_be_written_is_one_line_below_the_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main([*SMALL, "--batch", "1", "--depth", "0", "--json", "/dev/full"]) == 1
    said = capsys.readouterr()
    assert "tokens a round" in said.out
    assert "headway: --json is /dev/full, which cannot be written: " in said.err


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", interrupted)
    assert bench.main(SMALL) == 130


@pytest.mark.slow
def test_the_command_runs_with_the_embedded_model() -> None:
    command = headway_command("bench", "engine", *SMALL, "--batch", "1", "--depth", "0,3")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens a round" in done.stdout
    assert "1 x 1,024" not in done.stdout


def test_the_weights_of_drafts_are_those_that_are_asked_for() -> None:
    asked = ["mimo-7b", "--draft-lm-head", "fp8", "--draft-layers", "full"]
    for argv, wanted in ((asked, ("fp8", "full")), (asked[:1], ("auto", "auto"))):
        config = read_settings(argv, has_gpu=True).engine_config()
        assert (config.draft_lm_head, config.draft_layers) == wanted
