"""What a model's output is made of once its format is parsed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the model's reasoning, without its delimiters. start: as Content has it."""

    text: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the answer's text. start: where it begins in the model's output, in characters."""

    text: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call. arguments: a JSON object as text, as far as possible in the model's own spelling."""

    name: str
    arguments: str


Piece = Reasoning | Content | ToolCall
