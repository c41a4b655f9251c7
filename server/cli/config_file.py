"""The file of --config: YAML, with one key for each flag of `headway serve`, written with - or _ between
words.

Values are texts and are parsed as on the command line: revision: 1.10 stays 1.10. No error repeats more of a
file than keys and lines before the option has said whether its value is a secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from headway.engine import ConfigError
from headway.server.cli.foreign_flags import HARMLESS, is_harmless, refusal
from headway.server.cli.options import CONFIG, CONTROL_CHARACTERS, Option
from headway.server.cli.redaction import shortened

TEXT_TAG = "tag:yaml.org,2002:str"
_MAX_BYTES = 2**20
_NOTHING = ("", "~", "null", "Null", "NULL")  # as plain scalars, without quotes
_NEEDS_QUOTES = "a value that begins with *, & or ! needs quotes"


@dataclass(frozen=True, slots=True)
class FileValue:
    """The value of one flag in a file. source: the file, the line and the key, as errors name it."""

    source: str
    texts: list[str]


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """values: by the option's key. remarks: lines on keys of other servers' flags that change nothing."""

    values: dict[str, FileValue]
    remarks: list[str]


NO_FILE = ConfigFile({}, [])


def read_config_file(path: str, options: Iterable[Option]) -> ConfigFile:
    """Reads the values of the options that the file names.

    Raises ConfigError for a file that cannot be read or is not YAML, for an unknown or repeated key, and for
    a value that is neither one text nor, for a flag that may be repeated, a list of texts.
    """
    by_flag = {option.flag: option for option in options}
    values: dict[str, FileValue] = {}
    remarks: list[str] = []
    for key, value in _entries(path):
        line = f"{path}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{line}: a key is a list or a mapping, it must be the name of a flag")
        if CONTROL_CHARACTERS.search(key.value):
            raise ConfigError(f"{line}: the key {shortened(key.value)!r} has control characters; remove them")
        source = f"{line}: {shortened(key.value)}"
        option = by_flag.get(key.value.replace("_", "-"))
        if option is None:
            remarks.append(_remark(line, key.value, value, by_flag))
        elif option.key in values:
            raise ConfigError(f"{source} is given a second time; leave one out")
        else:
            values[option.key] = FileValue(source, _texts(source, value, is_list=option.is_list))
    return ConfigFile(values, remarks)


def _entries(path: str) -> list[tuple[yaml.Node, yaml.Node]]:
    """Returns the pairs of the file's mapping; an empty file has none."""
    given = f"--{CONFIG.flag} is {path!r}, it must be a YAML file with one key a flag"
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{given}: it is larger than 1 MiB")
        root = yaml.compose(content.decode("utf-8-sig"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{given}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        # Messages about an alias, an anchor or a tag quote it, and it may be a secret key without quotes.
        has_name = re.search("alias|anchor|tag", f"{error.context} {error.problem}")
        raise ConfigError(f"{given}: {_NEEDS_QUOTES if has_name else error.problem}{line}") from None
    except yaml.YAMLError:
        raise ConfigError(f"{given}: it has characters that YAML does not allow") from None
    except RecursionError:
        raise ConfigError(f"{given}: its lists or mappings are nested too deeply") from None
    if root is None or not root.value:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{given}, such as max-running: 64")
    return list(root.value)


def _remark(line: str, key: str, value: yaml.Node, known: Collection[str]) -> str:
    """Returns the remark on a key of another server that changes nothing. Raises ConfigError for all other
    unknown keys."""
    name = key.replace("_", "-")
    if name == CONFIG.flag:
        raise ConfigError(f"{line}: {key} names another file; write its keys here")
    if name in HARMLESS:
        given = _text(f"{line}: {shortened(key)}", value, "true or false")
    else:
        given = value.value if isinstance(value, yaml.ScalarNode) else ""
    if not is_harmless(name, given):
        raise ConfigError(f"{line}: {refusal(shortened(key), name, known, given)}")
    return f"{line}: {shortened(key)} is accepted and changes nothing"


def _texts(source: str, value: yaml.Node, *, is_list: bool) -> list[str]:
    if is_list and isinstance(value, yaml.SequenceNode):
        return [_text(source, item, "a text or a list of texts") for item in value.value]
    return [_text(source, value, "a text or a list of texts" if is_list else "one value")]


def _text(source: str, value: yaml.Node, wanted: str) -> str:
    kinds = {yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}
    if not isinstance(value, yaml.ScalarNode):
        raise ConfigError(f"{source} is {kinds[type(value)]}, it must be {wanted}")
    if value.tag != TEXT_TAG:
        raise ConfigError(f"{source} has a tag; {_NEEDS_QUOTES}")
    if value.style is None and value.value in _NOTHING:
        raise ConfigError(f"{source} has no value; give one, or leave the key out")
    if CONTROL_CHARACTERS.search(value.value):
        raise ConfigError(f"{source} has a line break or another control character; write it without")
    return str(value.value)
