"""An inspection tells what a start would find, from headers alone, and goes on where a start would end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from headway_testing.checkpoints import (
    mimo_config,
    qwen2_config,
    random_mimo,
    random_tensors,
    tensor_shapes,
    write_folder,
)
from headway_testing.families import CLASSES, save, tiny_model
from headway_testing.hybrid import HybridOracle
from headway_testing.inspection import edit, inspect, unknown, without_head

from headway.engine.bench.shape import SHAPES
from headway.engine.build import assemble
from headway.engine.inspection.device import CUDA_CONTEXT_BYTES, Device
from headway.engine.outline import DeviceFacts
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import HeadwayError
from headway.engine.protocol.inspection import DeviceReport, Inspection, InspectionRequest, LayerGroup
from headway.engine.state.memory import num_kv_blocks
from headway.engine.state.specs import RowSpec

GIB = 1 << 30
NORM, HEAD_INPUT = "model.norm.weight", "model.mtp_layers.0.input_proj.weight"


OPTIONS: dict[str, dict[str, object]] = {
    "defaults": {},
    "no drafts": {"depth": 0},
    "ngram": {"drafter": "ngram", "depth": 5},
    "no drafter": {"drafter": "none"},
    "bfloat16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64", "deterministic": True},
    "sizes": {"block_size": 64, "max_model_len": 100, "max_running": 3},
    "little memory": {"kv_cache_memory_bytes": 1 << 19},
    "a context that is cut": {"kv_cache_memory_bytes": 100_000},
    "dummy": {"load_format": "dummy"},
}


def assert_agreement(folder: Path, **changes: object) -> None:
    """With an engine that is really put together from the same configuration."""
    config = EngineConfig(model_path=str(folder), device="cpu", **changes)  # type: ignore[arg-type]
    found, engine = inspect(folder, **changes), assemble(config, progress=lambda _: None)
    assert found.problem is None
    assert found.engine == engine.info
    assert found.num_parameters == engine.info.num_parameters
    assert found.draft_head.is_loaded == engine.info.has_draft_head
    assert found.memory is not None
    pool, masks = engine.runner.pool, engine.runner.masks.all
    of_rows = {spec: memory for spec, memory in pool._memory.items() if isinstance(spec, RowSpec)}
    scratch = [memory for spec, memory in of_rows.items() if spec.is_scratch]
    tables = [*engine.runner.rows.tensors().values(), *scratch, masks.entries, masks.allowed]
    assert found.memory.block_bytes == pool.block_bytes() == found.memory.token_bytes * pool.block_size
    assert found.memory.rows_bytes == sum(table.nbytes for table in tables)
    assert found.memory.weights_bytes == engine.info.weights_bytes


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_an_engine_reports_what_the_inspection_said(changes: dict[str, object], tmp_path: Path) -> None:
    assert_agreement(random_mimo(tmp_path, num_nextn_predict_layers=2), **changes)


@pytest.mark.parametrize("architecture", CLASSES)
def test_an_engine_of_every_family_reports_what_the_inspection_said(
    architecture: str, tmp_path: Path
) -> None:
    folder = save(tiny_model(architecture), architecture, tmp_path)
    assert_agreement(folder)
    found = inspect(folder)
    assert found.architecture == architecture
    config = json.loads((folder / "config.json").read_text())
    assert found.family == config["model_type"]
    assert found.shape is not None
    assert sum(group.num_layers for group in found.shape.layers) == config["num_hidden_layers"]


@pytest.mark.slow
def test_an_engine_of_two_ranks_reports_what_the_inspection_said(tmp_path: Path) -> None:
    folder = random_mimo(tmp_path, vocab_size=152)
    changes = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 20}
    found = inspect(folder, **changes)
    config = EngineConfig(model_path=str(folder), device="cpu", **changes)
    engine = assemble(config, progress=lambda _: None)
    assert engine.ranks is not None
    engine.ranks.close()
    assert (found.problem, found.engine) == (None, engine.info)
    assert found.memory is not None
    assert found.memory.block_bytes == engine.runner.pool.block_bytes()


def test_ranks_have_a_gpu_each_and_share_a_cpu() -> None:
    for kind, wanted in (("cuda", 100), ("cpu", 25)):
        device = Device(DeviceFacts(torch.device("cpu")), DeviceReport(kind=kind, available_bytes=100), False)
        assert device.bytes_of_rank(4) == wanted


def test_ranks_that_cannot_share_the_model_are_a_problem(tmp_path: Path) -> None:
    found = inspect(random_mimo(tmp_path, vocab_size=152), tensor_parallel_size=4)
    assert found.problem is not None
    assert "which 4 ranks cannot share alike; sizes that this model is served with: 1, 2" in found.problem


@pytest.mark.parametrize("num_shards", [1, 3], ids=["one-file", "shards"])
def test_stored_tensors_are_counted_by_dtype(num_shards: int, tmp_path: Path) -> None:
    config = mimo_config()
    tensors = {n: t.bfloat16() for n, t in random_tensors(config, with_draft_head=True).items()}
    tensors[NORM] = tensors[NORM].float()
    found = inspect(write_folder(tmp_path, config, tensors, num_shards=num_shards))
    others = sum(t.numel() for t in tensors.values()) - 48
    assert [msgspec.structs.astuple(one) for one in found.stored] == [
        ("BF16", len(tensors) - 1, others, 2 * others),
        ("F32", 1, 48, 4 * 48),
    ]
    assert found.problem is None


def test_layers_are_grouped_by_kind_with_the_sizes_of_config_json(tmp_path: Path) -> None:
    found = inspect(random_mimo(tmp_path))
    assert found.shape is not None
    (group,) = found.shape.layers
    assert isinstance(group, LayerGroup)
    assert group.num_layers == 3
    wanted = {"kind": "attention", "num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
    assert wanted.items() <= group.mixer.items()
    assert {"kind": "dense", "intermediate_size": 72}.items() <= group.feed_forward.items()


def test_recurrent_layers_are_a_group_and_a_request_takes_their_state(tmp_path: Path) -> None:
    """Of each delta net a state [6, 12, 16], the convolution's last 3 inputs of 2 * 2 * 16 + 6 * 12 channels,
    and what a round's window keeps."""
    folder = HybridOracle().save(tmp_path, sees_images=True)
    assert_agreement(folder)
    assert_agreement(folder, kv_cache_memory_bytes=100_000)  # where the context is cut
    found = inspect(folder)
    assert found.shape is not None
    assert found.memory is not None
    assert [(group.num_layers, group.mixer["kind"]) for group in found.shape.layers] == [
        (3, "delta_net"), (1, "attention"),
    ]  # fmt: skip
    assert (found.draft_head.state, found.draft_head.prefixes) == ("found", ["mtp."])
    memory, of_states = found.memory, 3 * 4 * (6 * 12 * 16 + 3 * 136)
    assert of_states < memory.row_state_bytes < 4 * of_states
    assert memory.request_bytes == 256 * memory.token_bytes + memory.row_state_bytes


