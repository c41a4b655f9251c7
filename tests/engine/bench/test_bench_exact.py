"""`headway bench exact` finds nothing in an engine that is exact, and finds faults of rounding that are
planted in it."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.hybrid import constructed_hybrid
from headway_testing.planted import (
    FEW_ROWS,
    forgets_checkpoints,
    plant,
    saves_checkpoints_too_early,
    splits_keys_of_many_rows,
    splits_products_of_few_rows,
    sums_added_norms_of_many_rows_otherwise,
    sums_norms_of_many_rows_otherwise,
)

from headway.engine import build
from headway.engine.bench.exact import __main__ as exact
from headway.engine.bench.exact.__main__ import main, run
from headway.engine.bench.exact.combinations import all_combinations, draw, make_groups, make_trials
from headway.engine.bench.exact.compare import first_place
from headway.engine.bench.exact.report import Report
from headway.engine.bench.exact.session import Answer
from headway.engine.bench.exact.settings import Settings, read_settings
from headway.engine.build import Engine
from headway.engine.layers import linear
from headway.engine.layers.delta_net import DeltaNet
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.model_pair import ModelPair
from headway.engine.state.specs import LayerState
from headway.kernels import Activation

NUM_TOKENS = 6
CPU = ("--device", "cpu", "--threads", "1", "--kv-cache-memory", str(1 << 26))
# A company of 12 has more rows than FEW_ROWS, and a request alone has fewer.
SMALL = (*CPU, "--depth", "1", "--batch", "1,12", "--tokens", str(NUM_TOKENS), "--input-len", "48")
RECURRENT = (*CPU, "--depth", "1", "--batch", "1,4", "--tokens", "4", "--input-len", "140")
FAULTS = {
    "a product with another split": {"linear": splits_products_of_few_rows},
    "a norm with another order": {
        "rms_norm": sums_norms_of_many_rows_otherwise,
        "add_rms_norm": sums_added_norms_of_many_rows_otherwise,
    },
    "attention whose split follows the rows": {"attention": splits_keys_of_many_rows},
}


def check(*arguments: str) -> Report:
    has_gpu = torch.cuda.is_available()
    return run(read_settings(arguments, has_gpu=has_gpu), "headway bench exact")


def nudges_many_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Moves each result of a product of many rows to the next number."""

    def linear(x: Activation, *args: Any, **kwargs: Any) -> Activation:
        result: Activation = original(x, *args, **kwargs)
        if len(x.values) <= FEW_ROWS or result.deferred is not None:
            return result
        values = result.values
        return Activation(values.copy_(torch.nextafter(values, torch.full_like(values, torch.inf))))

    return linear


def test_each_combination_is_drawn_equally_often() -> None:
    combinations = all_combinations(range(5), (1, 32, 128), (None, 80))
    assert len(combinations) == len(set(combinations)) == 240
    counts = Counter(draw(1000, combinations, random.Random(3)))
    assert set(counts) == set(combinations)
    assert {4, 5} == set(counts.values())


def test_trials_get_texts_of_their_temperature_and_run_in_groups_of_one_setting() -> None:
    combinations = all_combinations(range(3), (1, 8), (None, 32))
    drawn = draw(200, combinations, random.Random(3))
    trials = make_trials(drawn, [0, 2, 4], [1, 3, 5])
    assert all((trial.text % 2 == 0) == trial.combination.is_greedy for trial in trials)
    groups = make_groups(trials, random.Random(4))
    assert sorted(trial.index for group in groups for trial in group.trials) == list(range(200))
    for group in groups:
        assert 1 <= len(group.trials) <= group.setting.company
        assert {trial.combination[:3] for trial in group.trials} == {tuple(group.setting)}
    kinds = {(group.is_scored, group.is_spread) for group in groups if group.setting.company > 1}
    assert len(kinds) == 4
    assert all(group.is_scored for group in groups if group.setting.company == 1)


