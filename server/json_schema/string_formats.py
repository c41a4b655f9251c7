"""Formats that grammars enforce: formats of strings for which the library is laxer than the standard, and
formats of numbers."""

from __future__ import annotations

from collections.abc import Sequence

_YEAR = "[0-9]{4}"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
# Leap seconds are excluded: whether one is valid depends on hour, minute and zone together.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}[tT]{_TIME}"}
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_MAILBOX_LENGTHS = rf"^[^@]{{1,64}}@(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9.]+\])$"
_MAX_MAILBOX_CHARACTERS = 254
_OF_THE_LIBRARY = ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
_MAX_HOSTNAME_CHARACTERS = 253

# Zod's names of patterns, which it writes beside the patterns.
PATTERN_FORMATS = frozenset((
    "starts_with", "ends_with", "includes", "lowercase", "uppercase", "regex", "cuid", "cuid2", "ulid", "nanoid", "xid", "ksuid", "e164",
    "guid", "cidrv4", "cidrv6", "base64", "base64url", "jwt", "emoji", "json_string",
))  # fmt: skip
_MAX_64 = 2**63 - 1024  # the greatest float that an integer of 64 bits holds
_RANGES = {
    "int8": (-(2**7), 2**7 - 1), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1), "int64": (-_MAX_64, _MAX_64),
    "uint8": (0, 2**8 - 1), "uint16": (0, 2**16 - 1), "uint32": (0, 2**32 - 1), "uint64": (0, _MAX_64),
}  # fmt: skip
_ANY_NUMBER = ("float", "double")  # how a number is stored, not its value
_NO_FRACTIONS = ["array", "boolean", "integer", "null", "object", "string"]
FORMATS = tuple(sorted((*_PATTERNS, *_OF_THE_LIBRARY)))


def format_constraint(name: str) -> dict[str, object]:
    """Returns keywords that together allow the strings of a format in FORMATS; other types stay allowed."""
    if name in _PATTERNS:
        return {"pattern": f"^{_PATTERNS[name]}$"}
    if name == "hostname":
        return {"format": name, "maxLength": _MAX_HOSTNAME_CHARACTERS}
    if name == "email":
        return {"format": name, "pattern": _MAILBOX_LENGTHS, "maxLength": _MAX_MAILBOX_CHARACTERS}
    return {"format": name}


def number_constraint_of(name: object, types: Sequence[object]) -> dict[str, object] | None:
    """Returns keywords that together allow the numbers of a format; None if it is no format of values of
    these types."""
    if not {"integer", "number"} & {kind for kind in types if isinstance(kind, str)}:
        return None
    if name in _ANY_NUMBER:
        return {}
    if name not in _RANGES:
        return None
    low, high = _RANGES[str(name)]
    return {"minimum": low, "maximum": high, **({"type": _NO_FRACTIONS} if "number" in types else {})}
