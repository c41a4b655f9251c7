"""What is decided from the configuration and the model when an engine is put together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from headway_testing.checkpoints import mimo_config, random_mimo, random_qwen2, random_tensors, write_folder
from headway_testing.hybrid import HybridOracle
from headway_testing.local import LocalEngine
from headway_testing.outline import outline
from headway_testing.paged import load_pair

from headway.engine import build as assembly
from headway.engine import options
from headway.engine.build import assemble, order_sums
from headway.engine.defaults import max_running, num_threads, prefill_policy
from headway.engine.layers import linear as linear_module
from headway.engine.options import (
    check_deterministic,
    draft_layers_of,
    draft_lm_head_of,
    has_ordered_sums,
    with_formats,
)
from headway.engine.outline import DeviceFacts, Outline
from headway.engine.protocol.config import CpuWeights, EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.resolve import Resolved, resolve
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.speculation.select import drafter_name
from headway.engine.state.specs import PagedSpec, RowSpec
from headway.kernels import Float8Weight


@pytest.mark.parametrize(
    ("head", "has_float8", "changes", "expected"),
    [
        ("auto", True, {}, "int4"),
        ("auto", True, {"hidden": 4224}, "fp8"),
        ("auto", False, {}, "full"),
        ("auto", True, {"vocab_size": 50_257}, "full"),
        ("auto", True, {"vocab_size": 4096}, "full"),
        ("auto", False, {"device": "cpu"}, "full"),
        ("auto", True, {"dtype": torch.float32}, "full"),
        ("auto", True, {"hidden": 4100}, "full"),
        ("auto", True, {"has_draft_head": False}, "full"),
        ("full", True, {}, "full"),
        ("fp8", True, {"vocab_size": 4096}, "fp8"),
        ("int4", True, {"hidden": 256, "vocab_size": 4096}, "int4"),
    ],
    ids=str,
)
def test_drafts_take_few_bits_where_that_pays(
    head: str,
    changes: dict[str, Any],
    expected: str,
    *,
    has_float8: bool,
) -> None:
    config = EngineConfig(model_path="", draft_lm_head=head)  # type: ignore[arg-type]
    assert draft_lm_head_of(config, outline(has_float8=has_float8, **changes)) == expected


@pytest.mark.parametrize(
    ("head", "changes", "words"),
    [
        ("fp8", {"hidden": 100}, "fp8.* 128, .*hidden size of 100 and"),
        ("fp8", {"has_draft_head": False}, "without drafts"),
        ("fp8", {}, "fp8.* 8.9 or later; .* a vocabulary of 151680, compute capability 8.0, with"),
        ("int4", {}, "int4.* 256, .* 8.9 or later; .*compute capability 8.0, with"),
        ("fp8", {"device": "cpu"}, "on cpu .* a vocabulary of 151680, compute capability -, with"),
    ],
    ids=str,
)
def test_few_bits_that_cannot_be_are_refused(head: str, changes: dict[str, Any], words: str) -> None:
    config = EngineConfig(model_path="", draft_lm_head=head)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        draft_lm_head_of(config, outline(**changes))


@pytest.mark.parametrize(
    ("layers", "has_float8", "changes", "expected"),
    [
        ("auto", True, {}, "fp8"),
        ("auto", True, {"hidden": 2048}, "full"),
        ("auto", False, {}, "full"),
        ("auto", True, {"hidden": 4100}, "full"),
        ("auto", True, {"device": "cpu"}, "full"),
        ("auto", True, {"dtype": torch.float32}, "full"),
        ("auto", True, {"has_draft_head": False}, "full"),
        ("full", True, {}, "full"),
        ("fp8", True, {"hidden": 64}, "fp8"),
    ],
    ids=str,
)
def test_the_mtp_layer_is_of_float8_where_that_pays(
    layers: str,
    changes: dict[str, Any],
    expected: str,
    *,
    has_float8: bool,
) -> None:
    has_float8 = has_float8 and changes.get("device") != "cpu"
    config = EngineConfig(model_path="", draft_layers=layers)  # type: ignore[arg-type]
    assert draft_layers_of(config, outline(has_float8=has_float8, **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {},
            "8.9 or later, .*bfloat16 on cuda, compute capability 8.0, with drafts, of sizes .4096, 6144, 8192, 22016",
        ),
        ({"device": "cpu"}, "on cpu, compute capability -, with"),
        ({"has_draft_head": False}, "without drafts"),
        ({"hidden": 4100}, "with drafts, of sizes .4100, 6144, 8200, 22016"),
        ({"dtype": torch.float32}, "float32 on cuda"),
    ],
    ids=str,
)
def test_layers_of_float8_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    has_float8 = bool(changes.keys() & {"hidden", "dtype"})
    config = EngineConfig(model_path="", draft_layers="fp8")
    with pytest.raises(ConfigError, match=words):
        draft_layers_of(config, outline(has_float8=has_float8, **changes))


@pytest.mark.parametrize(
    ("num_layers", "multiprocessors", "available_gib", "chunk", "idle_chunk"),
    [
        (36, 132, 110, 1024, 8192),
        (1, 132, 110, 1024, 8192),
        (36, 58, 110, 512, 2048),
        (36, 108, 110, 512, 4096),
        (380, 132, 110, 512, 2048),
        (36, 132, 7, 1024, 4096),
        (36, 132, 0.5, 512, 512),
    ],
    ids=["usual", "small-model", "slow", "slower", "large-model", "little-memory", "hardly-any"],
)  # fmt: skip
def test_a_fast_gpu_takes_longer_chunks_and_the_longest_while_idle(
    num_layers: int,
    multiprocessors: int,
    available_gib: float,
    chunk: int,
    idle_chunk: int,
) -> None:
    """36 layers, lm_head and the draft head multiply 7.2 billion weights. Of 7 GiB half of 15 %, 0.5 GiB, for
    5,269 tokens of 107 kB."""
    shape = outline(num_layers=num_layers, num_multiprocessors=multiprocessors)
    policy = prefill_policy(EngineConfig(model_path=""), shape, int(available_gib * 2**30))
    assert (policy.separate, policy.idle) == (chunk, idle_chunk)
    assert policy.mixed == min(chunk, 384)


def test_chunks_are_as_long_in_every_step_on_a_cpu_and_where_a_user_says_how_long() -> None:
    config, asked = EngineConfig(model_path=""), EngineConfig(model_path="", prefill_chunk=2048)
    cpu, available = outline(device="cpu", num_layers=36), 1 << 30
    assert prefill_policy(config, cpu, available) == PrefillPolicy.uniform(16)
    assert prefill_policy(asked, cpu, available) == PrefillPolicy.uniform(2048)
    expected = PrefillPolicy.uniform(2048, mixed_above_tokens=8)
    assert prefill_policy(asked, outline(), available) == expected


@pytest.mark.parametrize(
    ("available_gib", "depth", "vocab_size", "rows"),
    [(120, 3, 151_680, 256), (24, 3, 151_680, 256), (7, 3, 151_680, 128), (7, 0, 151_680, 256), (2, 3, 151_680, 64)],
    ids=["large", "enough", "small", "no-drafts", "tiny"],
)  # fmt: skip
def test_a_gpu_runs_as_many_requests_as_leave_room_for_their_logits(
    available_gib: int, depth: int, vocab_size: int, rows: int
) -> None:
    """Half of the 15 % beside the KV cache, in bfloat16 and float32: of 7 GiB 0.5, for 154 rows of 3.5 MiB,
    in steps of 32."""
    available = available_gib << 30
    assert max_running(outline(vocab_size=vocab_size), depth, available) == rows
    assert max_running(outline(device="cpu"), depth, available) == 64


@pytest.mark.parametrize(("device", "rows"), [("cuda", 35), ("cpu", 35)])
def test_the_state_of_all_rows_takes_a_quarter_of_the_memory_at_most(
    device: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 27B's 151 MB a row, of 20 GiB that the weights leave."""
    hybrid, states = outline(device=device), (RowSpec("states", (151_000_000,), torch.int8),)
    monkeypatch.setattr(hybrid.model, "state", lambda max_window: (states,))
    assert max_running(hybrid, 3, 20 << 30) == rows