def test_recurrent_layers_are_served_on_a_gpu(tmp_path: Path) -> None:
    found = inspect(HybridOracle().save(tmp_path), gpu_memory=80 * GIB)
    assert found.problem is None
    assert found.engine is not None
    assert (found.engine.device, found.engine.is_deterministic) == ("cuda", True)


def overwrite(folder: Path, content: bytes) -> Path:
    (folder / "model.safetensors").write_bytes(content)
    return folder


def cut_off(folder: Path) -> Path:
    return overwrite(folder, (folder / "model.safetensors").read_bytes()[:-100])


CORRUPT: dict[str, Callable[[Path], Path]] = {
    "cut off": cut_off,
    "no header": lambda folder: overwrite(folder, b"\x10"),
    "long header": lambda folder: overwrite(folder, (1 << 60).to_bytes(8, "little") + b"{}"),
    "no json": lambda folder: overwrite(folder, (8).to_bytes(8, "little") + b"{oh no!}"),
    "empty": lambda folder: overwrite(folder, b""),
}


@pytest.mark.parametrize("spoil", CORRUPT.values(), ids=CORRUPT)
def test_of_a_corrupt_file_config_json_still_tells_the_rest(
    spoil: Callable[[Path], Path], tmp_path: Path
) -> None:
    whole = inspect(random_mimo(tmp_path))
    found = inspect(spoil(tmp_path))
    assert found.problem is not None
    assert "model.safetensors is not a whole safetensors file" in found.problem
    assert (found.stored, found.engine, found.draft_head.state) == ([], None, "unknown")
    assert (found.shape, found.memory, found.num_parameters) == (
        whole.shape,
        whole.memory,
        whole.num_parameters,
    )


