"""JSON schemas as grammars can enforce them."""

from headway.server.json_schema.enforceable import WRITING, Schema, enforceable, keyword_places

__all__ = ["WRITING", "Schema", "enforceable", "keyword_places"]