@pytest.mark.parametrize(
    ("changes", "fast_math", "is_deterministic"),
    [
        ({}, False, True),
        ({"dtype": torch.float32}, False, True),
        ({"dtype": torch.float64}, False, False),
        ({}, True, False),
        ({"device": "cpu", "dtype": torch.float32}, False, True),
        ({"device": "cpu", "dtype": torch.bfloat16}, False, False),
    ],
    ids=str,
)
def test_on_a_gpu_sums_have_one_order_by_default(
    changes: dict[str, Any], *, fast_math: bool, is_deterministic: bool
) -> None:
    config = EngineConfig(model_path="", fast_math=fast_math)
    assert has_ordered_sums(config, outline(**changes)) is is_deterministic


def test_a_weight_format_whose_kernel_promises_no_order_leaves_the_text_none() -> None:
    """The table of kernels is asked for every layer of the target; one in float8 is enough."""
    shape, config = outline(has_float8=True), EngineConfig(model_path="", deterministic=True)
    reader = shape.model.layers[0].mixer.input
    one, values = torch.ones(1), torch.empty(reader.shape, dtype=torch.float8_e4m3fn, device="meta")
    assert has_ordered_sums(config, shape)
    reader.store(Float8Weight(values, one, one, torch.bfloat16))
    assert not has_ordered_sums(config, shape)
    with pytest.raises(ConfigError, match="--deterministic has no kernels"):
        check_deterministic(config, shape)


