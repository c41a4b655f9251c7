"""`headway inspect`: for people, as JSON, and by its exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from headway_testing import inspection, tiny_tokenizers
from headway_testing.chat_templates import QWEN
from headway_testing.checkpoints import mimo_config, random_mimo, random_tensors, write_folder
from headway_testing.daemon import headway_command
from headway_testing.families import save, tiny_model
from huggingface_hub import constants

from headway.engine import EngineConfig, EngineDeadError, Inspection, InspectionRequest
from headway.engine.inspection.inspector import inspect_model
from headway.server import cli
from headway.server.cli.endings import NOT_SERVABLE
from headway.server.cli.inspection import ModelReport
from headway.server.engine import inspector as engine_inspector
from headway.server.engine.inspector import EngineInspector

ROOT = Path(__file__).parents[3]


class InProcess:
    """Answers as the engine's process does."""

    def ask(self, config: EngineConfig, gpu_memory_bytes: int | None) -> Inspection:
        return inspect_model(InspectionRequest(config, gpu_memory_bytes))

    def close(self) -> None:
        """Has nothing to close."""


@pytest.fixture
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "EngineInspector", InProcess)


pytestmark = pytest.mark.usefixtures("_in_process")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a tiny random model that can be served and chats in Hermes form."""
    tiny_tokenizers.save_with_template(tmp_path / "model", QWEN)
    return random_mimo(tmp_path / "model", vocab_size=600)


Told = tuple[int, str, str]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `headway inspect` with these arguments: (exit status, stdout, stderr)."""

    def run(*arguments: object) -> Told:
        status = cli.main(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def lines_of(text: str) -> dict[str, str]:
    """By their first word."""
    return {line.split()[0]: line.split(None, 1)[1] for line in text.splitlines() if line.strip()}


def test_a_model_that_can_be_served_is_told_line_by_line(folder: Path, tell: Any) -> None:
    status, out, err = tell(folder, "--device", "cpu", "--max-running", 4)
    lines = lines_of(out)
    assert (status, err) == (0, "")
    assert lines["model"] == "model (MiMoForCausalLM, family mimo)"
    assert lines["layers"] == (
        "3 attention (num_heads 6, num_kv_heads 2, head_dim 16) with dense (intermediate_size 72)"
    )
    assert re.fullmatch(
        r"154,0\d\d parameters; stored: 154,0\d\d F32 in 55 tensors, 601\.8 KiB; served as float32, 601\.8 KiB",
        lines["weights"],
    )
    assert re.fullmatch(
        r"found: 1 layer, 27,664 parameters, 16 tensors in model\.mtp_layers\.0\.; up to 3 drafts a round",
        lines["mtp"],
    )
    assert lines["chat"] == "a template; tools in the form hermes, reasoning between <think> and </think>"
    assert re.fullmatch(r"cpu, .* GiB available", lines["device"])
    assert lines["memory"] == "1.0 KiB a token, 259.0 KiB a request of 256 tokens"
    assert lines["fits"] == "1,040 tokens in all: 4 requests of 256 tokens, up to 4 shorter ones at once"
    assert lines["floor"] == (
        "1.0 MiB of weights a round with 3 drafts; 378.0 KiB of weights a round without drafts"
    )
    assert lines["can"] == f"be served: headway serve {folder} --device cpu --max-running 4"


def test_of_a_mixture_of_experts_the_parameters_that_a_token_meets_are_told(
    tell: Any, tmp_path: Path
) -> None:
    """Three of seven experts, of 3 x 24 x 48 weights, in each of three layers, and no embedding of 600 x 48;
    norms have 3 x (2 x 48 + 2 x 16) + 48."""
    tiny_tokenizers.save_with_template(tmp_path, QWEN)
    save(tiny_model("Qwen3MoeForCausalLM", vocab_size=600), "Qwen3MoeForCausalLM", tmp_path)
    status, out, _ = tell(tmp_path, "--device", "cpu")
    lines = lines_of(out)
    assert status == 0
    assert lines["layers"].endswith(" with experts (num_experts 7, top_k 3, intermediate_size 24)")
    found = re.match(r"([\d,]+) parameters; ([\d,]+) of them active; stored: ", lines["weights"])
    assert found is not None
    whole, active = (int(number.replace(",", "")) for number in found.groups())
    assert whole - active == 3 * 4 * 3 * 24 * 48 + 600 * 48 + 3 * (2 * 48 + 2 * 16) + 48


def test_the_embedded_model_is_inspected_without_a_name(tell: Any) -> None:
    status, out, _ = tell()
    assert status == 0
    assert "headway-demo (MiMoForCausalLM, family mimo)" in out
    assert "8.1 M parameters" in out


def test_what_cannot_be_served_has_a_status_of_its_own_and_its_reason(tell: Any, folder: Path) -> None:
    inspection.edit(folder, lambda t: t.pop("model.mtp_layers.0.input_proj.weight"))
    status, out, err = tell(folder, "--device", "cpu")
    assert (status, err) == (NOT_SERVABLE, "")
    assert lines_of(out)["mtp"].endswith("1 of its tensors are missing: model.mtp_layers.0.input_proj.weight")
    assert f"problem: {folder} lacks 1 tensors" in out
    assert out.endswith("  cannot be served\n")
    assert tell(folder, "--device", "cpu", "--drafter", "none")[0] == 0


def test_a_lost_head_is_told_and_served_without(tell: Any, folder: Path) -> None:
    status, out, _ = tell(inspection.without_head(folder), "--device", "cpu")
    assert status == 0
    assert lines_of(out)["mtp"].startswith(
        "missing: 1 layer, 27,664 parameters; not loaded: config.json announces"
    )
    assert "warning: up to 3 drafts a round are wanted, but" in out


def test_an_unknown_architecture_is_named_with_what_is_supported(tell: Any, tmp_path: Path) -> None:
    names = ["model.layers.0.a.weight", "mtp.fc.weight"]
    status, out, _ = tell(inspection.unknown(tmp_path, names, quantization_config={"quant_method": "fp8"}))
    assert status == NOT_SERVABLE
    assert lines_of(out)["model"] == f"{tmp_path.name} (BigMoeForCausalLM)"
    assert lines_of(out)["weights"] == "stored: 12 F8_E4M3 in 2 tensors, 12.0 B; quantized (fp8)"
    assert lines_of(out)["mtp"] == "unknown, 1 tensors in mtp.; not loaded: the model cannot be served"
    assert re.search(
        r"problem: .*the architecture is BigMoeForCausalLM; supported are .*Qwen2ForCausalLM", out
    )


def test_a_model_without_a_tokenizer_cannot_be_served_and_all_else_is_told(tell: Any, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    status, out, _ = tell(folder, "--device", "cpu")
    assert status == NOT_SERVABLE
    assert f"problem: {folder} has no tokenizer.json" in out
    assert "3 drafts a round" in out


def test_a_named_gpu_is_told_without_one(tell: Any, folder: Path) -> None:
    status, out, _ = tell(folder, "--gpu-memory", "80GiB")
    assert status == 0
    assert lines_of(out)["device"] == "cuda, 79.5 GiB available"
    assert "served as float32" in lines_of(out)["weights"]


def test_a_misspelt_variable_is_told_beside_the_report(
    tell: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_DEPHT", "1")
    status, out, err = tell(folder, "--device", "cpu", "--json")
    assert (status, json.loads(out)["is_servable"]) == (0, True)
    assert (
        err == "headway: HEADWAY_DEPHT is ignored: there is no such variable; did you mean HEADWAY_DEPTH?\n"
    )


def test_no_memory_at_all_is_not_mended_by_fewer_requests(tell: Any, folder: Path) -> None:
    status, out, _ = tell(folder, "--gpu-memory", "0")
    assert status == NOT_SERVABLE
    assert "(25% of what is available on cuda); use a device with more memory" in out


def test_the_command_that_serves_has_the_flags_that_were_inspected(tell: Any, tmp_path: Path) -> None:
    tiny_tokenizers.save_with_template(tmp_path / "a model", QWEN)
    folder = random_mimo(tmp_path / "a model", vocab_size=600)
    _, out, _ = tell(folder, "--device", "cpu", "--gpus", 2, "--no-prefix-caching", "--max-model-len=64")
    assert out.splitlines()[-1] == (
        f"  can be served: headway serve '{folder}' --device cpu --max-model-len 64 --tensor-parallel-size 2 --no-prefix-caching"
    )
    _, out, _ = tell(folder, "--gpu-memory", "80GiB")
    assert out.splitlines()[-1] == f"  can be served: headway serve '{folder}'"


def test_sizes_are_those_of_each_rank(tell: Any, tmp_path: Path) -> None:
    folder = random_mimo(tmp_path / "model", vocab_size=152)
    found = []
    for arguments in ([], ["--gpus", "2"]):
        _, out, _ = tell(folder, "--device", "cpu", "--json", *arguments)
        found.append(json.loads(out)["model"])
    alone, rank = (model["memory"] for model in found)
    assert (
        alone["block_bytes"] / 2 < rank["block_bytes"] < 0.52 * alone["block_bytes"]
    )  # MTP's states are whole
    assert alone["weights_bytes"] / 2 < rank["weights_bytes"] < 0.7 * alone["weights_bytes"]
    assert found[1]["engine"]["num_ranks"] == 2
    _, out, _ = tell(folder, "--device", "cpu", "--gpus", "2")
    lines = lines_of(out)
    assert all(lines[name].endswith(" on each of 2 ranks") for name in ("weights", "memory", "floor"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpu-memory", "80GiB", "--device", "cpu"], "--gpu-memory names a GPU, but --device is cpu"),
        (["--gpu-memory", "many"], "--gpu-memory is 'many', it must be a size such as"),
        (["--tool-format", "esperanto"], "the tool format 'esperanto' is not known"),
        (["--chat-template", "/nowhere"], "--chat-template is '/nowhere', it must be a file"),
        (["--depth", "9"], "--depth is 9, it must be 0 to 8"),
    ],
)
def test_options_that_do_not_exist_are_errors(
    arguments: list[str], told: str, folder: Path, tell: Any
) -> None:
    status, out, err = tell(folder, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"headway: {told}")


def test_nothing_is_downloaded(tell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    status, out, err = tell("ORG/NAME")
    assert (status, out) == (1, "")
    assert err.startswith("headway: ORG/NAME is not on this machine")
    status, _, err = tell(tmp_path / "nowhere")
    assert (status, "is neither a folder nor" in err) == (1, True)


def test_a_downloaded_model_is_found_by_its_name(
    tell: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--ORG--NAME"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    status, out, _ = tell("ORG/NAME", "--device", "cpu")
    assert status == 0
    assert lines_of(out)["model"] == "ORG/NAME (MiMoForCausalLM, family mimo)"


def test_json_is_one_object_of_the_documented_fields(tell: Any, folder: Path) -> None:
    status, out, _ = tell(folder, "--json", "--device", "cpu")
    assert status == 0
    report = msgspec.json.decode(out, type=ModelReport, strict=True)
    assert (report.name, report.folder, report.is_servable, report.problems) == (
        "model",
        str(folder),
        True,
        [],
    )
    alone = inspection.inspect(folder, chooses_depth=True)
    assert msgspec.structs.replace(report.model, device=None) == msgspec.structs.replace(alone, device=None)
    assert report.chat is not None
    assert (report.chat.tool_format, report.chat.has_calls, report.chat.thinking) == (
        "hermes",
        True,
        ("<think>", "</think>"),
    )


def names_in(value: object) -> set[str]:
    """The names of all fields but those of specs, which are the model's."""
    if isinstance(value, list):
        return set().union(*map(names_in, value))
    if not isinstance(value, dict):
        return set()
    inner = (names_in(v) for k, v in value.items() if k not in ("mixer", "feed_forward", "engine"))
    return set(value).union(*inner)


def test_the_page_explains_every_field_of_the_json(tell: Any, folder: Path) -> None:
    _, out, _ = tell(folder, "--json", "--device", "cpu")
    page = (ROOT / "docs/inspect.md").read_text()
    assert {name for name in names_in(json.loads(out)) if f"`{name}`" not in page} == set()


def test_what_the_files_of_the_tokenizer_are_warned_of_is_told(tell: Any, folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 9}')
    status, out, err = tell(folder, "--device", "cpu")
    assert (status, err) == (0, "")
    assert "  warning: " in out
    assert "temperature is 9" in out


@pytest.mark.slow
def test_the_command_runs_as_a_process(folder: Path) -> None:
    done = subprocess.run(
        headway_command("inspect", str(folder), "--json", "--device", "cpu"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert msgspec.json.decode(done.stdout, type=ModelReport).is_servable


@pytest.mark.parametrize("ending", ["import sys; sys.exit(5)", "import os; os.kill(os.getpid(), 9)"])
def test_an_engine_process_that_ends_without_an_answer_is_an_error(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_inspector, "ENGINE_COMMAND", (sys.executable, "-c", ending))
    engine = EngineInspector()
    with pytest.raises(EngineDeadError, match="left with status"):
        engine.ask(EngineConfig(model_path=""), None)
    engine.close()


def test_an_engine_process_that_is_not_asked_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = "import sys; sys.stdin.buffer.read(); import time; time.sleep(600)"
    monkeypatch.setattr(engine_inspector, "ENGINE_COMMAND", (sys.executable, "-c", waiting))
    engine = EngineInspector()
    engine.close()
    assert engine._process.returncode == -9


def test_on_a_gpu_weights_are_served_as_they_are_stored(tell: Any, tmp_path: Path) -> None:
    config = mimo_config(vocab_size=600)
    tiny_tokenizers.save_with_template(tmp_path, QWEN)
    tensors = {n: t.to(torch.bfloat16) for n, t in random_tensors(config, with_draft_head=True).items()}
    _, out, _ = tell(write_folder(tmp_path, config, tensors), "--gpu-memory", "1GiB")
    assert "served as bfloat16" in out
