"""The process of any rank of a model but the first, which starts it: `python -P -m headway.engine.rank PIPE`.

It leaves when the first rank closes the pipe, which has the number PIPE here, or has ended.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from headway.engine.build import build_rank, load_rank
from headway.engine.parallel.follower import Follower
from headway.engine.parallel.group import RankError
from headway.engine.parallel.messages import Join, Loaded, encoded, received_by_rank
from headway.engine.protocol.errors import HeadwayError
from headway.engine.protocol.logs import configure_logging
from headway.engine.protocol.messages import Failure

logger = logging.getLogger("headway.engine")


def main(descriptor: int) -> int:
    """Computes until the first rank ends. Returns the exit status: 0 then, 1 after a failure."""
    faulthandler.enable()
    for number in (signal.SIGTERM, signal.SIGINT):  # requests finish first, as the first rank decides
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    with Connection(descriptor) as pipe:
        try:
            join = received_by_rank(pipe)
            assert isinstance(join, Join), f"first comes Join, not {join}"
            # The first rank logs what all ranks would log alike.
            configure_logging("error", join.config.log_format)
            _compute(join, pipe, parent)
        except (EOFError, ConnectionError):
            return 0
        except HeadwayError as error:
            with suppress(OSError):
                pipe.send_bytes(encoded(Failure(type(error).__name__, str(error))))
            logger.error("%s", error)  # the first rank may listen no more
        except RankError as error:
            logger.error("%s", error)
        except Exception:
            logger.exception("a rank ends because of a fault of its own")
    return 1


def _compute(join: Join, pipe: Connection, parent: int) -> None:
    """Raises EOFError and ConnectionError where the first rank has ended."""

    def look(_: float) -> None:
        if os.getppid() != parent:
            raise EOFError

    models = load_rank(join, look)
    pipe.send_bytes(encoded(Loaded()))
    follower = Follower(build_rank(join, models))
    gc.collect()
    gc.freeze()
    while True:
        command = received_by_rank(pipe)
        assert not isinstance(command, Join), f"the rank is built, and gets {command}"
        follower.follow(command)


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(status)  # an orderly end would wait for a GPU that waits for a rank which has ended