def test_the_sums_of_drafts_have_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of a GPU that does not exist."""
    monkeypatch.setattr(assembly, "keep_sums_whole", lambda: None)
    monkeypatch.setattr(linear_module, "library_is_ordered", lambda weight, bias: False)
    models = outline().models
    order_sums(models.target)
    of_drafts = models.draft.linears()
    assert [linear.is_batch_invariant for linear in models.linears()] == [
        linear not in of_drafts for linear in models.linears()
    ]


def test_what_cannot_be_deterministic_is_refused() -> None:
    config = EngineConfig(model_path="", deterministic=True, depth=8)
    check_deterministic(config, outline(sharing=16))
    with pytest.raises(ConfigError, match=r"no kernels for torch\.float64 on cuda; use another --dtype"):
        check_deterministic(config, outline(dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"no kernels for torch\.bfloat16 on cpu; use --dtype float32"):
        check_deterministic(config, outline(dtype=torch.bfloat16, device="cpu"))
    with pytest.raises(ConfigError, match="--deterministic and --fast-math exclude each other"):
        check_deterministic(EngineConfig(model_path="", deterministic=True, fast_math=True), outline())


@pytest.mark.parametrize(("depth", "num_warnings"), [(3, 1), (0, 0)], ids=["wanted", "off"])
def test_drafts_that_no_head_can_make_are_warned_of(
    depth: int, num_warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model_path=str(random_qwen2(tmp_path)), device="cpu", depth=depth)
    assert assemble(config, progress=lambda _: None).info.depth == 0
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [f"up to {depth} drafts" in line and "no MTP head" in line for line in warned] == [
        True
    ] * num_warnings


@pytest.mark.parametrize(
    ("drafter", "depth", "has_head", "expected"),
    [
        ("auto", 3, True, "mtp"),
        ("auto", 3, False, "none"),
        ("auto", 0, True, "none"),
        ("mtp", 3, True, "mtp"),
        ("mtp", 0, True, "none"),
        ("ngram", 3, True, "ngram"),
        ("ngram", 3, False, "ngram"),
        ("ngram", 0, False, "none"),
        ("none", 3, True, "none"),
        ("auto,ngram", 3, True, "mtp,ngram"),
        ("auto,ngram", 3, False, "ngram"),
        ("mtp,ngram", 0, True, "none"),
    ],
)
def test_auto_drafts_with_the_head_where_there_is_one(
    drafter: str, depth: int, has_head: bool, expected: str
) -> None:
    config = EngineConfig(model_path="", drafter=drafter, depth=depth)  # type: ignore[arg-type]
    assert drafter_name(config, has_head=has_head) == expected


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("names_a_head", [True, False])
def test_a_head_that_does_not_exist_cannot_draft(depth: int, names_a_head: bool, tmp_path: Path) -> None:
    """config.json may name a head whose weights the checkpoint lacks: that shows when these are to be
    loaded."""
    path = random_qwen2(tmp_path)
    if names_a_head:
        config = mimo_config()
        write_folder(tmp_path, config, random_tensors(config, with_draft_head=False))
    asked = EngineConfig(model_path=str(path), device="cpu", drafter="mtp", depth=depth)
    if names_a_head and depth == 0:
        assert assemble(asked, progress=lambda _: None).info.drafter == "none"
        return
    with pytest.raises(ConfigError, match=r"--drafter is mtp, but .* has no MTP head; use ngram"):
        assemble(asked, progress=lambda _: None)


@pytest.mark.parametrize(
    ("drafter", "depth", "has_draft_head"),
    [("auto", 2, True), ("mtp", 2, True), ("mtp,ngram", 2, True), ("ngram", 2, False), ("none", 0, False)],
)
def test_what_drafts_is_told(drafter: str, depth: int, has_draft_head: bool, tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(random_mimo(tmp_path)), device="cpu", drafter=drafter, depth=2)  # type: ignore[arg-type]
    info = assemble(config, progress=lambda _: None).info
    assert (info.drafter, info.depth, info.has_draft_head) == (
        "mtp" if drafter == "auto" else drafter,
        depth,
        has_draft_head,
    )


def test_positions_beyond_all_memory_are_served_as_far_as_they_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """2 MiB hold 126 blocks of 16,576 bytes, one of which is spare."""
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path, max_position_embeddings=10**12)), device="cpu", kv_cache_memory_bytes=2 << 20
    )  # fmt: skip
    engine = assemble(config, progress=lambda _: None)
    assert (engine.info.num_blocks, engine.info.max_model_len) == (126, 125 * 16)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert "the context is 2,000 tokens" in warned[0]
    assert "the model's 1,000,000,000,000 would take" in warned[0]
    assert "--max-model-len 2000" in warned[0]


def test_a_context_that_is_cut_is_served_to_its_last_token(tmp_path: Path) -> None:
    """And is what --max-model-len may be at most."""
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path)), device="cpu", kv_cache_memory_bytes=100_000, depth=3
    )
    local = LocalEngine(config)
    length = local.engine.info.max_model_len
    assert 16 <= length < 256
    assert length % 16 == 0
    number = local.submit([1, 2, 3], max_tokens=length - 3)
    local.run()
    assert len(local.outputs[number].token_ids) == length - 3
    assert LocalEngine(msgspec.structs.replace(config, max_model_len=length)).engine.info == local.engine.info
    with pytest.raises(
        ConfigError, match=f"one request of {length + 1} tokens .* lower --max-model-len to {length}"
    ):
        LocalEngine(msgspec.structs.replace(config, max_model_len=length + 1))


def test_a_context_that_is_set_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(random_mimo(tmp_path, max_position_embeddings=10**12))
    config = EngineConfig(model_path=path, device="cpu", max_model_len=64)
    assert assemble(config, progress=lambda _: None).info.max_model_len == 64
    monkeypatch.setattr(assembly, "load_model", None)
    for length, told in (
        (10**12, r"one request of 1000000000000 tokens .* lower --max-model-len to"),
        (10**12 + 1, r"--max-model-len is 1,000,000,000,001, the model was made for"),
    ):
        with pytest.raises(ConfigError, match=told):
            assemble(msgspec.structs.replace(config, max_model_len=length), progress=lambda _: None)


@pytest.mark.parametrize(
    ("num_parameters", "most", "expected"),
    [
        (4_000_000, 2, 1),
        (4_000_000, 64, 1),
        (25_000_000, 64, 2),
        (500_000_000, 2, 2),
        (7_000_000_000, 64, 64),
        (500_000_000, 1, 1),
    ],
)
def test_small_models_take_few_threads(num_parameters: int, most: int, expected: int) -> None:
    assert num_threads(num_parameters, most) == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_running": 4096}, "lower --max-running to"),
        ({"draft_lm_head": "fp8"}, "--draft-lm-head is fp8"),
        ({"draft_layers": "fp8"}, "--draft-layers is fp8"),
        ({"deterministic": True, "dtype": "bfloat16"}, "use --dtype float32"),
        ({"cpu_weights": "int8", "dtype": "float64"}, "for torch.float32, not torch.float64; use full or"),
    ],
    ids=str,
)
def test_options_are_judged_before_the_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str
) -> None:
    random_mimo(tmp_path)
    monkeypatch.setattr(assembly, "available_bytes", lambda _: 1_000_000)
    monkeypatch.setattr(assembly, "load_model", Mock(side_effect=AssertionError("loaded")))
    config = EngineConfig(model_path=str(tmp_path), device="cpu", **changes)
    with pytest.raises(ConfigError, match=told):
        assemble(config, progress=lambda _: None)


@pytest.mark.parametrize("wanted", ["int8", "int4"])
def test_few_bits_are_a_cpus_alone_and_full_weights_where_it_lacks_their_products(
    wanted: CpuWeights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, cpu = EngineConfig(model_path="", cpu_weights=wanted), outline(device="cpu", dtype=torch.float32)
    monkeypatch.setattr(options, "has_integer_products", lambda: True)
    assert with_formats(config, outline(device="cuda")).cpu_weights == "full"
    assert with_formats(config, cpu).cpu_weights == wanted
    assert caplog.text == ""
    monkeypatch.setattr(options, "has_integer_products", lambda: False)
    assert with_formats(config, cpu).cpu_weights == "full"
    assert f"--cpu-weights is {wanted}, but full is used" in caplog.text


def test_short_prefill_chunks_are_refused_where_prompts_are_computed_in_pieces(tmp_path: Path) -> None:
    HybridOracle().save(tmp_path)
    with pytest.raises(
        ConfigError, match="--prefill-chunk is 63, it must be 64 or more for Qwen3_5ForCausalLM"
    ):
        assembly.assemble(EngineConfig(model_path=str(tmp_path), prefill_chunk=63), progress=lambda _: None)


def test_a_small_gpu_is_refused_by_what_was_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An estimate of the steps, of a card that is nearly full, would have ended this start. What is measured
    has tables of the whole context."""
    available, measured = 500 << 20, [1 << 20, 400 << 20]
    tried: list[Resolved] = []

    def measured_steps_bytes(resolved: Resolved, *_: Any) -> int:
        tried.append(resolved)
        return measured[len(tried) - 1]

    facts = DeviceFacts(torch.device("cuda", 0), capability="8.0", num_multiprocessors=132)
    monkeypatch.setattr(assembly, "DeviceFacts", SimpleNamespace(of=lambda _: facts))
    monkeypatch.setattr(assembly, "available_bytes", lambda _: available)
    monkeypatch.setattr(assembly, "prepare_models", lambda *_: None)
    monkeypatch.setattr(assembly, "build_device", lambda *_, **__: None)
    monkeypatch.setattr(assembly, "measured_steps_bytes", measured_steps_bytes)
    models = load_pair(random_mimo(tmp_path), dtype="bfloat16", with_draft_head=True)
    monkeypatch.setattr(assembly, "_load", lambda *_: models)
    monkeypatch.setattr(Outline, "estimated_steps_bytes", lambda *_, **__: available)
    config = EngineConfig(model_path=str(tmp_path), device="cpu", max_running=4)
    info = assemble(config, progress=lambda _: None).info
    assert info.num_blocks > 1
    assert tried[0].max_model_len == info.max_model_len == models.target.spec.max_position_embeddings
    with pytest.raises(ConfigError, match="beside what steps take"):
        assemble(config, progress=lambda _: None)


