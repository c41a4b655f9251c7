"""The settings of a fleet, from the `args` of an application of Ray Serve or from the command line of
`headway fleet`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headway.engine import ConfigError
from headway.server.cli import SERVE_GROUPS
from headway.server.cli.config_file import ConfigFile, FileValue
from headway.server.cli.settings import Settings

Routing = Literal["prefix", "least-loaded", "round-robin"]
# Flags that replicas cannot have: Ray decides where clients connect, and `serve` takes the place of a file.
NOT_OF_REPLICAS = {
    **dict.fromkeys(("host", "port", "unix-socket", "tls-cert", "tls-key"), "http_options of Ray Serve"),
    "config": "serve, which is one",
}
_OPTIONS = {option.flag: option for group in SERVE_GROUPS.values() for option in group}


class _Args(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    replicas: int = 2
    gpus: float = 1
    routing: Routing = "prefix"
    serve: dict[str, bool | int | float | str | list[str]] = {}


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """model: as for `headway serve`. gpus: of each replica; 0 for the CPU. flags: the flags of each
    replica's `headway serve`, as texts. max_body_bytes, drain_seconds: the values of the flags, or their
    defaults."""

    model: str | None
    replicas: int
    gpus: float
    routing: Routing
    flags: dict[str, str | list[str]]
    max_body_bytes: int
    drain_seconds: float

    @property
    def ingresses(self) -> int:
        """Returns the number of ingresses: one keeps up with the streams of two replicas (stream.py)."""
        return (self.replicas + 1) // 2


def read_settings(args: Mapping[str, Any]) -> FleetSettings:
    """Raises ConfigError that names the key at fault."""
    try:
        read = msgspec.convert(dict(args), _Args)
    except msgspec.ValidationError as error:
        wanted = "it must have only model, replicas, gpus, routing and serve, a mapping of flags"
        raise ConfigError(f"args of the fleet: {error}; {wanted}") from None
    if read.replicas < 1:
        raise ConfigError(f"replicas is {read.replicas}, it must be 1 or more")
    if read.gpus < 0 or read.gpus != int(read.gpus):
        raise ConfigError(
            f"gpus is {read.gpus:g}, it must be a whole number: 0 for the CPU, else GPUs of each replica"
        )
    flags = _texts(read.serve)
    values = _checked(flags)
    max_body, drain = values.value(_OPTIONS["max-body"]), values.value(_OPTIONS["drain-seconds"])
    assert isinstance(max_body, int)
    assert isinstance(drain, float)
    return FleetSettings(read.model, read.replicas, int(read.gpus), read.routing, flags, max_body, drain)


def _texts(serve: Mapping[str, bool | float | str | Sequence[str]]) -> dict[str, str | list[str]]:
    """Returns the flags with their values as on a command line; YAML has already parsed some of them."""
    return {
        name.replace("_", "-"): [*value]
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
        for name, value in serve.items()
    }


def _checked(flags: Mapping[str, str | list[str]]) -> Settings:
    """Reads every value as `headway serve` will. Raises ConfigError."""
    values: dict[str, FileValue] = {}
    for flag, text in flags.items():
        if flag in NOT_OF_REPLICAS:
            raise ConfigError(f"serve: {flag} is no flag of a replica; see {NOT_OF_REPLICAS[flag]}")
        if flag not in _OPTIONS:
            raise ConfigError(
                f"serve: {flag} is not a flag of headway serve; headway serve --help-all lists them"
            )
        option = _OPTIONS[flag]
        if isinstance(text, list) and not option.is_list:
            raise ConfigError(f"serve: {flag} is a list, it must be one value")
        values[option.key] = FileValue(f"serve: {flag}", text if isinstance(text, list) else [text])
    untyped = argparse.Namespace(**{option.key: None for option in _OPTIONS.values()})
    settings = Settings(untyped, {}, ConfigFile(values, []))
    settings.read(_OPTIONS.values())
    return settings
