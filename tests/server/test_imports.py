"""The API process stays small: what it imports, and what that imports in turn."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "numpy", "triton", "transformers", "safetensors"}
COMMANDS = [f"headway.server.cli.{name}" for name in ("serve", "chat", "inspect", "warmup", "complete")]


def packages_after(*modules: str) -> list[set[str]]:
    """Returns which packages a process has loaded after each of these imports."""
    told = "print(*{name.partition('.')[0] for name in sys.modules})"
    code = "\n".join(["import sys", *(f"import {module}; {told}" for module in modules)])
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_the_api_process_loads_no_tensors() -> None:
    modules = [*COMMANDS, "headway.server.app"]
    for module, loaded in zip(modules, packages_after(*modules), strict=True):
        assert "headway" in loaded
        assert not HEAVY & loaded, module


def test_no_command_waits_for_the_libraries_of_another() -> None:
    """`headway inspect` starts a process that takes seconds to import torch: before all that serving needs is
    imported."""
    (loaded,) = packages_after("headway.server.cli")
    assert "headway" in loaded
    assert not {"fastapi", "uvicorn", "httpx", "huggingface_hub", "tokenizers", "rich"} & loaded
