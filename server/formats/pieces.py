"""The pieces of a model's output after parsing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the model's reasoning, without its delimiters. start: see Content."""

    text: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the answer's text. start: its index in the model's output, in characters."""

    text: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call. arguments: a JSON object as text, in the model's own spelling if possible."""

    name: str
    arguments: str


Piece = Reasoning | Content | ToolCall
