"""Bytes to a body of a known kind; what is wrong is named by its field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from headway.server.errors import ApiError

Body = TypeVar("Body", bound=msgspec.Struct)


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body as JSON, whatever its content type. Raises ApiError that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply to be read", code="invalid_json") from None


def _refusal(message: str) -> ApiError:
    """msgspec's message, with the field as `param` and OpenAI's words for the two common faults."""
    what, _, where = message.partition(" - at ")
    path = where.strip("`").removeprefix("$").removeprefix(".")
    quoted = re.search(r"field `([^`]*)`", what)
    if quoted is None:
        field = re.split(r"[.\[]", path)[0] or None
        return ApiError(f"{path or 'the body'}: {_lower(what)}", param=field, code="invalid_type")
    name = f"{path}.{quoted[1]}" if path else quoted[1]
    if "unknown" in what:
        return ApiError(
            f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
        )
    return ApiError(f"{name} is missing; it is required", param=name, code="missing_required_parameter")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
