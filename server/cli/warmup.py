"""`headway warmup`: fills the cache of compiled kernels as a start does, and ends."""

from __future__ import annotations

import asyncio
import time

import msgspec

from headway.engine import ConfigError, EngineConfig
from headway.server.base.config import ModelSource
from headway.server.cli.console import wait_with_progress
from headway.server.cli.hub import model_folder, with_folders
from headway.server.engine.client import EngineClient


def warm_up(source: ModelSource, engine_config: EngineConfig) -> int:
    """Returns the exit status. With the options of `headway serve` it compiles the same kernels.

    Raises ConfigError if there is no GPU, before weights are read: the kernels of a model are found by
    launching them on the GPU for which they are compiled.
    """
    if engine_config.device == "cpu":
        raise ConfigError(
            "--device is cpu, it must be auto or cuda for warmup: the CPU needs no compiled kernels"
        )
    folder = model_folder(source)
    engine = EngineClient(msgspec.structs.replace(with_folders(engine_config, folder), device="cuda"))
    try:
        asyncio.run(_start_and_end(engine))
    except ConfigError as error:
        if not str(error).startswith("--device is cuda"):
            raise
        raise ConfigError(
            "warmup needs a GPU of the kind that will serve, and PyTorch sees no CUDA device here; run it on a machine that "
            "has one, with TRITON_CACHE_DIR on what the servers will read"
        ) from error
    return 0


async def _start_and_end(engine: EngineClient) -> None:
    started = time.monotonic()
    engine.start()
    try:
        info = await wait_with_progress(engine)
    finally:
        await engine.close()
    print(
        f"kernels for {info.architecture} on {info.device} are compiled, after {time.monotonic() - started:.1f} s"
    )
