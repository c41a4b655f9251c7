"""The Triton kernels on a machine without a GPU: run by the interpreter, compiled ahead of time.

Both need processes of their own: whether Triton interprets is settled when it is first imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway.kernels.runtime._triton import takes_triton

HERE = Path(__file__).parent
# Few groups, for each imports PyTorch anew.
GROUPS = {
    "bookkeeping-and-sampling": (
        "rewind",
        "verify",
        "prepare",
        "mamba",
        "prepare_verify_inputs",
        "open_drafts",
        "verify_and_rewind",
        "force_acceptance",
        "store_pending_states",
        "store_tokens",
        "propose_ngram",
        "begin_decode",
        "copy_results_to_host",
        "copy_entries",
        "sample",
        "mask_logits",
        "process_logits",
    ),
    "recurrent": ("causal_convolution", "delta_windows", "delta_chunks"),
    "attention": ("paged_attention_pieces", "prefill_attention", "varlen_attention"),
    "layers": (
        "skinny_linear",
        "add_linear",
        "batch_invariant_linear",
        "quantized_linear",
        "screened_linear",
        "qkv_rope_append",
        "rms_norm",
        "gated_rms_norm",
        "rope_append",
        "gated_mul",
        "sigmoid_mul",
    ),
}


def run(command: list[str], cache: Path, **environment: str) -> None:
    outer = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-P", *command],
        env=outer | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]


def test_the_interpreter_takes_the_tensors_of_the_cpu(is_interpreted: bool) -> None:
    assert takes_triton(torch.zeros(1)) == is_interpreted


# The recurrent kernels take a minute: the engine's tests run their twins.
@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=pytest.mark.long if name == "recurrent" else ()) for name in GROUPS]
)
@pytest.mark.parametrize(
    "cases",
    ["not gpu and not long", pytest.param("not gpu", marks=pytest.mark.long)],
    ids=["plain", "all"],
)
def test_the_same_tests_pass_in_the_interpreter(cases: str, group: str, tmp_path: Path) -> None:
    files = [str(next(HERE.rglob(f"test_{op}.py"))) for op in GROUPS[group]]
    choice = f"{__file__}::test_the_interpreter_takes_the_tensors_of_the_cpu"
    options = ["-q", "-m", cases, "-p", "no:cacheprovider"]
    run(["-m", "pytest", *options, choice, *files], tmp_path, TRITON_INTERPRET="1")


def test_a_fault_in_a_device_function_fails_each_kernel_that_shares_it(tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider"]
    run(["-m", "pytest", *options, str(HERE / "planted_faults.py")], tmp_path, TRITON_INTERPRET="1")


# Attention, a product, a norm and bookkeeping.
SEVERAL = ["_split_kv_partial", "skinny_linear", "rms_norm", "rewind"]


@pytest.mark.parametrize(
    "choice",
    [
        ["80", "--each-once", *SEVERAL],
        ["89", "--each-once", "quantized_linear", "rms_norm"],
        ["90", "--each-once"],
        ["100", "--each-once", *SEVERAL],
        pytest.param(["89", "quantized_linear", "rms_norm"], marks=pytest.mark.long),
        pytest.param(["80"], marks=pytest.mark.long),
        pytest.param(["90"], marks=pytest.mark.long),
        pytest.param(["100"], marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_every_kernel_compiles_ahead_as_it_must(choice: list[str], tmp_path: Path) -> None:
    run([str(HERE / "compile_ahead.py"), *choice], tmp_path)


def test_without_triton_the_twins_do_the_work(tmp_path: Path) -> None:
    lines = (
        "import sys; sys.modules['triton'] = None",
        "import torch; from headway.kernels import gated_mul",
        "assert gated_mul(torch.ones(1, 2)).shape == (1, 1)",
    )
    run(["-c", "\n".join(lines)], tmp_path)
