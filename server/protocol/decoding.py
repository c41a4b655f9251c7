"""Bytes to a body of a known kind; what is wrong is named by its path, in the words of JSON.

Most bodies are decoded at once. One that does not fit is read again without types: fields that are null or change
nothing are dropped, whole numbers written as 5.0 become 5, and what is wrong then is refused by its path.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from typing import TypeVar, get_args

import msgspec

from headway.server.errors import ApiError
from headway.server.protocol.unserved import PAGE, Group, Table

Body = TypeVar("Body", bound=msgspec.Struct)

# Longer lists are left as they are: the limits of their fields refuse them, or they hold token ids.
MAX_TIDIED = 4096
MAX_NAME = 64  # characters of an unknown name that an error repeats
MAX_EXACT = 2**53  # whole numbers up to here are exact as floats

_EXPECTED = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "an array",
    "object": "an object",
}  # fmt: skip
_FOUND = _EXPECTED | {"bool": "a boolean", "null": "null"}


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body as JSON, whatever its content type. Raises ApiError that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        return _decode_again(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error) from None


def _decode_again(body: bytes, kind: type[Body]) -> Body:
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError:  # without types only a number can be at fault
        message = "the body has a number that is out of range; numbers may be -1.79e308 to 1.79e308"
        raise ApiError(message, code="invalid_value") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error) from None
    try:
        return msgspec.convert(_tidied(value, kind, ""), kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except RecursionError as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> ApiError:
    if isinstance(error, RecursionError):
        return ApiError("the body is nested too deeply to be read", code="invalid_json")
    return ApiError(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json")


def _tidied(value: object, kind: type[msgspec.Struct], where: str) -> object:
    """The value without fields that are null or change nothing. where: its path with a dot at the end, or ""."""
    if not isinstance(value, dict):
        return value
    fields = _fields(kind)
    unserved: Table = getattr(kind, "unserved", {})
    kept: dict[str, object] = {}
    for name, entry in value.items():
        path = f"{where}{name[:MAX_NAME]}"
        if entry is None:
            continue
        if name in fields:
            kept[name] = _tidied_field(entry, fields[name], path)
        elif name not in unserved:
            if kind.__struct_config__.forbid_unknown_fields:
                raise _unknown(name[:MAX_NAME], where, kind)
        elif not unserved[name].passes(name, entry):
            raise unserved_error(path, unserved[name])
    return kept


def _tidied_field(value: object, kind: type[msgspec.Struct] | None, path: str) -> object:
    """kind: of the value, or of its entries if it is a list; None if it is no object."""
    if isinstance(value, list) and len(value) <= MAX_TIDIED:
        return [_tidied_field(entry, kind, f"{path}[{i}]") for i, entry in enumerate(value)]
    if isinstance(value, float) and abs(value) <= MAX_EXACT and value.is_integer():
        return int(value)
    return value if kind is None else _tidied(value, kind, f"{path}.")


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Returns by field name the kind of object that the field holds, alone or in a list."""
    return {field.encode_name: next(_structs(field.type), None) for field in msgspec.structs.fields(kind)}


def _structs(annotation: object) -> Iterator[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for argument in get_args(annotation):
        yield from _structs(argument)


def unserved_error(path: str, group: Group) -> ApiError:
    message = f"{path} is known, but not served with this value. It is for {group.purpose}; {group.instead}. See {PAGE}"
    return ApiError(message, param=path, code="unsupported_parameter")


def _unknown(name: str, where: str, kind: type[msgspec.Struct]) -> ApiError:
    names = {known: where + known for known in (*_fields(kind), *getattr(kind, "unserved", {}))}
    for outer, inner in _fields(kind).items():
        if inner is not None:
            names |= {known: f"{where}{outer}.{known}" for known in _fields(inner) if known not in names}
    close = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {names[close[0]]}?" if close else "docs/api.md lists the known ones"
    message = f"Unrecognized request argument supplied: {where}{name}; {hint}"
    return ApiError(message, param=where + name, code="unknown_parameter")


def _refusal(message: str) -> ApiError:
    """msgspec's message, with the path as `param` and the names of JSON's types."""
    what, _, place = message.partition(" - at ")
    path = re.sub(r".*`\$\.?(.*)`", r"\1", place)
    is_entry = path.endswith("[...]")  # a value of an object whose keys are free
    path = path.replace("[...]", "")
    name = f"an entry of {path}" if is_entry else path or "the body"
    missing = re.search(r"required field `([^`]*)`", what)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(f"{path} is missing; it is required", param=path, code="missing_required_parameter")
    types = re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", what)
    if types is None:
        return ApiError(f"{name}: {what[:1].lower()}{what[1:]}", param=path or None, code="invalid_type")
    wanted = [_EXPECTED[word] for word in types[1].split(" | ") if word in _EXPECTED]
    found = _FOUND.get(types[2], types[2])
    if types[2] == "float" and "float" not in types[1].split(" | "):
        found = "a number with a fraction"
    return ApiError(
        f"{name} is {found}, it must be {' or '.join(wanted)}", param=path or None, code="invalid_type"
    )
