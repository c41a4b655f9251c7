"""Converts grammars in the form of llama.cpp, SGLang and vLLM (`root ::= ...`) to the dialect of Lark that
the engine compiles."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from headway.engine.protocol.errors import RequestError

_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_PARTS = re.compile(r'#[^\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')
_CODES = re.compile(r"\\(?:\\|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
# A set of characters becomes a regular expression, in which these are operators.
_OPERATORS = ("&&", "--", "~~")


def is_gbnf(grammar: str) -> bool:
    """Returns whether the grammar has a rule `root ::=`, which GBNF needs and Lark does not have."""
    return _ROOT.search(grammar) is not None


def lark_of_gbnf(grammar: str) -> str:
    """Returns the grammar in Lark. Raises RequestError with the reason why it cannot be read."""
    try:
        return str(gbnf_to_lark(_PARTS.sub(_plain, grammar)))
    except RequestError:
        raise
    except ValueError:  # of int()
        message = "the grammar cannot be enforced: a repetition has a number that cannot be read; write fewer digits, of 0 to 9"
        raise RequestError(message) from None
    except Exception as error:  # noqa: BLE001  # the library raises this very class
        raise RequestError(f"the grammar cannot be enforced: {error}") from None


def _plain(part: re.Match[str]) -> str:
    """Replaces escaped codes by their characters, since the library drops zeros of codes."""
    text = part[0]
    if text.startswith("[") and any(operator in text for operator in _OPERATORS):
        message = f"the grammar cannot be enforced: the set {text[:64]} has one of {', '.join(_OPERATORS)}; write the second character as \\x.."
        raise RequestError(message)
    return text if text.startswith("#") else _CODES.sub(_character, text)


def _character(code: re.Match[str]) -> str:
    digits = code[1] or code[2] or code[3]
    if digits is None or int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) < 0xE000:
        return code[0]
    character = chr(int(digits, 16))
    if character.isalnum() or ord(character) >= 0xA0:
        return character
    return f"\\x{ord(character):02x}"
