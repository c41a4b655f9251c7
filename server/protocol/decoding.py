"""Decodes bytes to a body of a known kind. Errors name the path of the field, in the words of JSON.

Most bodies are decoded at once. A body that does not fit is read again without types: fields that are null,
have no effect or are unknown are dropped, whole numbers written as 5.0 become 5, and any remaining fault is
refused with its path.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import NoneType
from typing import TypeVar, get_args

import msgspec

from headway.server.base.errors import ApiError
from headway.server.protocol.checks import missing
from headway.server.protocol.other_names import NO_VALUE, OtherNames
from headway.server.protocol.unserved import PAGE, Group, Table

Body = TypeVar("Body", bound=msgspec.Struct)

# Longer lists of values are left as they are: the limits of their fields refuse them, or they contain token
# ids.
MAX_TIDIED = 4096
MAX_NAME = 64  # characters of an unknown name that an error repeats
MAX_EXACT = 2**53  # whole numbers up to here are exact as floats
_NUMBERS = "numbers may be -1.79e308 to 1.79e308"
MAX_UNKNOWN = 1024  # unknown names of one body that are compared with known ones, and reported
MIN_LIKENESS = 0.8  # the similarity of a name that is suggested instead of an unknown one

_EXPECTED = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "an array",
    "object": "an object",
}  # fmt: skip
_FOUND = _EXPECTED | {"bool": "a boolean", "null": "null"}


def decode(
    body: bytes, kind: type[Body], ignored: list[str] | None = None, *, refuses_unknown: bool = False
) -> Body:
    """Decodes a body of JSON, whatever its content type. Raises ApiError that names the field at fault.

    ignored: receives the paths of fields without effect, the first of each name in a kind of object.
    refuses_unknown: unknown fields are refused, too.
    """
    if not body.strip():
        raise ApiError("the body is empty; send a JSON object", code="invalid_json")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        return _decode_again(body, kind, [] if ignored is None else ignored, refuses_unknown)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error) from None


def _decode_again(body: bytes, kind: type[Body], ignored: list[str], refuses_unknown: bool) -> Body:
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError:  # without types only a number can be invalid
        message = f"the body has a number that is out of range; {_NUMBERS}"
        raise ApiError(message, code="invalid_value") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error) from None
    reader = _Reader(refuses_unknown)
    try:
        found = msgspec.convert(reader.tidied(value, kind, ""), kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except RecursionError as error:
        raise _unreadable(error) from None
    ignored += reader.ignored.values()
    return found


def _unreadable(error: Exception) -> ApiError:
    if isinstance(error, RecursionError):
        return ApiError("the body is nested too deeply to be read", code="invalid_json")
    return ApiError(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one body. ignored: the first path of a field without effect, by kind of object and name.
    passed: unknown names that are not misspelt."""

    refuses_unknown: bool
    ignored: dict[tuple[type, str], str] = field(default_factory=dict)
    passed: set[tuple[type, str]] = field(default_factory=set)

    def tidied(self, value: object, kind: type[msgspec.Struct], where: str) -> object:
        """Returns the value without fields that are null or have no effect. where: its path with a dot at
        the end, or ""."""
        if not isinstance(value, dict):
            return value
        fields = _fields(kind)
        unserved: Table = getattr(kind, "unserved", {})
        other_names: OtherNames = getattr(kind, "other_names", {})
        kept: dict[str, object] = {}
        for name, entry in value.items():
            if entry is None:
                if name in _nullable(kind):
                    kept[name] = None
            elif name in fields:
                kept[name] = self._tidied_field(entry, fields[name], where + name)
            elif name in other_names:
                pass
            elif name not in unserved:
                self._pass_unknown(name, entry, where, kind)
            elif not unserved[name].is_neutral(name, entry):
                if not unserved[name].is_ignored:
                    raise unserved_error(where + name, unserved[name])
                self._ignore(name, entry, where, kind)
        if other_names:
            self._rename(
                {name: value[name] for name in value if name in other_names}, other_names, kept, where
            )
        return kept

    def _rename(
        self, given: dict[str, object], other_names: OtherNames, kept: dict[str, object], where: str
    ) -> None:
        """Moves values of other names to their fields. Raises ApiError if the values of two names differ."""
        names = {own: own for own in kept}
        for name, entry in given.items():
            if entry is None or entry in NO_VALUE.get(name, ()):
                continue
            own = other_names[name]
            value = self._tidied_field(entry, None, where + name)
            other = kept.setdefault(own, value)
            first = names.setdefault(own, name)
            if other not in (value, [value]) and [other] != value:
                message = f"{where}{name} is {_shown(value)} and {where}{first} is {_shown(other)}: they are two names of one field; send one of them"
                raise ApiError(message, param=where + name, code="invalid_value")

    def _tidied_field(self, value: object, kind: type[msgspec.Struct] | None, path: str) -> object:
        """kind: the kind of the value, or of the entries of a list; None for values that are no objects."""
        if isinstance(value, str):
            return value
        if isinstance(value, list) and (kind is not None or len(value) <= MAX_TIDIED):
            return [self._tidied_field(entry, kind, f"{path}[{i}]") for i, entry in enumerate(value)]
        if isinstance(value, float) and abs(value) <= MAX_EXACT and value.is_integer():
            return int(value)
        return value if kind is None else self.tidied(value, kind, f"{path}.")

    def _pass_unknown(self, name: str, value: object, where: str, kind: type[msgspec.Struct]) -> None:
        """Ignores an unknown name. Raises ApiError if it is probably a misspelt known one: ignoring it
        would change the request."""
        if (kind, name) in self.passed or len(self.passed) >= MAX_UNKNOWN:
            self._ignore(name, value, where, kind)
            return
        served = (*_fields(kind), *getattr(kind, "other_names", {}))
        meant = next((known for known in served if is_slip(name, known)), None)
        is_refused = self.refuses_unknown and not getattr(kind, "passes_unknown", False)
        if meant is None and is_refused:
            names = [*served, *getattr(kind, "unserved", {})]
            meant = next(iter(difflib.get_close_matches(name[:MAX_NAME], names, 1, MIN_LIKENESS)), None)
        path = f"{where}{name[:MAX_NAME]}"
        if meant is not None or is_refused:
            hint = "/docs/api.md lists the known ones" if meant is None else f"did you mean {where}{meant}?"
            message = f"Unrecognized request argument supplied: {path}; {hint}"
            raise ApiError(message, param=path, code="unknown_parameter")
        self.passed.add((kind, name))
        self._ignore(name, value, where, kind)

    def _ignore(self, name: str, value: object, where: str, kind: type[msgspec.Struct]) -> None:
        if (kind, name) not in self.ignored and len(self.ignored) < MAX_UNKNOWN and value not in ("", [], {}):
            self.ignored[kind, name] = f"{where}{name[:MAX_NAME]}"


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}..."


