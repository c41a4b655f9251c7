"""The API process stays small: what it imports, and what that imports in turn."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "triton", "transformers", "safetensors"}


COMMANDS = [f"headway.server.cli.{name}" for name in ("serve", "chat", "inspect", "warmup", "complete")]


@pytest.mark.parametrize("module", [*COMMANDS, "headway.server.app"])
def test_the_api_process_loads_no_tensors(module: str) -> None:
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-P", "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "headway" in loaded
    assert not HEAVY & set(loaded)


def test_no_command_waits_for_the_libraries_of_another() -> None:
    """`headway inspect` starts a process that takes seconds to import torch: before all that serving needs is
    imported."""
    code = "import headway.server.cli, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-P", "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "headway" in loaded
    assert not {"fastapi", "uvicorn", "httpx", "huggingface_hub", "tokenizers", "rich"} & set(loaded)
