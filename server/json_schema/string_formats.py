"""Formats of strings that grammars enforce, where the library's own idea of them is wider than their standard."""

from __future__ import annotations

_YEAR = "[0-9]{4}"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
# No leap seconds: whether there may be one depends on hour, minute and zone together.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}[tT]{_TIME}"}
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_MAILBOX_LENGTHS = rf"^[^@]{{1,64}}@(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9.]+\])$"
_MAX_MAILBOX_CHARACTERS = 254
_OF_THE_LIBRARY = ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
_MAX_HOSTNAME_CHARACTERS = 253

# Zod's names for patterns, which it writes beside them.
PATTERN_FORMATS = frozenset((
    "starts_with", "ends_with", "includes", "lowercase", "uppercase", "regex", "cuid", "cuid2", "ulid", "nanoid", "xid", "ksuid", "e164",
))  # fmt: skip
FORMATS = tuple(sorted((*_PATTERNS, *_OF_THE_LIBRARY)))


def format_constraint(name: str) -> dict[str, object]:
    """Returns keywords that together allow the strings of a format of FORMATS; they leave other types alone."""
    if name in _PATTERNS:
        return {"pattern": f"^{_PATTERNS[name]}$"}
    if name == "hostname":
        return {"format": name, "maxLength": _MAX_HOSTNAME_CHARACTERS}
    if name == "email":
        return {"format": name, "pattern": _MAILBOX_LENGTHS, "maxLength": _MAX_MAILBOX_CHARACTERS}
    return {"format": name}