@pytest.mark.parametrize(
    ("tokens", "scores", "start", "place"),
    [
        ([5, 6, 7], [-1.0, -2.0, -3.0], 0, None),
        ([5, 6], [-1.0, -2.0], 0, None),
        ([5, 6], [], 0, None),
        ([5, 8], [], 0, 1),
        ([5, 6], [-1.0, -2.0000002], 0, 1),
        ([5, 6], [0.0, -2.0], 0, 0),
        ([7], [-3.0], 2, None),
        ([7], [-3.5], 2, 2),
        ([5, 6, 7, 8], [], 0, 3),
    ],
)
def test_the_first_place_that_differs_is_found(
    tokens: list[int], scores: list[float], start: int, place: int | None
) -> None:
    wanted = Answer(array("q", [5, 6, 7]), array("d", [-1.0, -2.0, -3.0]))
    assert first_place(wanted, Answer(array("q", tokens), array("d", scores)), start=start) == place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose MTP head is often right."""
    return str(constructed_mimo(tmp_path_factory.mktemp("model") / "mimo", noise=0.08))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--depth", "9"), "--depth is 9, it must be 0 to 8"),
        (("--json", "/"), "--json is /"),
        (
            ("--input-len", "4000"),
            "--input-len is 4000 and --tokens 6, together with one token more at most 2048",
        ),
        (("--drafter", "mtp", "qwen3-8b"), "has no MTP head"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 1
    assert words in capsys.readouterr().err


def test_nothing_changes_a_text_on_a_cpu(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "exact.json"
    assert (
        main([folder, *SMALL, "--requests", "32", "--texts", "16", "--soak", "12", "--json", str(file)]) == 0
    )
    report = json.loads(file.read_text())
    assert report["num_differing"] == report["soak"]["num_differing"] == 0
    assert (report["num_combinations"], report["least_draws"]) == (32, 1)
    coverage = report["coverage"]
    assert coverage["num_tokens"] == 32 * NUM_TOKENS
    assert coverage["num_preempted"] == sum(
        level["num_requests"] for level in report["levels"] if level["value"] == "preempted"
    )
    assert coverage["num_warm_hits"] > 4
    assert coverage["num_probes"] > 4
    assert coverage["num_scored"] > 16 * NUM_TOKENS
    assert coverage["num_masked_steps"] > 0
    assert 0.3 < coverage["num_accepted"] / coverage["num_drafted"] < 0.99
    assert "exact: no request differs" in capsys.readouterr().out


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3.5 whose MTP head is right about half of the time."""
    return str(constructed_hybrid(tmp_path_factory.mktemp("model") / "qwen", noise=0.07))


