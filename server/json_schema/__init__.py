"""JSON schemas as grammars can enforce them."""

from headway.server.json_schema.enforceable import WRITING, Schema, enforceable, keyword_places
from headway.server.json_schema.patterns import ascii_classes

__all__ = ["WRITING", "Schema", "ascii_classes", "enforceable", "keyword_places"]
