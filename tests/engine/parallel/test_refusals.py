"""What ranks cannot compute is refused before any of them is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from headway_testing.checkpoints import random_mimo

from headway.engine.models.registry import read_model_spec
from headway.engine.options import check_ranks
from headway.engine.outline import ranks_of_device, wanted_device
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.speculation.select import announced_head


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"tensor_parallel_size": 4},
            "6 heads of queries, which 4 ranks cannot share alike; .*with: 1, 2$",
        ),
        (
            {"tensor_parallel_size": 2, "dtype": "float64"},
            "the order of a layer's sums depends .*use --dtype float32",
        ),
        ({"tensor_parallel_size": 2, "cpu_weights": "int4"}, "--cpu-weights int4 is for one rank"),
    ],
    ids=str,
)
def test_ranks_that_cannot_share_a_model_are_refused(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = random_mimo(tmp_path, vocab_size=152)
    spec = read_model_spec(folder)
    config = EngineConfig(model_path=str(folder), device="cpu", **changes)
    with pytest.raises(ConfigError, match=told):
        check_ranks(config, spec, announced_head(spec))


def test_a_number_of_ranks_has_a_limit() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 9, it must be 1 to 8"):
        EngineConfig(model_path="", tensor_parallel_size=9)


def test_every_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it asks again, with its GPU as the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = EngineConfig(model_path="", tensor_parallel_size=4)
    for rank in range(4):
        monkeypatch.setattr(torch.cuda, "current_device", lambda rank=rank: rank)
        assert wanted_device(config, rank) == torch.device("cuda", rank)


def test_every_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = torch.device("cuda", 0)
    assert ranks_of_device(EngineConfig(model_path="", tensor_parallel_size=2), gpu) == 1
    config = EngineConfig(model_path="", tensor_parallel_size=4)
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size is 4, .* 2 are visible .* set it to 2 or less"
    ):
        ranks_of_device(config, gpu)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert ranks_of_device(config, gpu) == 2
