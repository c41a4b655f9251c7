"""The API process stays small: what it imports, and what that imports in turn."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "triton", "transformers", "safetensors"}


@pytest.mark.parametrize("module", ["headway.server.cli", "headway.server.app"])
def test_the_api_process_loads_no_tensors(module: str) -> None:
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-P", "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "headway" in loaded
    assert not HEAVY & set(loaded)
