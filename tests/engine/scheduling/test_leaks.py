"""What an engine holds once all its requests have ended: no more after many than after few."""

from __future__ import annotations

import gc
import sys
from importlib.resources import files

import pytest
from headway_testing.crowd import run_crowd
from headway_testing.local import LocalEngine

from headway.engine.demo.heldout import heldout_prompts
from headway.engine.protocol.config import EngineConfig

NUM_REQUESTS = 60
# One number kept of each request, in a list that is there anyway, takes 8.
MAX_BYTES_PER_REQUEST = 4


def held_bytes() -> int:
    """Of all objects that may refer to others. Memory of tensors is not among them."""
    gc.collect()
    return sum(map(sys.getsizeof, gc.get_objects()))


@pytest.mark.slow
def test_a_crowd_leaves_no_object_behind() -> None:
    """The first time makes all that is made once, and fills the prefix index: the requests have more than 63
    blocks. What else happens once, such as a table that outgrows its memory, is no more of one of the last
    times than of the other."""
    config = EngineConfig(
        model_path=str(files("headway.engine.demo")), device="cpu", dtype="float32", threads=1,
        max_model_len=256, kv_cache_memory_bytes=8 << 20,
    )  # fmt: skip
    engine, texts = LocalEngine(config), [text[:60] for text in heldout_prompts()]
    held: list[int] = []
    for _ in range(4):
        run_crowd(engine, texts, num_streams=12, num_requests=NUM_REQUESTS, output_lens=(1, 3, 8, 16))
        engine.outputs.clear()
        held.append(held_bytes())
    stats = engine.engine.scheduler.snapshot()
    assert stats.num_kv_blocks_used == 0
    assert stats.num_kv_blocks_cached > 40
    assert min(held[2] - held[1], held[3] - held[2]) < MAX_BYTES_PER_REQUEST * NUM_REQUESTS