def test_a_folder_of_nothing_has_a_problem_and_no_parts(tmp_path: Path) -> None:
    found = inspect(tmp_path)
    assert found.problem == f"{tmp_path} has no config.json; give a folder in Hugging Face layout"
    assert (found.architecture, found.shape, found.memory, found.floor) == (None, None, None, None)


def no_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


PROBLEMS: dict[str, tuple[Callable[[Path], Path], dict[str, object]]] = {
    "architecture": (lambda f: unknown(f, ["a"]), {}),
    "cut off": (cut_off, {}),
    "no weights": (no_weights, {}),
    "tensor missing": (lambda f: edit(f, lambda t: t.pop(NORM)), {}),
    "tensor of the head missing": (lambda f: edit(f, lambda t: t.pop(HEAD_INPUT)), {}),
    "shape": (lambda f: edit(f, lambda t: t.update({NORM: torch.ones(47)})), {}),
    "dtype": (lambda f: edit(f, lambda t: t.update({NORM: torch.ones(48, dtype=torch.int8)})), {}),
    "no head to draft": (without_head, {"drafter": "mtp"}),
    "positions": (lambda f: f, {"max_model_len": 257}),
    "small cache": (lambda f: f, {"kv_cache_memory_bytes": 1000}),
    "float8": (lambda f: f, {"draft_layers": "fp8"}),
    "deterministic": (lambda f: f, {"deterministic": True, "dtype": "bfloat16"}),
}


@pytest.mark.parametrize(("spoil", "changes"), PROBLEMS.values(), ids=PROBLEMS)
def test_the_problem_is_the_error_of_a_start(
    spoil: Callable[[Path], Path], changes: dict[str, object], tmp_path: Path
) -> None:
    folder = spoil(random_mimo(tmp_path))
    config = EngineConfig(model_path=str(folder), device="cpu", **changes)  # type: ignore[arg-type]
    with pytest.raises(HeadwayError) as error:
        assemble(config, progress=lambda _: None)
    assert inspect(folder, **changes).problem == str(error.value)


def test_a_gpu_that_is_not_here_is_known_by_its_memory() -> None:
    found = inspect(SHAPES / "mimo-7b", gpu_memory=80 * GIB, load_format="dummy")
    engine, memory, device = found.engine, found.memory, found.device
    assert found.problem is None
    assert engine is not None
    assert memory is not None
    assert device is not None
    assert (engine.device, engine.dtype, engine.max_running) == ("cuda", "bfloat16", 256)
    assert (engine.draft_lm_head, engine.draft_layers) == ("int4", "fp8")
    assert engine.is_deterministic
    # 36 layers and the head's, each with keys and values of 8 heads of 128 in 2 bytes; a hidden state for
    # every block.
    assert memory.block_bytes == 16 * 37 * 2 * 8 * 128 * 2 + 4096 * 2
    assert device.available_bytes == 80 * GIB - CUDA_CONTEXT_BYTES
    taken = memory.weights_bytes + memory.draft_weights_bytes + memory.rotary_bytes + memory.rows_bytes
    taken += memory.steps_bytes
    config = EngineConfig(model_path="", device="cuda", max_running=256)
    wanted = num_kv_blocks(
        config,
        max_model_len=32768,
        block_bytes=memory.block_bytes,
        available=device.available_bytes - taken,
    )
    assert engine.num_blocks == wanted
    assert memory.num_full_requests == wanted // 2048


@pytest.mark.parametrize(
    ("gib", "told"),
    [
        (1, "0 bytes are available on cuda beside what steps take; lower --max-running or --prefill-chunk"),
        (4, "one request of 32768 tokens .* lower --max-model-len to"),
        (12, "the weights of .* take 14.6 GiB"),
    ],
)
def test_a_gpu_that_is_too_small_is_told_with_what_would_be_needed(gib: int, told: str) -> None:
    found = inspect(SHAPES / "mimo-7b", gpu_memory=gib * GIB, load_format="dummy", max_model_len=32768)
    assert found.problem is not None
    assert re.search(told, found.problem)
    assert found.engine is None
    assert found.memory is not None
    assert (found.memory.request_bytes, found.memory.num_full_requests) == (2048 * 2433024, None)


