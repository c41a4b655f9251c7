"""The Triton kernels on a machine without a GPU: run by the interpreter, compiled ahead of time.

Both need processes of their own: whether Triton interprets is settled when it is first imported.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from headway.kernels.runtime._triton import takes_triton

HERE = Path(__file__).parent
# Each takes the interpreter a second or two.
CHEAP = (
    "rewind",
    "verify",
    "prepare",
    "prepare_drafter_inputs",
    "prepare_next_tokens",
    "advance_draft_step",
    "expand_drafter_inputs",
    "extend_queries",
    "mamba",
    "prepare_verify_inputs",
    "open_drafts",
    "verify_and_rewind",
    "force_acceptance",
    "relax_acceptance",
    "store_pending_states",
    "store_tokens",
    "begin_decode",
    "copy_results_to_host",
    "copy_entries",
    "mask_logits",
    "causal_convolution",
    "prefill_attention",
    "skinny_linear",
    "add_linear",
    "quantized_linear",
    "rms_norm",
    "gated_rms_norm",
    "rope_append",
    "gated_mul",
    "sigmoid_mul",
    "choose_experts",
    "sum_experts",
)
# The others, in few groups, for each imports PyTorch anew, and the tests of them that the plain suite runs.
DEAR = {
    "sampling-and-transfer": {
        "sample": (
            "test_noise_depends_on_nothing_else",
            "test_greedy_is_argmax_with_ties_to_the_lowest_id",
        ),
        "process_logits": ("test_a_vocabulary_of_several_programs_is_adjusted_as_by_the_twin",),
        "propose_ngram": ("test_random_rows",),
        "gather_ranks": ("test_every_rank_gets_all_parts_in_their_order[2]",),
    },
    "attention": {
        "score_rule": ("test_tiles_before_the_windows_are_not_read",),
        "paged_attention_pieces": ("test_what_stands_behind_the_end_does_not_matter",),
        "varlen_attention": ("test_keys_before_the_first_position_are_not_seen",),
    },
    "recurrent-and-products": {
        "delta_windows": ("test_only_named_rows_change_and_states_only_by_what_has_stayed",),
        "delta_chunks": ("test_generated_tokens_have_the_bits_of_rounds",),
        "batch_invariant_linear": ("test_rows_of_a_wider_tensor",),
        "expert_linear": (
            "test_blocks_have_every_pair_once_and_one_expert_each",
            "test_every_number_of_tokens_has_its_kernel_compiled",
        ),
        "screened_linear": ("test_where_nothing_is_sure_the_greatest_few_are_exact",),
        "qkv_rope_append": ("test_queries_turn_and_the_named_slots_change",),
    },
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


def file_of(operation: str) -> str:
    return str(next(HERE.rglob(f"test_{operation}.py")))


def interpret(cases: str, tests: Iterable[str], cache: Path) -> None:
    choice = f"{__file__}::test_the_interpreter_takes_the_tensors_of_the_cpu"
    options = ["-q", "-m", cases, "-p", "no:cacheprovider"]
    run(["-m", "pytest", *options, choice, *tests], cache, TRITON_INTERPRET="1")


def test_some_tests_of_every_kernel_pass_in_the_interpreter(tmp_path: Path) -> None:
    dear = {operation: names for group in DEAR.values() for operation, names in group.items()}
    some = [f"{file_of(operation)}::{name}" for operation, names in dear.items() for name in names]
    interpret("not gpu and not long", [*map(file_of, CHEAP), *some], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("group", DEAR)
def test_the_same_tests_pass_in_the_interpreter(group: str, tmp_path: Path) -> None:
    interpret("not gpu and not long", map(file_of, DEAR[group]), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("operations", [CHEAP, *DEAR.values()], ids=["cheap", *DEAR])
def test_every_case_passes_in_the_interpreter(operations: Iterable[str], tmp_path: Path) -> None:
    interpret("not gpu", map(file_of, operations), tmp_path)


@pytest.mark.slow
def test_a_fault_in_a_device_function_fails_each_kernel_that_shares_it(tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider"]
    run(["-m", "pytest", *options, str(HERE / "planted_faults.py")], tmp_path, TRITON_INTERPRET="1")


# Attention, a product, a norm and bookkeeping.
SEVERAL = ["_split_kv_partial", "skinny_linear", "rms_norm", "rewind"]


@pytest.mark.parametrize(
    "choice",
    [
        ["90", "--each-once", *SEVERAL],
        pytest.param(["80", "--each-once", *SEVERAL], marks=pytest.mark.slow),
        pytest.param(["89", "--each-once", "quantized_linear", "rms_norm"], marks=pytest.mark.slow),
        pytest.param(["90", "--each-once"], marks=pytest.mark.slow),
        pytest.param(["100", "--each-once", *SEVERAL], marks=pytest.mark.slow),
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
