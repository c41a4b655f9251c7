"""Translates regular expressions of JSON Schema, which are ECMAScript's, to the syntax of Rust's regex crate,
which grammars use.

The meanings of `.`, `\\s`, `\\d`, `\\w` and `[` differ, so that an unchanged pattern might match other texts.
"""

from __future__ import annotations

import re

MAX_PATTERN_CHARACTERS = 4096

# The characters of JSON strings without \\u escapes. Each set is intersected with them: if a set contains
# some control characters, the library also admits quotation marks and backslashes.
_WRITABLE = r"\x08\t\n\x0C\r\x20-\x7E\x{80}-\x{10FFFF}"
_SPACES = r"\t\n\x0B\x0C\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_SETS = {
    "d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]", "s": f"[{_SPACES}]", "S": f"[^{_SPACES}]",
}  # fmt: skip
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_REPETITION = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z0-9_=]+\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{0*([0-9A-Fa-f]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_$][A-Za-z0-9_$]*>)?")
_SURROGATES = range(0xD800, 0xE000)
# JSON writes these by \\u escapes only, which grammars do not allow. The library excludes U+007F from texts.
_UNWRITABLE = (frozenset(range(32)) | {127}) - {8, 9, 10, 12, 13}


class PatternError(ValueError):
    """A pattern that is wrong or cannot be enforced; the message goes on after "the pattern"."""


