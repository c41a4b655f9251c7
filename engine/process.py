"""The engine process: `python -P -m headway.engine.process ADDRESS`.

Its configuration is the first frame. It ends on Shutdown, on a failure that it reports, and when the process
that started it is gone. It ignores SIGTERM: service managers send it to every process of a group, and the API
process lets requests finish first.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import traceback
from contextlib import ExitStack, closing

from headway.engine.build import Engine, assemble, measured_policy
from headway.engine.grammar.compiler import GrammarCompiler
from headway.engine.loop import EngineLoop
from headway.engine.probe import act_on_check, check_drafts, check_logits, settle_taps, wants_check
from headway.engine.protocol.errors import HeadwayError
from headway.engine.protocol.logs import configure_logging, log_seconds
from headway.engine.protocol.messages import (
    PARENT_VARIABLE,
    Configure,
    EngineInfo,
    Failure,
    Heartbeat,
    Mailbox,
    Ready,
)
from headway.engine.scheduling.audit import Auditor
from headway.kernels import log_compilations

LOOK_SECONDS = 1.0

logger = logging.getLogger("headway.engine")


def main(address: str, parent: int) -> int:
    """Serves until it is told to end, or until `parent` is no longer this process's parent, which may have
    ended while libraries were imported. Returns the exit status: 0 after a Shutdown, 1 after a failure."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads
    with closing(Mailbox(address)) as mailbox:
        first = _receive_configuration(mailbox, parent)
        if first is None:
            return 1
        config = first.config
        configure_logging(config.log_level, config.log_format)
        log_compilations()
        try:
            _serve(first, mailbox, parent)
        except HeadwayError as error:
            mailbox.send(Failure(type(error).__name__, str(error)))
            return 1
        except Exception as error:
            logger.exception("the engine ends because of a fault of its own")
            trace = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(trace.filename)}:{trace.lineno}"
            mailbox.send(Failure("crash", f"{type(error).__name__}: {error} ({where})"))
            return 1
    return 0


def _receive_configuration(mailbox: Mailbox, parent: int) -> Configure | None:
    """Waits for the first message while the parent lives, which may download a model meanwhile."""
    while os.getppid() == parent:
        messages = mailbox.receive(LOOK_SECONDS)
        if messages:
            return messages[0] if isinstance(messages[0], Configure) else None
    return None


def _serve(first: Configure, mailbox: Mailbox, parent: int) -> None:
    config = first.config
    engine = assemble(
        config,
        progress=lambda done: mailbox.send(Heartbeat("load", done)),
        measuring=lambda _: mailbox.send(Heartbeat("capture", 0.0)),
    )
    with ExitStack() as taken:
        if engine.ranks is not None:
            taken.callback(engine.ranks.close)
        _run(engine, first, mailbox, parent)


def _run(engine: Engine, first: Configure, mailbox: Mailbox, parent: int) -> None:
    """Prepares the engine and serves. Raises RankError where another rank ends."""
    config, depths = first.config, range(engine.info.depth + 1)
    settle_taps(engine)
    with log_seconds("capturing steps"):
        engine.runner.capture(depths, progress=lambda done: mailbox.send(Heartbeat("capture", done)))
    if engine.info.depth:
        with log_seconds("measuring rounds"):
            engine.scheduler.set_depth_policy(measured_policy(engine))
    info = _checked(engine, is_required=config.require_speculation)
    # The objects that exist now stay: a full garbage collection that visits them would stop every stream for
    # some 50 ms.
    gc.collect()
    gc.freeze()
    compiler = GrammarCompiler(first.token_table, engine.info.vocab_size)
    auditor = Auditor(engine.scheduler, config.audit_rate)
    loop = EngineLoop(engine.scheduler, engine.runner, mailbox, compiler=compiler, auditor=auditor)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mailbox.send(Ready(info))
    while loop.step() and os.getppid() == parent:
        if engine.ranks is not None:
            engine.ranks.check()


def _checked(engine: Engine, *, is_required: bool) -> EngineInfo:
    """Returns the facts with the check of the draft head, which may turn speculation off. Raises ModelError
    and ConfigError."""
    with log_seconds("checking logits and drafts"):
        check_logits(engine)
        if not wants_check(engine.info):
            return engine.info
        return act_on_check(engine, check_drafts(engine), is_required=is_required)


if __name__ == "__main__":
    status = main(sys.argv[1], int(os.environ.get(PARENT_VARIABLE, os.getppid())))
    if status != 0:
        logging.shutdown()
        os._exit(status)  # an orderly end would wait for a GPU that waits for a rank which has ended
