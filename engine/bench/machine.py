"""Describes the machine of a benchmark: versions and device."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from headway import __version__
from headway.engine.build import Engine


def versions() -> dict[str, str]:
    found = {"headway": __version__, "torch": str(torch.__version__), "Python": platform.python_version()}
    with suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    return found


def device_name(engine: Engine) -> str:
    if engine.runner.device.type == "cuda":
        return torch.cuda.get_device_name(engine.runner.device)
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
