"""A server whose engine a request can end: `python -m headway_testing.deadly_process serve [FLAG ...]`.

It is `headway serve` before a real engine that kills itself whenever it is about to plan a step while a
request with the cache salt "deadly" runs that has got DEADLY_TOKENS tokens.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from functools import partial

from headway.engine import PARENT_VARIABLE

DEADLY_SALT, DEADLY_TOKENS = "deadly", 20


def run_engine(address: str) -> int:
    from headway.engine.process import main
    from headway.engine.scheduling.plan import Plan
    from headway.engine.scheduling.scheduler import Scheduler

    plan = Scheduler.plan

    def deadly_plan(scheduler: Scheduler) -> Plan | None:
        for request in scheduler.state.running:
            if request.cache_salt.endswith(DEADLY_SALT) and len(request.output_token_ids) >= DEADLY_TOKENS:
                os.kill(os.getpid(), signal.SIGKILL)
        return plan(scheduler)

    Scheduler.plan = deadly_plan  # type: ignore[method-assign]
    return main(address, int(os.environ[PARENT_VARIABLE]))


def run_server(arguments: list[str]) -> int:
    from headway.server import cli
    from headway.server.engine.child import EngineChild
    from headway.server.engine.client import EngineClient

    # Its name ends as that of the real engine's module, by which tests find the process.
    engine = [sys.executable, "-P", "-m", "headway_testing.deadly_process", "headway.engine.process"]
    command = importlib.import_module("headway.server.cli.serve")
    command.EngineClient = partial(EngineClient, command=engine)  # type: ignore[attr-defined]
    cli.EngineChild = partial(EngineChild, engine)  # type: ignore[attr-defined]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(run_server(sys.argv[1:]) if sys.argv[1] == "serve" else run_engine(sys.argv[2]))
