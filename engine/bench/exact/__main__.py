"""`headway bench exact`: one engine in this process, then another; every request is compared with its run at
depth 0, alone and cold."""

from __future__ import annotations

import logging
import platform
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise

import torch

from headway.engine.bench.exact.check import Check
from headway.engine.bench.exact.combinations import Trial, all_combinations, draw, make_groups, make_trials
from headway.engine.bench.exact.report import MAX_KEPT_DIFFERENCES, Report, levels_of, show
from headway.engine.bench.exact.session import Session
from headway.engine.bench.exact.settings import Settings, read_settings
from headway.engine.bench.exact.soak import Soak, SoakOutcome
from headway.engine.bench.exact.texts import (
    Companions,
    Prompts,
    Text,
    joined_prompts,
    make_texts,
    random_prompts,
)
from headway.engine.bench.report import keep_json
from headway.engine.bench.settings import EMBEDDED
from headway.engine.build import Engine, assemble
from headway.engine.demo.heldout import heldout_prompts
from headway.engine.protocol.errors import HeadwayError
from headway.engine.protocol.exit_status import reports


@reports(HeadwayError)
def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 where nothing differs."""
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    # Steps of many kinds run here for the first time, so that slow steps are no fault.
    timer = logging.getLogger("headway.engine.scheduling.launch_timer")
    level_before = timer.level
    timer.setLevel("ERROR")
    try:
        settings = read_settings(argv, has_gpu=torch.cuda.is_available())
        report = run(settings, shlex.join(["headway", "bench", "exact", *argv]))
        show(report)
        keep_json(report, settings.json)
    finally:
        timer.setLevel(level_before)
    return 0 if report.is_exact else 1


def run(settings: Settings, command: str) -> Report:
    """Raises HeadwayError."""
    marks = [("start", time.monotonic())]
    session = Session(partial(_start, settings, settings.tensor_parallel_size), partial(_start, settings, 1))
    with closing(session):
        return _run(settings, command, session, marks)


def _run(settings: Settings, command: str, session: Session, marks: list[tuple[str, float]]) -> Report:
    prompts = _prompts(settings, session.engine)
    marks.append(("start-up", time.monotonic()))
    texts, trials, check = _plan(settings, session, prompts)
    used = sorted({trial.text for trial in trials})
    check.run_references(used)
    if settings.has_recorded_drafts:
        check.predict(session.engine.info.vocab_size)
    marks.append(("references", time.monotonic()))
    groups = make_groups(trials, random.Random(f"{settings.seed}-groups"))
    middle = -(-len(groups) // 2)
    check.run_groups(groups[:middle])
    marks.append(("combinations", time.monotonic()))
    if groups:
        session.restart()
        marks.append(("restart", time.monotonic()))
        check.run_groups(groups[middle:], is_restarted=True)
        marks.append(("combinations after it", time.monotonic()))
    soak = _soak(settings, session, prompts, texts, check)
    marks.append(("soak", time.monotonic()))
    return _report(settings, command, session.engine, trials, check, soak, marks)


def _start(settings: Settings, num_ranks: int) -> Engine:
    engine = assemble(settings.engine_config(num_ranks), progress=lambda _: None)
    engine.runner.capture(range(engine.info.depth + 1), progress=lambda _: None)
    return engine


def _prompts(settings: Settings, engine: Engine) -> Prompts:
    config = settings.engine
    if config.model_path == str(EMBEDDED) and config.load_format != "dummy":
        return joined_prompts(heldout_prompts())
    return random_prompts(engine.info.vocab_size)


def _plan(settings: Settings, session: Session, prompts: Prompts) -> tuple[list[Text], list[Trial], Check]:
    info = session.engine.info
    sizes = {"most": settings.input_len, "border": session.border}
    texts = make_texts(settings.num_texts, prompts, random.Random(f"{settings.seed}-texts"), **sizes)
    combinations = all_combinations(
        range(info.depth + 1), settings.companies, dict.fromkeys((None, *settings.chunks))
    )
    drawn = draw(settings.num_requests, combinations, random.Random(f"{settings.seed}-combinations"))
    greedy, sampled = ([t.index for t in texts if t.is_greedy == is_greedy] for is_greedy in (True, False))
    companions = Companions(
        prompts,
        random.Random(f"{settings.seed}-companions"),
        **sizes,
        num_tokens=settings.num_tokens,
        vocab_size=info.vocab_size,
        first_seed=settings.num_texts,
    )
    check = Check(
        session,
        texts,
        companions,
        random.Random(f"{settings.seed}-runs"),
        num_tokens=settings.num_tokens,
        second_engine=settings.second_engine,
        tell=_tell,
    )
    return texts, make_trials(drawn, greedy, sampled), check


def _soak(
    settings: Settings, session: Session, prompts: Prompts, texts: Sequence[Text], check: Check
) -> SoakOutcome | None:
    if settings.num_soaked == 0:
        return None
    return Soak(
        session,
        prompts,
        texts=[text for text in texts if text.index in check.predictions],
        predictions=check.predictions,
        num_requests=settings.num_soaked,
        num_tokens=settings.num_tokens,
        input_len=settings.input_len,
        seed=settings.seed,
        tell=_tell,
    ).run()


def _report(
    settings: Settings,
    command: str,
    engine: Engine,
    trials: Sequence[Trial],
    check: Check,
    soak: SoakOutcome | None,
    marks: Sequence[tuple[str, float]],
) -> Report:
    outcome = check.outcome
    draws = Counter(trial.combination for trial in trials)
    is_cuda = engine.runner.device.type == "cuda"
    name = torch.cuda.get_device_name(engine.runner.device) if is_cuda else f"CPU ({platform.machine()})"
    differing = {one.trial for one in outcome.differences}
    return Report(
        command=command,
        device_name=name,
        engine=engine.info,
        drafter="recorded" if settings.has_recorded_drafts else engine.info.drafter,
        num_requests=len(trials),
        num_texts=len(check.references),
        num_combinations=len(draws),
        least_draws=min(draws.values(), default=0),
        num_differing=len(differing),
        levels=levels_of(trials, differing, outcome.scored, outcome.restarted, settings.second_engine),
        coverage=outcome.coverage,
        differences=outcome.differences[:MAX_KEPT_DIFFERENCES],
        soak=soak,
        seconds={name: end - start for (_, start), (name, end) in pairwise(marks)},
    )


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
