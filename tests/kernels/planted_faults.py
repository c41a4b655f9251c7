"""A fault planted in a device function fails the tests of the public kernel and of the fused kernel that
share it.

test_triton.py runs this file in the interpreter, where a device function can be exchanged for another.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headway.kernels.speculation import _device_functions

HERE = Path(__file__).parent
CPU = torch.device("cpu")


def load(operation: str) -> ModuleType:
    path = HERE / f"speculation/test_{operation}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TESTS: dict[str, Callable[[], None]] = {
    "verify": lambda: load("verify").test_every_pattern_of_agreement_at_depth_4(CPU),
    "prepare": lambda: load("prepare").test_random_batches(3, 17, 4, torch.int64, False, CPU),
    "rewind": lambda: load("rewind").test_one_row_in_its_first_block(CPU),
    "verify_and_rewind": lambda: load("verify_and_rewind").test_every_row_keeps_what_the_target_agrees_with(
        40, 3, 4, CPU
    ),
    "prepare_next_tokens": lambda: load("prepare_next_tokens").test_random_batches(20, CPU),
    "relax_acceptance": lambda: load("relax_acceptance").test_random_windows(300, CPU),
    "advance_draft_step": lambda: load("advance_draft_step").test_a_block_boundary_and_the_end_of_the_context(
        CPU
    ),
    "open_drafts": lambda: load("open_drafts").test_pending_tokens_end_at_their_place(40, 4, 16, 0, CPU),
    "prepare_verify_inputs": lambda: load(
        "prepare_verify_inputs"
    ).test_every_row_opens_its_window_and_advances(40, 3, 4, CPU),
}


def forgets_earlier_drafts(_original: Any, _is_accepted: Any, draft: Any, target: Any) -> Any:
    return draft == target


def counts_no_draft(_original: Any, accepted: Any, _is_accepted: Any) -> Any:
    return accepted


def keeps_absent_tokens(_original: Any, _is_present: Any, token: Any) -> Any:
    return token


def takes_the_next_slot(original: Any, is_present: Any, block: Any, position: Any, *rest: Any) -> Any:
    return original(is_present, block, position + 1, *rest)


def rewinds_one_token_less(original: Any, row: Any, length: Any, offset: Any, *rest: Any) -> Any:
    return original(row, length + 1, offset + 1, *rest)


FAULTS = {
    "accepts_draft": (forgets_earlier_drafts, ("verify", "verify_and_rewind", "relax_acceptance")),
    "count_accepted": (counts_no_draft, ("verify", "prepare", "verify_and_rewind", "prepare_next_tokens")),
    "token_or_none": (keeps_absent_tokens, ("prepare", "verify_and_rewind")),
    "slot_or_none": (takes_the_next_slot, ("advance_draft_step", "open_drafts", "prepare_verify_inputs")),
    "rewind_row": (rewinds_one_token_less, ("rewind", "verify_and_rewind")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_shared_device_function_fails_both_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, operations = FAULTS[name]
    shared = getattr(_device_functions, name)
    for operation in operations:
        TESTS[operation]()
    original = shared.rewrite()
    monkeypatch.setattr(shared, "rewrite", lambda: lambda *args: fault(original, *args))
    for operation in operations:
        with pytest.raises(AssertionError):
            TESTS[operation]()


def test_every_device_function_has_a_fault() -> None:
    kind = type(_device_functions.rewind_row)
    names = {name for name, value in vars(_device_functions).items() if isinstance(value, kind)}
    assert names == set(FAULTS)
