"""Checks an engine before its first request: whether its logits are numbers, and whether its drafts agree
with the model."""

from __future__ import annotations

import logging
import math
import random
import time

import msgspec

from headway.engine.build import Engine
from headway.engine.layers.eagle3_head import Eagle3Head
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.draft_check import DraftCheck
from headway.engine.protocol.drafters import DRAFTER_TRAITS
from headway.engine.protocol.errors import ConfigError, ModelError
from headway.engine.protocol.messages import EngineInfo, TokenEvent
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.scheduling.plan import Plan
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler import Scheduler
from headway.engine.speculation.self_check import LEAST_GREEDY, Evidence

NUM_PROBES = 4
# The number of texts by which drafts are checked, half of them greedy and half sampled, the greatest length
# of each in tokens, and the longest time of the check.
NUM_TEXTS, TEXT_TOKENS, CHECK_SECONDS = 16, 256, 1.5

logger = logging.getLogger(__name__)


def check_logits(engine: Engine) -> None:
    """Runs a few prompts of one token. Raises ModelError if the logits of all of them are NaN or infinite.

    One broken prompt is no fault, since its token may have a broken embedding that is never used. The check
    runs before the engine's own scheduler has planned anything; afterwards all rows are free, and no prefix
    is found in the cache.
    """
    info, scheduler = engine.info, _own_scheduler(engine.info)
    num_probes = min(NUM_PROBES, info.vocab_size)
    for i in range(num_probes):
        token_id = (i * info.vocab_size + info.vocab_size // 2) // num_probes
        scheduler.add(Request(i, [token_id], SamplingParams(temperature=0.0), max_tokens=1))
    while scheduler.has_work and (plan := scheduler.plan()) is not None:
        handle = engine.runner.launch(plan)
        scheduler.update(plan, handle.result())
    _clear(engine, scheduler)
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


def wants_check(info: EngineInfo) -> bool:
    """Returns whether the drafter has weights and its drafts are meaningful."""
    return (
        DRAFTER_TRAITS[info.drafter].has_weights
        and not info.has_dummy_weights
        and info.synthetic_acceptance is None
    )


def settle_taps(engine: Engine, *, limit_seconds: float = CHECK_SECONDS, seed: int = 0) -> None:
    """Chooses between the two conventions for the layer ids of an EAGLE-3 head. It runs the same texts with
    each, for up to limit_seconds, and keeps the one whose drafts are right more often; the first if they are
    equal or one was hardly tried. It must run before steps are captured, see `check_drafts`. Raises
    ConfigError where other ranks would have to change theirs, too."""
    head, info = engine.runner.launcher.context.drafter.model, engine.info
    if not isinstance(head, Eagle3Head) or head.other_taps is None or not wants_check(info):
        return
    if info.num_ranks > 1:
        first, second = (",".join(map(str, taps)) for taps in (head.taps, head.other_taps))
        raise ConfigError(
            f"--tensor-parallel-size is {info.num_ranks}, and the ids of the layers that the drafter reads have two meanings, "
            f"which one rank alone can try; set --drafter-taps to {first} or to {second}"
        )
    shares: dict[tuple[int, ...], float] = {}
    is_tried = True
    for taps in (head.taps, head.other_taps):
        head.taps = taps
        evidence = Evidence(info.depth, knows_sure=False)
        _write_texts(engine, evidence, limit_seconds=limit_seconds, seed=seed)
        shares[taps] = evidence.share_right
        is_tried = is_tried and evidence.num_first_drafts >= LEAST_GREEDY
    head.taps, other = sorted(shares, key=lambda taps: -shares[taps] if is_tried else 0)
    logger.info(
        "the drafter reads the stream as it enters layers %s: %.0f %% of its first drafts are right, %.0f %% by layers %s "
        "(--drafter-taps sets them)",
        ",".join(map(str, head.taps)), 100 * shares[head.taps], 100 * shares[other], ",".join(map(str, other)),
    )  # fmt: skip


def check_drafts(engine: Engine, *, limit_seconds: float = CHECK_SECONDS, seed: int = 0) -> DraftCheck:
    """Checks whether the drafter drafts what the model says, in texts that the model writes after one random
    token. N-grams that join the drafter are left out.

    It takes at most limit_seconds and the step that begins last. It leaves no state, and captures no graph.
    """
    began = time.monotonic()
    knows_sure = DRAFTER_TRAITS[engine.info.drafter].reads_head
    evidence = Evidence(engine.info.depth, knows_sure=knows_sure)
    _write_texts(engine, evidence, limit_seconds=limit_seconds, seed=seed)
    return evidence.verdict(time.monotonic() - began)


def _write_texts(engine: Engine, evidence: Evidence, *, limit_seconds: float, seed: int) -> None:
    """Collects the rounds of texts, which the seed determines, until the evidence suffices."""
    began = time.monotonic()
    info, scheduler, draw = engine.info, _own_scheduler(engine.info), random.Random(seed)
    last: dict[int, int] = {}
    for i in range(NUM_TEXTS):
        sampling = SamplingParams(temperature=float(i % 2), seed=seed * NUM_TEXTS + i, num_logprobs=0)
        last[i] = draw.randrange(info.vocab_size)
        max_tokens = min(TEXT_TOKENS, info.max_model_len - 1)
        scheduler.add(Request(i, [last[i]], sampling, max_tokens=max_tokens, joins_ngrams=False))
    step_seconds = 0.0
    # The last texts stay unfinished, so that rounds keep about the same number of rows.
    num_left = min(NUM_TEXTS, info.max_running) // 2
    with engine.runner.without_captures():
        while scheduler.num_requests > num_left and evidence.wants_more:
            since = time.monotonic()
            if since - began + step_seconds > limit_seconds or (plan := scheduler.plan()) is None:
                break
            for event in scheduler.update(plan, engine.runner.launch(plan).result()):
                _observe(evidence, event, last)
            step_seconds = time.monotonic() - since
    _clear(engine, scheduler)


def act_on_check(engine: Engine, check: DraftCheck, *, is_required: bool) -> EngineInfo:
    """Turns speculation off where the drafter has failed. Returns the facts with the check. Raises
    ConfigError where speculation is required."""
    if check.state == "failed" and is_required:
        raise ConfigError(
            f"the drafter failed its check, and --require-speculation is set: {check.reason}; mend the checkpoint, "
            "use --drafter ngram, or leave out --require-speculation"
        )
    if check.state == "failed":
        logger.warning("the drafter failed its check, speculation is off: %s", check.reason)
        engine.scheduler.set_depth(0)
    elif check.state == "not_checked":
        logger.debug("the drafter was not checked: %s", check.reason)  # nothing to mend
    elif check.state == "passed":
        logger.info(
            "the drafter passed its check in %.2f s: %.0f %% of the first drafts of greedy texts were accepted",
            check.seconds,
            100 * (check.acceptance[0] or 0.0),
        )
    return msgspec.structs.replace(engine.info, draft_check=check)


def _observe(evidence: Evidence, event: TokenEvent, last: dict[int, int]) -> None:
    """Adds a round of a text to the evidence. last: the last token of each text, which is updated."""
    if event.token_ids and event.num_drafted and event.logprobs is not None:
        place = event.draft_start
        evidence.observe(
            event.token_ids[place - 1] if place else last[event.request_id],
            event.token_ids[place],
            probability=math.exp(event.logprobs.logprobs[place]),
            num_drafted=event.num_drafted,
            num_accepted=event.num_accepted,
            is_greedy=event.request_id % 2 == 0,
        )
    if event.token_ids:
        last[event.request_id] = event.token_ids[-1]


def _clear(engine: Engine, scheduler: Scheduler) -> None:
    """Frees the rows, and wipes blocks that may hold NaN: those of texts whose logits had some, and those of
    unfinished texts, since their drafts may have written some."""
    state = scheduler.state
    held = [block_id for request in state.running for block_id in request.block_ids]
    wiped = tuple({*state.broken_block_ids, *held})
    rows = tuple(range(engine.info.max_running))
    engine.runner.launch(Plan(0, 0, released_rows=rows, wiped_block_ids=wiped)).wait()


def _own_scheduler(info: EngineInfo) -> Scheduler:
    """Returns a scheduler besides the engine's own, whose requests leave neither cached prefixes nor
    counts."""
    config = EngineConfig(
        model_path="",
        depth=info.depth,
        max_running=info.max_running,
        block_size=info.block_size,
        prefix_caching=False,
    )
    return Scheduler(
        config,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        drafter=DRAFTER_TRAITS[info.drafter],
    )
