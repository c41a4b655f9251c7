"""Writes grammars in llguidance's dialect of Lark: texts with special tokens, JSON by a schema, and free
text up to a delimiter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headway.server.json_schema import WRITING

ANY = "(?s:.*)"
# The whitespace of json.dumps, which models learn. A model that may write more can do so without end.
_WRITING = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
    "json_allowed_escapes": WRITING["json_allowed_escapes"],
}  # fmt: skip


class Lark:
    """The rules of one grammar. Mutable: its methods add the rules that their results refer to.

    special_ids: the ids of the special tokens by their text; these must be matched as tokens, other text as
    text.
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        names = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "((?!))")
        self._rules: list[str] = []

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def literal(self, text: str) -> str:
        """Returns an expression for exactly this text, in which special tokens are tokens."""
        parts = [part for part in self._special.split(text) if part]
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else quote(part) for part in parts
        )

    def rule(self, expression: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """Returns an expression for the JSON that a schema allows, with fixed whitespace."""
        return "%json " + json.dumps({"x-guidance": _WRITING, **schema})

    def text(self, closer: str, *, excluded: Sequence[str] = (), patterns: Sequence[str] = (ANY,)) -> str:
        """Returns an expression for text up to the closing delimiter, with the delimiter.

        excluded: texts that must not occur. patterns: regular expressions that the whole text matches.
        """
        text = " & ".join(f"/{slashes(pattern)}/" for pattern in patterns)
        if without := [regex_of(one) for one in excluded if not self._special.search(one)]:
            text += f" & ~/{ANY}({'|'.join(without)}){ANY}/"
        name = f"T{len(self._rules)}"
        before, special, after = [*self._special.split(closer, maxsplit=1), "", ""][:3]
        if special:  # no text matches a special token, so that the longest match ends before it
            self._rules.append(f"{name}: ({text}) {quote(before)}" if before else f"{name}: {text}")
            return self.rule(f"{name} {self.literal(special + after)}")
        self._rules.append(f"{name}: {text}")
        self._rules.append(f"{name.lower()}[lazy]: {name} {quote(closer)}")
        return name.lower()


def quote(text: str) -> str:
    """Returns a Lark string. llguidance reads its escapes like JSON's."""
    return json.dumps(text, ensure_ascii=False)


def regex_of(text: str) -> str:
    """Returns a regular expression for exactly this text."""
    return slashes(re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", text).replace("\n", r"\n"))


def slashes(pattern: str) -> str:
    """Returns the pattern with escapes for use between slashes."""
    return re.sub(
        r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m.group(), m.group()), pattern, flags=re.DOTALL
    )
