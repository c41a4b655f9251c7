"""JSON schemas as grammars can enforce them."""

from headway.server.json_schema.enforceable import Schema, enforceable, keyword_places

__all__ = ["Schema", "enforceable", "keyword_places"]
