"""`headway bench exact` finds nothing in an engine that is exact, and finds faults of rounding that are planted in it."""

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
from headway_testing.hybrid import HybridOracle
from headway_testing.planted import (
    FEW_ROWS,
    plant,
    splits_keys_of_many_rows,
    splits_products_of_few_rows,
    sums_added_norms_of_many_rows_otherwise,
    sums_norms_of_many_rows_otherwise,
)

from headway.engine.bench.exact.__main__ import main, run
from headway.engine.bench.exact.combinations import all_combinations, draw, make_groups, make_trials
from headway.engine.bench.exact.compare import first_place
from headway.engine.bench.exact.report import Report
from headway.engine.bench.exact.session import Answer
from headway.engine.bench.exact.settings import read_settings
from headway.engine.layers import weights
from headway.kernels import Activation

NUM_TOKENS = 6
CPU = ("--device", "cpu", "--threads", "1", "--kv-cache-memory", str(1 << 26))
# A company of 12 has more rows than FEW_ROWS, and a request alone has fewer.
SMALL = (*CPU, "--depth", "1", "--batch", "1,12", "--tokens", str(NUM_TOKENS), "--input-len", "48")
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


def test_nothing_changes_a_text_of_recurrent_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No prompt continues behind an output, and no chunk is smaller than a piece of 64 tokens, in which prompts are computed."""
    model, file = HybridOracle().save(tmp_path / "model"), tmp_path / "exact.json"
    arguments = [str(model), *CPU, "--depth", "1", "--batch", "1,4", "--tokens", "4", "--input-len", "100"]
    assert main([*arguments, "--requests", "12", "--soak", "6", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["num_differing"] == report["soak"]["num_differing"] == 0
    assert report["coverage"]["num_probes"] == 0
    assert {"64", "engine's own"} == {
        level["value"] for level in report["levels"] if level["factor"] == "prompt chunks"
    }
    assert main([*arguments, "--prefill-chunk", "100,32"]) == 1
    assert "--prefill-chunk has 32, it must be 64 or more" in capsys.readouterr().err


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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_of_the_order_of_sums_is_found_on_a_cpu(
    folder: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "can_be_packed", lambda weight: False)  # the fault reads the weight
    arguments = (folder, *SMALL, "--requests", "8", "--texts", "4", "--batch", "12")
    assert check(*arguments).num_differing == 0
    for name, planted in FAULTS[fault].items():
        plant(monkeypatch, name, planted)
    assert check(*arguments).num_differing > 0


def test_recorded_drafts_are_accepted_where_the_weights_are_random(folder: str) -> None:
    report = check(folder, *SMALL, "--requests", "12", "--texts", "6", "--load-format", "dummy")
    assert report.num_differing == 0
    assert report.drafter == "recorded"
    assert 0.4 < report.coverage.num_accepted / report.coverage.num_drafted < 0.9


GPU = ("--device", "cuda", "--dtype", "bfloat16", "--tokens", "48", "--input-len", "160")
# A norm's last bit seldom survives the rounding to 16 bits: about one token of 300 differs if one norm of 256 values is another.
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