def is_slip(name: str, known: str) -> bool:
    """Returns whether the name is the known one with a letter more, less or different, or with two
    neighbours swapped."""
    if abs(len(name) - len(known)) > 1 or name == known:
        return False
    start = next(
        (i for i, (a, b) in enumerate(zip(name, known, strict=False)) if a != b),
        len(min(name, known, key=len)),
    )
    rest, wanted = name[start:], known[start:]
    swapped = wanted[1:2] + wanted[:1] + wanted[2:]
    return rest[1:] == wanted[1:] or rest[1:] == wanted or rest == wanted[1:] or rest == swapped


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Returns the kind of object in each field, alone or in a list, by field name."""
    return {field.encode_name: next(_structs(field.type), None) for field in msgspec.structs.fields(kind)}


@cache
def _nullable(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the required fields that may be null: null does not mean there that the field was left out."""
    fields = msgspec.structs.fields(kind)
    return frozenset(f.encode_name for f in fields if f.required and NoneType in get_args(f.type))


def _structs(annotation: object) -> Iterator[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for argument in get_args(annotation):
        yield from _structs(argument)


def unserved_error(path: str, group: Group) -> ApiError:
    message = f"{path} is known, but not served with this value. It is for {group.purpose}; {group.instead}. See {PAGE}"
    return ApiError(message, param=path, code="unsupported_parameter")


def _refusal(message: str) -> ApiError:
    """Returns msgspec's error with the path as `param` and the names of JSON's types."""
    what, _, place = message.partition(" - at ")
    path = re.sub(r".*`\$\.?(.*)`", r"\1", place)
    is_entry = path.endswith("[...]")  # a value of an object with arbitrary keys
    path = path.replace("[...]", "")
    name = f"an entry of {path}" if is_entry else path or "the body"
    absent = re.search(r"required field `([^`]*)`", what)
    if absent is not None:
        return missing(f"{path}.{absent[1]}" if path else absent[1])
    if what == "Number out of range":
        return ApiError(f"{name} is out of range; {_NUMBERS}", param=path or None, code="invalid_value")
    types = re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", what)
    if types is None:
        return ApiError(f"{name}: {what[:1].lower()}{what[1:]}", param=path or None, code="invalid_type")
    wanted = [_EXPECTED[word] for word in types[1].split(" | ") if word in _EXPECTED]
    found = _FOUND.get(types[2], types[2])
    if types[2] == "float" and "float" not in types[1].split(" | "):
        found = "a number with a fraction, or beyond 2^53 with a point or an exponent"
    return ApiError(
        f"{name} is {found}, it must be {' or '.join(wanted)}", param=path or None, code="invalid_type"
    )
