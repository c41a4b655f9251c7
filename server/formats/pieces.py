"""What a model's output is made of once its format is parsed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the model's reasoning, without its delimiters."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call. arguments: a JSON object as text, as far as possible in the model's own spelling."""

    name: str
    arguments: str


Piece = Reasoning | Content | ToolCall