def test_the_context_that_fits_on_a_gpu_is_told_with_a_warning() -> None:
    """One request, with one block more, takes all that weights, rows and steps leave."""
    found = inspect(SHAPES / "mimo-7b", gpu_memory=20 * GIB, load_format="dummy")
    assert found.problem is None
    engine, memory, device = found.engine, found.memory, found.device
    assert engine is not None
    assert memory is not None
    assert device is not None
    taken = memory.weights_bytes + memory.draft_weights_bytes + memory.rotary_bytes + memory.rows_bytes
    taken += memory.steps_bytes
    fitting = (device.available_bytes - taken) // memory.block_bytes - 1
    assert engine.max_model_len == memory.max_model_len == 16 * fitting < 32768
    assert (engine.num_blocks, memory.num_full_requests) == (fitting + 1, 1)
    assert [f"the context is {16 * fitting:,} tokens" in line for line in found.warnings] == [True]


def test_the_floor_is_the_weights_that_a_round_reads(tmp_path: Path) -> None:
    """Matrices alone: the embedding is looked up, norms and biases are small. A draft reads its layer and
    lm_head once more."""
    floor = inspect(random_mimo(tmp_path), depth=2).floor
    shapes = tensor_shapes(mimo_config(), with_draft_head=True)
    sizes = {name: 4 * rows[0] * rows[1] for name, rows in shapes.items() if len(rows) == 2}
    embedding, lm_head = sizes.pop("model.embed_tokens.weight"), sizes["lm_head.weight"]
    head = sum(size for name, size in sizes.items() if "mtp" in name)
    assert embedding == lm_head
    assert floor is not None
    assert floor.round_bytes_without_drafts == sum(sizes.values()) - head
    assert floor.round_bytes == sum(sizes.values()) - head + 2 * (head + lm_head)
    assert (floor.depth, floor.round_seconds) == (2, None)


def test_a_stored_lm_head_that_may_be_tied_is_warned_of(tmp_path: Path) -> None:
    config = qwen2_config(tie_word_embeddings=True)
    tensors = random_tensors(config, with_draft_head=False)
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    once = inspect(write_folder(tmp_path / "once", config, tensors), depth=0)
    found = inspect(write_folder(tmp_path / "twice", config, twice), depth=0)
    assert once.warnings == []
    assert ["7,248 parameters more" in line for line in found.warnings] == [True]
    assert found.num_parameters == once.num_parameters


def sparse_folder(folder: Path) -> Path:
    """MiMo-7B's 15.7 GB of weights as a file whose data was never written: the header, and a hole."""
    config = json.loads((SHAPES / "mimo-7b" / "config.json").read_text())
    header, end = {}, 0
    for name, shape in tensor_shapes(config, with_draft_head=True).items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + end)
    return folder


# The greatest memory of a process counts what its parent had when it was started: here that of a small one.
MEASURED = """
import resource, subprocess, sys
status = subprocess.run([sys.executable, "-P", "-m", "headway.engine.inspection"], check=False).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files and ru_maxrss in KiB")
def test_weights_are_not_read(tmp_path: Path) -> None:
    """A file that is mapped and read would show in the memory of the process."""
    folder = sparse_folder(tmp_path)
    request = InspectionRequest(EngineConfig(model_path=str(folder)), 80 * GIB)
    command = [sys.executable, "-P", "-c", MEASURED]
    done = subprocess.run(command, input=msgspec.json.encode(request), capture_output=True, check=False)
    found = msgspec.json.decode(done.stdout, type=Inspection)
    assert (done.returncode, found.problem, found.draft_head.state) == (0, None, "found")
    assert found.stored[0].num_bytes == 15_666_819_072
    assert int(done.stderr.split()[-1]) * 1024 < 1.5 * GIB


def test_without_a_question_there_is_no_answer() -> None:
    command = [sys.executable, "-P", "-m", "headway.engine.inspection"]
    done = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
