"""Turns the faults of a command into its exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


def reports(*faults: type[Exception]) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorates the main function of a command. These faults become one line on stderr and the exit status
    1; an interrupt becomes 130."""

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except faults as error:
                print(f"headway: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                return 130

        return run

    return decorate
