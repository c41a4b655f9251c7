"""The environment's HEADWAY_* variables: those of the operator, those that Kubernetes sets, and misspelt
ones.

Values of variables are never shown: they may be keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from headway.server.cli.foreign_flags import ALIASES, INSTEAD, REMOVED, UsageError, refusal

PREFIX = "HEADWAY_"
# Variables that a pod gets for a Service called headway, or headway-NAME: the protocol, number and address of
# each port.
_OF_A_SERVICE = re.compile(
    r"HEADWAY_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)


def without_services(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables that Kubernetes sets for a Service called headway. Its
    HEADWAY_PORT is an address."""
    return {name: value for name, value in environment.items() if not _is_of_a_service(name, value)}


def remarks_on_services(environment: Mapping[str, str]) -> list[str]:
    """Returns a line on the variables that Kubernetes has set, if there are any."""
    names = sorted(name for name, value in environment.items() if _is_of_a_service(name, value))
    if not names:
        return []
    line = (
        f"{', '.join(names)}: ignored, because Kubernetes sets them for a Service called headway; set the port by --port. "
        "enableServiceLinks: false in the pod's spec keeps such variables away"
    )
    return [line]


def refuse_removed(environment: Mapping[str, str]) -> None:
    """Raises UsageError for the variable of a flag that was removed."""
    for name in sorted(environment):
        flag = _flag(name)
        if name.startswith(PREFIX) and flag in REMOVED:
            raise UsageError(refusal(name, flag, ()))


def warnings_of_unknown(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Returns a line for each unknown variable that Kubernetes has not set."""
    known = set(known)
    own = without_services(environment)
    unknown = sorted(name for name in own if name.startswith(PREFIX) and name not in known)
    return [f"{name} is ignored: there is no such variable{_hint(name, known)}" for name in unknown]


def _flag(name: str) -> str:
    return name.removeprefix(PREFIX).lower().replace("_", "-")


def _is_of_a_service(name: str, value: str) -> bool:
    is_address = name.startswith(PREFIX) and name.endswith("_PORT") and "://" in value
    return is_address or _OF_A_SERVICE.fullmatch(name) is not None


def _hint(name: str, known: Iterable[str]) -> str:
    instead = INSTEAD.get(_flag(name)) or ALIASES.get(f"--{_flag(name)}", "")
    if re.fullmatch("--[a-z-]+", instead):
        return f"; use {PREFIX}{instead[2:].replace('-', '_').upper()}"
    names = [other.removeprefix(PREFIX) for other in known]
    near = get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=0.8)
    return (
        f"; did you mean {PREFIX}{near[0]}?" if near else "; `headway serve --help-all` names all in brackets"
    )
