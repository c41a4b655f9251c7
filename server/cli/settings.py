"""The sources of values: the command line, else the environment, else the file of --config, else the
option's default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headway.engine import ConfigError
from headway.server.cli.config_file import NO_FILE, ConfigFile
from headway.server.cli.options import Option, Value, parse_switch
from headway.server.cli.redaction import shortened, without_credentials


@dataclass(frozen=True, slots=True)
class Settings:
    """The sources of one command's values. typed: the command line, with None for options that were not
    given."""

    typed: argparse.Namespace
    environment: Mapping[str, str]
    file: ConfigFile = NO_FILE

    def read(self, options: Iterable[Option]) -> dict[str, Value]:
        """Returns the values by their options' keys. Raises ConfigError that names the source."""
        return {option.key: self.value(option) for option in options}

    def value(self, option: Option) -> Value:
        given = self.given(option)
        if given is None:
            return option.default
        source, texts = given
        values = [_parse(option, source, text) for text in texts]
        return [str(value) for value in values] if option.is_list else values[-1]

    def typed_flags(self, options: Iterable[Option]) -> list[str]:
        """Returns the part of the command line that sets these options, to be typed again."""
        flags: list[str] = []
        for option in options:
            typed = getattr(self.typed, option.key, None)
            if typed is None:
                continue
            if option.parse is parse_switch:
                flags.append(f"--{option.flag}")
            else:
                for text in typed if isinstance(typed, list) else [typed]:
                    flags += [f"--{option.flag}", text]
        return flags

    def name_the_source(self, error: ConfigError, options: Iterable[Option]) -> ConfigError:
        """Returns the error with the variable, or the key of the file, in place of a flag that was not
        typed but set there. Flags in the remedy stay as they are."""
        given = {f"--{option.flag}": self.given(option) for option in options}
        sources = {flag: value[0] for flag, value in given.items() if value is not None and value[0] != flag}
        text = str(error)
        first = re.search("--[a-z-]+(?= is )", text)
        if first is not None and first[0] in sources:
            return ConfigError(text.replace(first[0], sources[first[0]], 1))
        told = [source for flag, source in sources.items() if re.search(f"{flag}(?![a-z-])", text)]
        return ConfigError(f"{text} (set by {' and '.join(told)})") if told else error

    def given(self, option: Option) -> tuple[str, list[str]] | None:
        """Returns the source, as errors name it, and its texts; None if the option has its default."""
        typed = getattr(self.typed, option.key)
        if typed is not None:
            return f"--{option.flag}", typed if isinstance(typed, list) else [typed]
        if option.variable in self.environment:
            return option.variable, [self.environment[option.variable]]
        value = self.file.values.get(option.key)
        return None if value is None else (value.source, value.texts)


def _parse(option: Option, source: str, text: str) -> Value:
    try:
        text.encode()
        return option.parse(text)
    except UnicodeEncodeError:  # Python reads such bytes as lone surrogates
        raise ConfigError(f"{source} has bytes that are not UTF-8; convert it, such as with iconv") from None
    except ValueError as error:
        raise ConfigError(f"{source} is {_shown(option, text)}, it must be {error}") from None


def _shown(option: Option, text: str) -> str:
    """Returns the value for an error message, which is logged: without secrets and the credentials in
    URLs."""
    if option.is_secret and text:
        return f"a text of {len(text)} characters (not shown)"
    return repr(shortened(without_credentials(text)))
