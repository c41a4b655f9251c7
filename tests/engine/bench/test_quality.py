"""`headway bench quality`: perplexity and agreement, as transformers' logits have them."""

from __future__ import annotations

import json
import math
import random
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import random_qwen2
from headway_testing.oracle import Oracle

from headway.engine import options
from headway.engine.bench.quality import compare, main
from headway.engine.protocol.errors import ConfigError
from headway.kernels import has_integer_products

DEMO = Path(str(files("headway.engine.demo")))


def texts(vocab_size: int) -> list[list[int]]:
    drawn = random.Random(0)
    return [[drawn.randrange(vocab_size) for _ in range(length)] for length in (40, 7, 23)]


def test_perplexity_and_agreement_are_those_of_the_models_logits(tmp_path: Path) -> None:
    oracles = [Oracle(dtype=torch.float32, seed=seed) for seed in (0, 1)]
    folders = [oracle.save(tmp_path / str(n), with_head=False) for n, oracle in enumerate(oracles)]
    given = texts(oracles[0].model.config.vocab_size)
    found = compare([str(folder) for folder in folders], given, device="cpu", dtype="float32")
    sums, best = [], []
    for oracle in oracles:
        with torch.no_grad():
            logits = [oracle.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for ids in given]
        own = [
            row.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
            for row, ids in zip(logits, given, strict=True)
        ]
        sums.append(sum(own))
        best.append(torch.cat([row.argmax(-1) for row in logits]))
    assert found.num_tokens == 67
    assert found.perplexities == pytest.approx([math.exp(-total / 67) for total in sums], rel=1e-4)
    assert found.agreement == (best[0] == best[1]).float().mean().item()


def test_a_model_agrees_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "quality.json"
    assert main([str(DEMO), str(DEMO), "--texts", "2", "--device", "cpu", "--json", str(kept)]) == 0
    report = json.loads(kept.read_text())
    assert report["agreement"] == 1.0
    assert len(set(report["perplexities"])) == 1
    assert "100.00%" in capsys.readouterr().out


@pytest.mark.skipif(not has_integer_products(), reason="needs Linux, an x86 CPU with AVX2 and a compiler")
def test_a_model_is_compared_with_itself_in_few_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "quality.json"
    command = [str(DEMO), str(DEMO), "--texts", "3", "--device", "cpu", "--json", str(kept)]
    assert main([*command, "--cpu-weights", "full", "int4"]) == 0
    report = json.loads(kept.read_text())
    assert 0.8 < report["agreement"] < 1
    assert report["cpu_weights"] == ["full", "int4"]
    assert report["perplexities"][0] != report["perplexities"][1]
    assert ", int4" in capsys.readouterr().out


def test_full_weights_are_not_compared_in_the_name_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "has_integer_products", lambda: False)
    command = [str(DEMO), str(DEMO), "--texts", "1", "--device", "cpu"]
    assert main([*command, "--cpu-weights", "int8", "full"]) == 1
    assert "--cpu-weights is int8, but this machine has full alone" in capsys.readouterr().err


def test_models_of_other_vocabularies_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = random_qwen2(tmp_path / "small")
    with pytest.raises(ConfigError, match="give models of one vocabulary"):
        compare([str(small), str(small)], [[1, 2, 4000]], device="cpu")
    assert main([str(small), str(small)]) == 1
    assert "give a folder with a tokenizer.json" in capsys.readouterr().err
    shutil.rmtree(small)
    assert main([str(small), str(small)]) == 1


def test_models_that_encode_texts_differently_are_refused_before_the_first_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = random_qwen2(tmp_path / "other", vocab_size=4096)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main([str(DEMO), str(other), "--texts", "1", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.endswith("encode the texts differently; give models of one vocabulary\n")


def test_a_file_that_cannot_be_written_is_told_before_the_first_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(DEMO), str(DEMO), "--json", "/"]) == 1
    assert capsys.readouterr().err == "headway: --json is /, which is a folder; name a file\n"