def rust_pattern(pattern: str) -> str:
    """Returns a pattern of Rust's regex crate that matches the same texts. Raises PatternError."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise PatternError(f"has {len(pattern)} characters, the limit is {MAX_PATTERN_CHARACTERS}")
    return _Translation(pattern).run()


def ascii_classes(pattern: str) -> str:
    """Returns a pattern of Rust's regex crate whose `\\d`, `\\w` and `\\s` have their meaning in a JSON
    schema. A pattern with (?u) stays as it is."""
    if pattern.startswith("(?u)"):
        return pattern
    return re.sub(r"\\(.)", lambda found: _SETS.get(found[1], found[0]), pattern, flags=re.DOTALL)


class _Translation:
    """The translation of one pattern, from left to right. Mutable: the index that is read next, and the
    result so far."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._written: list[str] = []
        self._can_repeat = False  # what was written last may be repeated

    def run(self) -> str:
        while self._at < len(self._pattern):
            self._term()
        return "".join(self._written)

    def _term(self) -> None:
        character = self._pattern[self._at]
        if character == "(":
            self._group()
        elif character in ")|^$":
            self._write(character, 1, can_repeat=character == ")")
        elif character == ".":
            self._write(_writable(_DOT), 1)
        elif character == "[":
            self._set()
        elif character == "\\":
            self._write(self._escape())
        elif (repetition := _REPETITION.match(self._pattern, self._at)) is not None:
            self._repeat(repetition[0])
        elif self._pattern.startswith("{,", self._at):
            raise PatternError(f"has {{, at place {self._at}, which is no repetition; write {{0, or \\{{,")
        else:
            self._write(_literal(ord(character)), 1)

    def _write(self, text: str, num_read: int = 0, *, can_repeat: bool = True) -> None:
        self._written.append(text)
        self._at += num_read
        self._can_repeat = can_repeat

    def _repeat(self, repetition: str) -> None:
        if not self._can_repeat:
            raise PatternError(f"has {repetition} at place {self._at} with nothing to repeat")
        self._write(repetition, len(repetition), can_repeat=False)

    def _group(self) -> None:
        """Reads the opening of a group. Groups do not capture."""
        group = _GROUP.match(self._pattern, self._at)
        assert group is not None, self._pattern
        if group[0] == "(" and self._pattern.startswith("(?", self._at):
            kind = self._pattern[self._at : self._at + 4]
            what = "look-around" if re.match(r"\(\?<?[=!]", kind) else "flags"
            raise PatternError(f"has {what} ({kind}...) at place {self._at}, which cannot be enforced")
        self._write("(?:", len(group[0]), can_repeat=False)

    def _escape(self) -> str:
        """Reads an escape outside of a set."""
        following = self._pattern[self._at + 1 : self._at + 2]
        if following in ("b", "B") or (following.isdecimal() and following != "0") or following == "k":
            what = "a word boundary" if following in "bB" else "a back-reference"
            raise PatternError(f"has {what} (\\{following}) at place {self._at}, which cannot be enforced")
        read = self._escaped()
        return _writable(read) if isinstance(read, str) else _literal(read)

    def _escaped(self) -> int | str:
        """Reads an escape that means the same inside of a set: a character, or a set in Rust's syntax."""
        start, pattern = self._at, self._pattern
        following = pattern[start + 1 : start + 2]
        self._at += 2
        if following in _SETS and following:
            return _SETS[following]
        if (prop := _PROPERTY.match(pattern, start + 1)) is not None:
            self._at = prop.end()
            return f"\\{prop[0]}"
        if (number := _HEX.match(pattern, start + 1)) is not None:
            self._at = number.end()
            return self._whole_character(int(number[1] or number[2] or number[3], 16))
        if following in _CONTROLS:
            return _CONTROLS[following]
        if following == "0" and not pattern[start + 2 : start + 3].isdecimal():
            return 0
        if following == "c" and re.match("[A-Za-z]", pattern[start + 2 :]):
            self._at += 1
            return ord(pattern[start + 2]) % 32
        if not following or (following.isascii() and (following.isalnum() or following == "_")):
            raise PatternError(f"has \\{following} at place {start}, which is no escape of ECMAScript")
        return ord(following)

    def _whole_character(self, code: int) -> int:
        """Joins the two halves of a character that is written as two escapes."""
        low = _LOW_SURROGATE.match(self._pattern, self._at)
        if code in range(0xD800, 0xDC00) and low is not None:
            self._at = low.end()
            return 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        if code in _SURROGATES or code > 0x10FFFF:
            raise PatternError(f"has \\u{code:04X}, which is no character")
        return code

    def _set(self) -> None:
        """Reads a set. Its characters that are never written are left out: the library would read a set of
        them as empty."""
        start = self._at
        is_negated = self._pattern.startswith("[^", start)
        self._at += 2 if is_negated else 1
        is_anything = is_negated and self._pattern.startswith("]", self._at)
        parts: list[str] = []
        while not self._pattern.startswith("]", self._at):
            if self._at >= len(self._pattern):
                raise PatternError(f"has a [ at place {start} without its ]")
            part, is_writable = self._set_part()
            parts += [part] if is_negated or is_writable else []
        if not parts and not is_anything:
            raise PatternError(f"has a set at place {start} of no character that is written")
        self._write(
            f"[{_WRITABLE}]" if is_anything else _writable(f"[{'^' * is_negated}{''.join(parts)}]"), 1
        )

    def _set_part(self) -> tuple[str, bool]:
        """Reads a member of a set, or a range of them; returns it with whether any character of it can be
        written."""
        first = self._member()
        following = self._pattern[self._at + 1 : self._at + 2]
        if not self._pattern.startswith("-", self._at) or following in ("]", ""):
            return (first, True) if isinstance(first, str) else (_code(first), first not in _UNWRITABLE)
        start = self._at
        self._at += 1
        last = self._member()
        if isinstance(first, str) or isinstance(last, str):
            raise PatternError(f"has a range with a set as its end at place {start}; write \\- for it")
        if first > last:
            raise PatternError(f"has a range out of order at place {start}")
        is_writable = last > max(_UNWRITABLE) or not _UNWRITABLE.issuperset(range(first, last + 1))
        return f"{_code(first)}-{_code(last)}", is_writable

    def _member(self) -> int | str:
        character = self._pattern[self._at]
        if character != "\\":
            self._at += 1
            return ord(character)
        following = self._pattern[self._at + 1 : self._at + 2]
        if following in ("b", "-"):
            self._at += 2
            return 8 if following == "b" else ord("-")
        return self._escaped()


def _writable(characters: str) -> str:
    """Returns the members of a set that strings of JSON may hold."""
    return f"[{_WRITABLE}&&{characters}]"


def _literal(code: int) -> str:
    if code in _UNWRITABLE:
        raise PatternError(f"has the control character {code}, which is never written")
    character = chr(code)
    return character if character.isascii() and character.isalnum() else _code(code)


def _code(code: int) -> str:
    if code in _SURROGATES:
        raise PatternError(f"has \\u{code:04X}, which is no character")
    return f"\\x{{{code:X}}}"
