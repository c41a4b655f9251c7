"""The forms in which models write calls."""

from headway.server.formats.json_calls import BracketCalls, JsonCalls, SeparatedCalls
from headway.server.formats.pythonic_calls import PythonicCalls
from headway.server.formats.tagged_calls import InvokeCalls, KeyedCalls, TaggedCalls

CallForm = JsonCalls | BracketCalls | SeparatedCalls | TaggedCalls | KeyedCalls | InvokeCalls | PythonicCalls

__all__ = [
    "BracketCalls",
    "CallForm",
    "InvokeCalls",
    "JsonCalls",
    "KeyedCalls",
    "PythonicCalls",
    "SeparatedCalls",
    "TaggedCalls",
]
