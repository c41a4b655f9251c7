"""JSON schemas in a form that grammars can enforce."""

from headway.server.json_schema.enforceable import Schema, enforceable
from headway.server.json_schema.keywords import CONSTRAINTS, LENGTHS, PAGE
from headway.server.json_schema.patterns import ascii_classes
from headway.server.json_schema.places import keyword_places, patterns_in
from headway.server.json_schema.writing import WRITING

__all__ = [
    "CONSTRAINTS",
    "LENGTHS",
    "PAGE",
    "WRITING",
    "Schema",
    "ascii_classes",
    "enforceable",
    "keyword_places",
    "patterns_in",
]
