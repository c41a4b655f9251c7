"""Checks that a model that has been loaded gives logits that are numbers: a few tokens through the whole engine."""

from __future__ import annotations

from headway.engine.build import Engine
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ModelError
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler import Scheduler

NUM_PROBES = 4


def check_logits(engine: Engine) -> None:
    """Raises ModelError if the logits of every one of some prompts of one token are NaN or infinite.

    A single token may have a broken embedding that is never used. Before the engine's own scheduler has planned
    anything: afterwards all rows are free again, and the cache's contents are not looked up.
    """
    info = engine.info
    config = EngineConfig(
        model_path="",
        depth=info.depth,
        max_running=info.max_running,
        block_size=info.block_size,
        prefix_caching=False,
    )
    scheduler = Scheduler(
        config,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        has_drafter=info.drafter != "none",
        model_identity="",
        kv_dtype=info.dtype,
    )
    num_probes = min(NUM_PROBES, info.vocab_size)
    for i in range(num_probes):
        token_id = (i * info.vocab_size + info.vocab_size // 2) // num_probes
        scheduler.add(Request(i, [token_id], SamplingParams(temperature=0.0), max_tokens=1))
    while scheduler.has_work and (plan := scheduler.plan()) is not None:
        handle = engine.runner.launch(plan)
        scheduler.update(plan, handle.result())
    faults = scheduler.drain_faults()
    if len(faults) == num_probes:
        hint = (
            "values beyond 65,504 do not exist in float16, use --dtype bfloat16 or float32; otherwise"
            if (info.dtype == "float16")
            else "if the model is sound in another --dtype, values exceed this one;"
        )
        raise ModelError(
            f"the model gives NaN or infinite logits for every prompt that was tried, in {info.dtype}: {hint} a weight "
            "file is broken or not the model's own, check or download it again"
        )
