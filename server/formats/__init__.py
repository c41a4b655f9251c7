"""The formats of models' output: reasoning, content and calls of tools."""

from headway.server.formats.families import ALIASES, FORMATS, PLAIN, find_format
from headway.server.formats.output_format import OutputFormat, OutputParser
from headway.server.formats.pieces import Content, Piece, Reasoning, ToolCall

__all__ = [
    "ALIASES",
    "FORMATS",
    "PLAIN",
    "Content",
    "OutputFormat",
    "OutputParser",
    "Piece",
    "Reasoning",
    "ToolCall",
    "find_format",
]