@pytest.mark.parametrize("is_wanted", [False, True])
def test_expanded_copies_leave_less_for_the_kv_cache(is_wanted: bool) -> None:
    config, whole = EngineConfig(model_path=""), outline(num_layers=36)
    plain = resolve(config, whole, steps_bytes=0)
    found = resolve(
        msgspec.structs.replace(config, expanded_weights=is_wanted),
        replace(whole, expanded_bytes=10 << 30),
        steps_bytes=0,
    )
    assert found.expanded_bytes == (10 << 30) * is_wanted
    lost = (plain.num_blocks - found.num_blocks) * plain.block_bytes
    assert (0.9 * (10 << 30) < lost < 10 << 30) if is_wanted else lost == 0


@pytest.mark.parametrize(("num_layers", "expected"), [(1, 2**31 // (16 * 8 * 128)), (36, 16)])
def test_steps_are_tried_with_a_cache_that_kernels_index_as_the_whole_one(
    num_layers: int, expected: int
) -> None:
    """110 GiB hold 524,289 blocks of one layer and its head, 47,125 of 36; 131,072 blocks of 16 tokens have
    2^31 numbers."""
    resolved = resolve(EngineConfig(model_path=""), outline(num_layers=num_layers), steps_bytes=0)
    assert assembly._tried_blocks(resolved) == expected
    spec = next(spec for spec in resolved.layers[0] if isinstance(spec, PagedSpec))
    is_wide, whole_is_wide = (n * spec.num_elements(16) >= 2**31 for n in (expected, resolved.num_blocks))
    assert is_wide == whole_is_wide == (num_layers == 1)
