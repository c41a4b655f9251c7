"""The benchmark of the chosen depth: what it measures, what it makes of it, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import pytest
from headway_testing.checkpoints import qwen2_config, random_mimo

from bench_depth import __main__ as bench
from bench_depth import measure
from bench_depth.measure import Cell, Speed
from bench_depth.profiles import STATIONARY, rates_of
from bench_depth.report import summarize

SHORT = "--seconds 0.001 --warm-up-seconds 0.001 --switch-seconds 0.002 --output-len 48"
CPU = ["--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to count them; their times mean nothing here."""
    monkeypatch.setattr(measure, "LEAST_ROUNDS", 3)


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    model, file = random_mimo(tmp_path / "model"), tmp_path / "depth.json"
    assert bench.main([str(model), *SHORT.split(), *CPU, *arguments, "--json", str(file)]) == 0
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@pytest.mark.slow
def test_every_cell_compares_the_chosen_depth_with_all_fixed_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = "--streams 1,3 --contexts 40,250 --profiles medium,switching --runs 2 --periods 1"
    report = run(tmp_path, *lengths.split())
    cells = report["cells"]
    names = [(cell["streams"], cell["input_len"], cell["profile"]) for cell in cells]
    assert names == [(n, 40, profile) for n in (1, 3) for profile in ("medium", "switching")]
    assert report["left_out"] == [f"{n} x 250: with 48 new tokens each it does not fit" for n in (1, 3)]
    for cell in cells:
        num_runs = 1 if cell["profile"] == "switching" else 2
        for speed in (cell["auto"], *cell["fixed"]):
            assert len(speed["all_tokens_per_second"]) == num_runs
            assert speed["tokens_per_second"] == median(speed["all_tokens_per_second"]) > 0
        auto, fixed = cell["auto"]["tokens_per_second"], [one["tokens_per_second"] for one in cell["fixed"]]
        assert len(fixed) == 4
        assert cell["best_depth"] == fixed.index(max(fixed))
        assert cell["over_best"] == pytest.approx(auto / max(fixed))
        assert cell["over_depth_0"] == pytest.approx(auto / fixed[0])
        assert sum(cell["shares"]) == pytest.approx(1)
        assert cell["mean_depth"] == pytest.approx(sum(k * share for k, share in enumerate(cell["shares"])))
    summary = report["summary"]
    assert summary["worst_over_best"] == min(cell["over_best"] for cell in cells)
    assert summary["mean_over_depth_0"] == pytest.approx(
        geometric_mean(cell["over_depth_0"] for cell in cells)
    )
    to_third = [cell["auto"]["tokens_per_second"] / cell["fixed"][3]["tokens_per_second"] for cell in cells]
    assert summary["mean_over_fixed"][3] == pytest.approx(geometric_mean(to_third))
    shown, told = capsys.readouterr()
    assert re.search(r"tokens/s auto [\d,]+ at a mean depth of [\d.]+, depth 0 [\d,]+, depth 1 ", told)
    assert "; 1 of 4, about " in told
    assert told.rstrip().endswith("about 0 s left")
    assert all(
        line in shown for line in ("auto over the whole grid", "left out: 3 x 250", "the text means nothing")
    )
    assert all(f"missed: {line}" in shown for line in summary["missed"])


@pytest.mark.parametrize("profile", ["high", "low", "switching"])
def test_fixed_rounds_have_that_depth_and_their_profiles_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    """Where luck is ruled out, since all drafts are accepted or none, the tokens are those that the depth and
    the rates give."""
    monkeypatch.setitem(STATIONARY, "high", (1.0, 1.0))
    monkeypatch.setitem(STATIONARY, "low", (0.0, 0.0))
    arguments = ["--streams", "2", "--contexts", "20", "--profiles", profile, "--max-depth", "2"]
    (cell,) = run(tmp_path, *arguments, "--runs", "1", "--periods", "1")["cells"]
    for speed in (cell["auto"], *cell["fixed"]):
        assert speed["tokens_per_second"] == pytest.approx(speed["expected_tokens_per_second"])
    if profile != "switching":
        for depth, speed in enumerate(cell["fixed"]):
            tokens = 2 * (depth + 1 if profile == "high" else 1)
            assert speed["tokens_per_second"] * speed["milliseconds"] == pytest.approx(1e3 * tokens)


def test_missed_bars_are_named() -> None:
    def speed(rate: float) -> Speed:
        return Speed(rate, [rate], rate, 1.0)

    def cell(auto: float, *fixed: float) -> Cell:
        return Cell.of(8, 2_048, "low", [1.0, 0.0], speed(auto), [speed(one) for one in fixed])

    summary = summarize([cell(97, 100, 90), cell(94, 90, 100), cell(99, 100, 50), cell(90, 100, 99)])
    assert summary is not None
    assert summary.missed == [
        "8 x 2,048, low: 0.970 of depth 0, the bar is 0.98",
        "8 x 2,048, low: 0.940 of the best fixed depth, the bar is 0.95",
        "8 x 2,048, low: 0.900 of the best fixed depth, the bar is 0.95",
        "8 x 2,048, low: 0.900 of depth 0, the bar is 0.98",
    ]
    assert (summary.worst_over_best, summary.worst_over_depth_0) == (0.9, 0.9)
    assert summarize([]) is None


def test_profiles_go_on_beyond_their_positions() -> None:
    assert rates_of("high", 2) == (0.9, 0.8)
    assert rates_of("high", 5) == pytest.approx((0.9, 0.8, 0.7, 0.6125, 0.5359375))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-depth", "9"], "--max-depth is 9, it must be 1 to 8"),
        (
            ["--output-len", "17"],
            "--output-len is 17, too few to time a round of up to 3 drafts; set 18 or more",
        ),
        (["--json", "nowhere/x.json"], "--json is nowhere/x.json, and nowhere is no folder"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(arguments) == 1
    assert capsys.readouterr().err.startswith(f"headway: {message}")


def test_a_model_without_a_head_has_nothing_to_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen2_config()))
    assert bench.main([str(tmp_path), "--load-format", "dummy", *CPU]) == 1
    assert "has no MTP head that could draft" in capsys.readouterr().err


def test_profiles_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--profiles", "high,hard"])
    assert "none of high, medium, low, switching" in capsys.readouterr().err
