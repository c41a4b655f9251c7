"""A quantised folder gives the logits and the text of its dequantised twin, whatever the depth and the
batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.exactness import Case, generate_with
from headway_testing.families import save, tiny_model
from headway_testing.hybrid import HybridOracle
from headway_testing.local import LocalEngine
from headway_testing.marks import slow_but
from headway_testing.packs import RAGGED, formats, write_packs
from headway_testing.paged import PagedSequences, load

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams

SIZES = RAGGED | {"num_attention_heads": 10}  # Qwen3's and Llama's configs want a divisor of hidden_size
HYBRID = RAGGED | {"num_hidden_layers": 4, "linear_value_head_dim": 16}
FOLDERS: dict[str, Callable[[Path], Path]] = {
    "MiMo": lambda folder: random_mimo(folder, **RAGGED),
    "Qwen3": lambda folder: save(tiny_model("Qwen3ForCausalLM", **SIZES), "Qwen3ForCausalLM", folder),
    "Llama": lambda folder: save(tiny_model("LlamaForCausalLM", **SIZES), "LlamaForCausalLM", folder),
    "Qwen3.5": lambda folder: HybridOracle(**HYBRID).save(folder, sees_images=True),
}
NAMES = ["fp8 blocks, bf16 scales", "fp8 tensors", "ct int4 g32, zeros", "gptq desc_act", "awq"]
LENGTHS = (1, 15, 17, 40, 90)


def cases() -> list[Case]:
    """Greedy and sampled, of lengths about the borders of blocks."""
    tokens = torch.randint(0, 151, (max(LENGTHS),), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        Case(tuple(tokens[:length]), 12, SamplingParams(temperature=0.7 * (seed % 2), seed=seed))
        for seed, length in enumerate(LENGTHS)
    ]


PLACES = [
    pytest.param({"device": "cpu", "dtype": "float32"}, id="cpu"),
    pytest.param(
        {"device": "cuda", "dtype": "bfloat16"}, marks=[pytest.mark.gpu, pytest.mark.timeout(300)], id="gpu"
    ),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", slow_but(NAMES[:1], NAMES))
@pytest.mark.parametrize("family", FOLDERS)
def test_logits_and_texts_are_those_of_the_dequantised_folder(
    family: str, name: str, place: dict[str, Any], tmp_path: Path
) -> None:
    dense = FOLDERS[family](tmp_path / "dense")
    pack, twin = write_packs(dense, tmp_path, formats()[name](), quantizes_head=name.startswith("fp8"))
    assert torch.equal(logits_of(pack), logits_of(twin))
    # Drafts by n-grams where the family has no head.
    depths: list[dict[str, Any]] = [{"depth": 0}, {"depth": 2}, {"depth": 3, "chooses_depth": True}]
    for options in depths:
        texts = [texts_of(folder, **place, **options) for folder in (pack, twin)]
        assert texts[0] == texts[1]


def logits_of(folder: Path) -> torch.Tensor:
    model, tokens = load(folder, dtype="float32"), torch.tensor(cases()[-1].prompt)
    sequences = PagedSequences(model, 1, len(tokens))
    return model.logits(sequences.forward([(0, 0, len(tokens))], tokens))


def texts_of(folder: Path, **options: Any) -> list[list[list[int]]]:
    """Returns the outputs of a crowd, twice: with a cold cache of prefixes, and with a warm one."""
    config = EngineConfig(model_path=str(folder), kv_cache_memory_bytes=1 << 24, **options)
    engine = LocalEngine(config)
    return [generate_with(engine, cases()) for _ in range(2)]


# Layers of 64 outputs and 256 inputs, or multiples: what kernels read codes of.
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
WIDE_HYBRID = WIDE | {"num_hidden_layers": 4, "linear_value_head_dim": 128}
WIDE_EXPERTS = WIDE_HYBRID | {
    "architecture": "Qwen3_5MoeForCausalLM",
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
WIDE_FOLDERS: dict[str, Callable[[Path], Path]] = {
    "MiMo": lambda folder: random_mimo(folder, **WIDE),
    "Qwen3": lambda folder: save(tiny_model("Qwen3ForCausalLM", **WIDE), "Qwen3ForCausalLM", folder),
    "Llama": lambda folder: save(tiny_model("LlamaForCausalLM", **WIDE), "LlamaForCausalLM", folder),
    "Qwen3.5": lambda folder: HybridOracle(**WIDE_HYBRID).save(folder, sees_images=True),
    "experts": lambda folder: HybridOracle(**WIDE_EXPERTS).save(folder),
}
READ_AS_CODES = ["fp8 blocks, f32 scales", "fp8 blocks, bf16 scales", "fp8 tensors", "ct float channel"]
READ_AS_CODES += ["ct int4 g128, zeros", "ct int4 channel"]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", READ_AS_CODES)
@pytest.mark.parametrize("family", WIDE_FOLDERS)
def test_codes_on_a_gpu_give_the_text_of_the_dequantised_folder(
    family: str, name: str, tmp_path: Path
) -> None:
    """What kernels read is codes, and the text is that of dense weights."""
    dense = WIDE_FOLDERS[family](tmp_path / "dense")
    folders = write_packs(dense, tmp_path, formats()[name](), quantizes_head=name.startswith("fp8"))
    for depth in (0, 3):
        texts = []
        for folder, is_coded in zip(folders, (True, False), strict=True):
            options = {"device": "cuda", "dtype": "bfloat16", "depth": depth, "max_running": 96}
            config = EngineConfig(model_path=str(folder), kv_cache_memory_bytes=1 << 26, **options)
            engine = LocalEngine(config)
            assert any(linear.is_quantized for linear in engine.engine.runner.model.linears()) == is_coded
            texts.append([generate_with(engine, cases() * count) for count in (1, 8, 19)])
        assert texts[0] == texts[1]