@pytest.mark.slow
def test_nothing_changes_a_text_of_recurrent_layers(
    hybrid: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts go on from checkpoints at multiples of 64 tokens, and no chunk is smaller than such a piece.
    What a run without log-probabilities leaves in the cache is seen at the first token of its prompt,
    computed once more."""
    file = tmp_path / "exact.json"
    assert main([hybrid, *RECURRENT, "--requests", "32", "--soak", "12", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["num_differing"] == report["soak"]["num_differing"] == 0
    coverage = report["coverage"]
    assert coverage["num_warm_hits"] > 4
    assert coverage["num_preempted"] > 8
    assert coverage["num_probes"] > coverage["num_probe_hits"] > 0
    assert 0.2 < coverage["num_accepted"] / coverage["num_drafted"] < 0.99
    values = {factor: [] for factor in ("prompt chunks", "engine")}
    for level in report["levels"]:
        values.get(level["factor"], []).append(level["value"])
    assert values == {
        "prompt chunks": ["64", "engine's own"],
        "engine": ["a restarted engine", "that of the references"],
    }
    assert main([hybrid, *RECURRENT, "--prefill-chunk", "100,32"]) == 1
    assert "--prefill-chunk has 32, it must be 64 or more" in capsys.readouterr().err


def keeps_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    """The state takes in all tokens of a window."""
    commit = DeltaNet.commit

    def commit_all(net: DeltaNet, inputs: ForwardInputs, accepted: torch.Tensor, state: LayerState) -> None:
        assert inputs.rows is not None
        whole = torch.full_like(accepted, inputs.rows.width)
        commit(net, inputs, torch.where(accepted > 0, whole, accepted), state)

    patch.setattr(DeltaNet, "commit", commit_all)


def takes_longer_windows_otherwise(patch: pytest.MonkeyPatch) -> None:
    """Rounds with drafts keep states whose last bits differ."""
    commit = DeltaNet.commit

    def nudge(net: DeltaNet, inputs: ForwardInputs, accepted: torch.Tensor, state: LayerState) -> None:
        commit(net, inputs, accepted, state)
        assert inputs.rows is not None
        if inputs.rows.width > 1:
            states, ids = state["states"], inputs.rows.state_ids[: inputs.rows.num_windows]
            states[:, ids] = torch.nextafter(states[:, ids], torch.full_like(states[:, ids], torch.inf))

    patch.setattr(DeltaNet, "commit", nudge)


def draws_another_state(patch: pytest.MonkeyPatch) -> None:
    """An engine that is started later decays its states otherwise, by a unit in the last place."""
    load, started = build.load_model, []

    def load_once_more(*args: Any, **kwargs: Any) -> ModelPair:
        models = load(*args, **kwargs)
        for layer in models.target.layers if started else ():
            if isinstance(layer.mixer, DeltaNet):
                bias = layer.mixer._rule.decay_bias
                bias.copy_(torch.nextafter(bias, torch.full_like(bias, torch.inf)))
        started.append(models)
        return models

    patch.setattr(build, "load_model", load_once_more)


# By fault, the factor and its value that most of the runs that differ have.
RECURRENT_FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, str]] = {
    forgets_checkpoints: ("prefix cache", "warm"),
    saves_checkpoints_too_early: ("prefix cache", "warm"),
    keeps_rejected_drafts: ("depth", "1"),
    takes_longer_windows_otherwise: ("depth", "1"),
    draws_another_state: ("engine", "a restarted engine"),
}


@pytest.mark.parametrize(
    "fault",
    [
        forgets_checkpoints,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (keeps_rejected_drafts, draws_another_state)),
        *(pytest.param(f, marks=pytest.mark.long) for f in (saves_checkpoints_too_early, takes_longer_windows_otherwise)),
    ],
)  # fmt: skip
def test_a_wrong_recurrent_state_is_found_and_where_it_comes_from(
    fault: Callable[[pytest.MonkeyPatch], None], hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    report = check(hybrid, *RECURRENT, "--requests", "24", "--texts", "8", "--batch", "4")
    assert report.num_differing > 0
    factor, value = RECURRENT_FAULTS[fault]
    found = {level.value: level.num_differing for level in report.levels if level.factor == factor}
    assert found[value] >= report.num_differing / 2, found
    if factor == "engine":
        assert found[value] == report.num_differing


def test_a_fault_that_follows_the_number_of_rows_is_found_and_shown(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, "linear", nudges_many_rows)
    assert main([folder, *SMALL, "--requests", "12", "--texts", "4", "--soak", "8"]) == 1
    told = capsys.readouterr().out
    assert "NOT EXACT" in told
    first = told[told.index("the first one: request ") :]
    for part in ("token ", "reference: token", "this run:  token", "log-probabilities", "depth "):
        assert part in first


FEW_ON_A_CPU = (*SMALL, "--requests", "8", "--texts", "4", "--batch", "12")


def packs_no_weight(patch: pytest.MonkeyPatch) -> None:
    """The faults read the weights."""
    patch.setattr(linear, "can_be_packed", lambda weight: False)


@pytest.fixture(scope="module")
def num_differing_without_a_fault(folder: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        packs_no_weight(patch)
        return check(folder, *FEW_ON_A_CPU).num_differing


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=pytest.mark.long if name == "a norm with another order" else ())
        for name in FAULTS
    ],
)
def test_a_change_of_the_order_of_sums_is_found_on_a_cpu(
    folder: str, fault: str, num_differing_without_a_fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_differing_without_a_fault == 0
    packs_no_weight(monkeypatch)
    for name, planted in FAULTS[fault].items():
        plant(monkeypatch, name, planted)
    assert check(folder, *FEW_ON_A_CPU).num_differing > 0


def test_recorded_drafts_are_accepted_where_the_weights_are_random(folder: str) -> None:
    report = check(folder, *SMALL, "--requests", "12", "--texts", "6", "--load-format", "dummy")
    assert report.num_differing == 0
    assert report.drafter == "recorded"
    assert 0.4 < report.coverage.num_accepted / report.coverage.num_drafted < 0.9


@pytest.mark.slow
def test_two_ranks_are_compared_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    num_ranks: list[int] = []

    def noting(settings: Settings, size: int) -> Engine:
        engine = start(settings, size)
        num_ranks.append(engine.info.num_ranks)
        return engine

    start = exact._start
    monkeypatch.setattr(exact, "_start", noting)
    report = check(*SMALL, "--tp", "2", "--requests", "24", "--texts", "12")
    assert num_ranks == [2, 1]
    assert report.num_differing == 0
    assert {level.value for level in report.levels} >= {"another engine, of one rank"}


GPU = ("--device", "cuda", "--dtype", "bfloat16", "--tokens", "48", "--input-len", "160")
# A norm's last bit seldom survives the rounding to 16 bits: about one token of 300 differs if one norm of 256
# values is another.
FEW_ON_A_GPU = (*GPU, "--requests", "256", "--texts", "64", "--tokens", "64", "--depth", "1", "--batch", "32")


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_nothing_changes_a_text_on_a_gpu() -> None:
    report = check(*GPU, "--requests", "480", "--soak", "1000")
    print(report.coverage, report.seconds)
    assert (report.num_combinations, report.least_draws) == (240, 2)
    assert report.soak is not None
    shown = [one.describe() for one in report.differences[:3]]
    assert (report.num_differing, report.soak.num_differing) == (0, 0), "\n".join(shown)


@pytest.fixture(scope="module")
def is_exact_without_a_fault() -> bool:
    return check(*FEW_ON_A_GPU).is_exact


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_of_the_order_of_sums_is_found_on_a_gpu(
    fault: str, is_exact_without_a_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_exact_without_a_fault, "differences are found without a fault, too"
    for name, planted in FAULTS[fault].items():
        plant(monkeypatch, name, planted)
    report = check(*FEW_ON_A_GPU)
    print(f"{fault}: {report.num_differing} of {report.num_requests} requests differ")
    assert report.num_differing > 0
