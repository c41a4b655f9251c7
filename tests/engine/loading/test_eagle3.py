"""The folder of an EAGLE-3 head: what is read of it, what is refused, and that nothing of the target's says
how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headway_testing.eagle import EagleOracle
from headway_testing.families import save, tiny_model
from headway_testing.local import LocalEngine
from headway_testing.packs import FILE, formats, write_packs
from safetensors.torch import load_file, save_file

from headway.engine.layers.eagle3_head import Eagle3Head
from headway.engine.layers.model_pair import ModelPair
from headway.engine.loading import eagle3
from headway.engine.loading.checkpoint import load_model
from headway.engine.loading.drafter import load_drafter
from headway.engine.protocol.config import FULL, EngineConfig, Quantize
from headway.engine.protocol.errors import ModelError

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "vocab_size": 160}


def target_of(folder: Path, *, dtype: str = "float64", quantize: Quantize = FULL) -> ModelPair:
    return load_model(
        folder, device=torch.device("cpu"), dtype=dtype, make_draft=None, progress=lambda _: None, quantize=quantize
    )  # fmt: skip


def head_of(folder: Path, models: ModelPair) -> Eagle3Head:
    head = load_drafter(folder, models, lambda _: None).draft
    assert isinstance(head, Eagle3Head)
    return head


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tiny_model("LlamaForCausalLM"), "LlamaForCausalLM", tmp_path / "model")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return EagleOracle(tiny_model("LlamaForCausalLM"), dtype=torch.float32).save(
        tmp_path / "drafter", "original"
    )


@pytest.mark.parametrize("kind", ["fp8 blocks, f32 scales", "ct int8 channel", "ct int4 g32"])
def test_a_quantized_head_has_the_weights_of_its_twin(kind: str, tmp_path: Path) -> None:
    """Whose target is not quantized."""
    target = tiny_model("LlamaForCausalLM", **WIDE)
    save(target, "LlamaForCausalLM", tmp_path / "model")
    oracle = EagleOracle(target, dtype=torch.float32, intermediate_size=256, **WIDE)
    plain = oracle.save(tmp_path / "drafter", "original")
    packs = write_packs(plain, tmp_path / "packs", formats()[kind]())
    models, found = target_of(tmp_path / "model"), []
    for folder in packs:
        whole = {name: load_file(plain / FILE)[name] for name in ("d2t", "t2d")}
        save_file(load_file(folder / FILE) | whole, folder / FILE)
        found.append(head_of(folder, models).tensors())
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []
    exact = head_of(plain, models).tensors()
    assert not torch.equal(
        found[0]["eagle.layers.0.attention.key.weight"], exact["eagle.layers.0.attention.key.weight"]
    )


def test_quantizing_the_target_leaves_the_head_as_it_is(tmp_path: Path) -> None:
    target = tiny_model("LlamaForCausalLM", **WIDE)
    save(target, "LlamaForCausalLM", tmp_path / "model")
    folder = EagleOracle(target, dtype=torch.float32, **WIDE).save(tmp_path / "drafter", "speculators")
    models = target_of(tmp_path / "model", dtype="bfloat16", quantize=Quantize("fp8", with_lm_head=True))
    head, stored = head_of(folder, models), load_file(folder / FILE)
    exact = load_file(tmp_path / "model" / FILE)["lm_head.weight"].bfloat16()
    assert not torch.equal(models.target.lm_head.weight, exact)
    assert torch.equal(head.input.weight, stored["fc.weight"].bfloat16())
    assert torch.equal(head.lm_head.weight, stored["lm_head.weight"].bfloat16())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"midlayer.hidden_norm.weight": None}, r"lacks 1 tensors: midlayer\.hidden_norm\.weight"),
        ({"lm_head.weight": None}, r"lacks 1 tensors: lm_head\.weight"),
        ({"d2t": None}, "lacks d2t, which gives the model's ids of its 100 draft tokens"),
        ({"input_norm.weight": torch.ones(96)}, r"1 tensors that .* does not have: input_norm\.weight"),
        ({"fc.weight": torch.ones(48, 144)}, r"fc\.weight is \[48, 144\], not \[48, 96\]"),
        ({"embed_tokens.weight": torch.ones(150, 48)}, r"embed_tokens\.weight is \[150, 48\], not \[151, 48\]"),
        ({"d2t": torch.zeros(90, dtype=torch.int64)}, r"d2t of .* is \[90\] torch.int64; it must be \[100\]"),
        ({"d2t": torch.zeros(100)}, r"d2t of .* is \[100\] torch.float32"),
        ({"d2t": torch.zeros(100, dtype=torch.uint64)}, r"is \[100\] torch.uint64; it must be \[100\] of int64 or int32"),
        ({"d2t": torch.zeros(100, dtype=torch.bool)}, r"d2t of .* is \[100\] torch.bool"),
        ({"d2t": torch.full((100,), 52)}, "100 ids from 52 to 151 for 100 draft tokens; .* below 151"),
        ({"d2t": torch.full((100,), -1)}, "from -1 to 98"),
        ({"d2t": -torch.arange(100)}, "gives 1 ids from 0 to 0 for 100 draft tokens"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(
    changes: dict[str, torch.Tensor | None], message: str, model: Path, drafter: Path
) -> None:
    tensors = load_file(drafter / FILE) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, drafter / FILE)
    with pytest.raises(ModelError, match=message):
        load_drafter(drafter, target_of(model), lambda _: None)


def test_what_trainers_leave_of_the_target_is_not_read(model: Path, drafter: Path) -> None:
    tensors = load_file(drafter / FILE) | {"verifier_norm.weight": torch.ones(48)}
    save_file(tensors, drafter / FILE)
    assert "eagle.final_norm" in head_of(drafter, target_of(model)).tensors()


@pytest.mark.parametrize("differs", [False, True], ids=["copy", "own"])
def test_a_copy_of_the_targets_embedding_takes_no_memory(differs: bool, model: Path, drafter: Path) -> None:
    models = target_of(model, dtype="bfloat16")
    copy = load_file(model / FILE)["model.embed_tokens.weight"]
    copy[-1, -1] += float(differs)
    save_file(load_file(drafter / FILE) | {"embed_tokens.weight": copy}, drafter / FILE)
    head = head_of(drafter, models)
    assert ("eagle.embedding" in head.tensors()) is differs
    assert torch.equal(head._embedding, copy.bfloat16())


def test_a_full_vocabulary_needs_no_ids(model: Path, tmp_path: Path) -> None:
    oracle = EagleOracle(tiny_model("LlamaForCausalLM"), dtype=torch.float32, draft_vocab=151)
    folder = oracle.save(tmp_path / "drafter", "original")
    tensors = load_file(folder / FILE)
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, folder / FILE)
    assert head_of(folder, target_of(model)).draft_ids.tolist() == list(range(151))


def test_a_head_too_large_for_memory_is_refused(
    model: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = target_of(model)
    monkeypatch.setattr(eagle3, "available_bytes", lambda device: 1000)
    with pytest.raises(ModelError, match=r"weights of the drafter .* 1000 bytes are available on cpu beside"):
        load_drafter(drafter, models, lambda _: None)


def test_an_engine_of_dummy_weights_drafts_by_a_head_of_the_folders_shape(model: Path, drafter: Path) -> None:
    (model / "model.safetensors").unlink()
    (drafter / FILE).unlink()
    engine = LocalEngine(
        EngineConfig(
            model_path=str(model), drafter_path=str(drafter), load_format="dummy", depth=2, max_running=2
        )
    )
    assert len(engine.generate(range(20), max_tokens=30)) == 30
    assert (engine.engine.info.drafter, engine.engine.info.depth) == ("eagle3", 2)
    assert engine.engine.scheduler.snapshot().draft_tokens_per_position[1] > 0


@pytest.mark.parametrize("layers", ["full", "fp8"])
@pytest.mark.parametrize("lm_head", ["full", "fp8", "int4"])
def test_the_bytes_of_other_formats_are_known_before(lm_head: str, layers: str, tmp_path: Path) -> None:
    target = tiny_model("LlamaForCausalLM", **WIDE)
    save(target, "LlamaForCausalLM", tmp_path / "model")
    folder = EagleOracle(target, num_hidden_layers=2, **WIDE).save(tmp_path / "drafter", "speculators")
    models = load_drafter(folder, target_of(tmp_path / "model", dtype="bfloat16"), lambda _: None)
    head, outline = models.draft, models.outline().draft
    assert isinstance(head, Eagle3Head)
    assert outline is not None
    before = bytes_of(head)
    head.choose_formats(lm_head, layers)  # type: ignore[arg-type]
    assert outline.added_bytes(lm_head, layers) == bytes_of(head) - before  # type: ignore[arg-type]
    logits = head.logits(torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert logits.shape == (3, 100)


def bytes_of(head: Eagle3Head) -> int:
    """Returns the bytes of all tensors of the weights."""

    def size(values: object) -> int:
        if isinstance(values, torch.Tensor):
            return values.nbytes
        return sum(map(size, values)) if isinstance(values, tuple) else 0

    return sum(size(linear.stored) for linear in head.linears())
