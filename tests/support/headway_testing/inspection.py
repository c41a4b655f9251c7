"""Inspections inside the test's own process, and folders to inspect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headway.engine.inspection.inspector import inspect_model
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.inspection import Inspection, InspectionRequest
from headway_testing.checkpoints import write_folder


def inspect(folder: Path, *, gpu_memory: int | None = None, **changes: object) -> Inspection:
    """Inspects for the CPU, or for a GPU of that memory."""
    device = "cpu" if gpu_memory is None else "auto"
    config = EngineConfig(**{"model_path": str(folder), "device": device, **changes})  # type: ignore[arg-type]
    return inspect_model(InspectionRequest(config, gpu_memory))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Changes the tensors of a folder of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def without_head(folder: Path) -> Path:
    """Removes the tensors of the MTP head from a MiMo folder."""
    return edit(folder, lambda t: [t.pop(name) for name in list(t) if "mtp" in name])


def unknown(folder: Path, names: list[str], **config: object) -> Path:
    """Writes a folder of an unsupported architecture, with tensors of 6 elements of 8 bits."""
    content = {"architectures": ["BigMoeForCausalLM"], "num_hidden_layers": 2, **config}
    return write_folder(folder, content, {name: torch.zeros(2, 3).to(torch.float8_e4m3fn) for name in names})
