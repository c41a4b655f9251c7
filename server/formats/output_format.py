"""One format of output: how a model delimits its reasoning and writes its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway.server.formats.calls import CallForm
from headway.server.formats.harmony import HarmonyParser
from headway.server.formats.parser import StreamParser
from headway.server.formats.pieces import Piece


class OutputParser(Protocol):
    """Any cut of an output gives the same pieces, once those of a kind that follow each other are joined."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


@dataclass(frozen=True)
class OutputFormat:
    """The data of one family.

    thinking: the pairs of delimiters of reasoning, the usual one first. calls_end_thinking: a call that ends reasoning which was not
    closed is a call. is_harmony: messages with headers instead, whose tool grammar covers the reasoning before a call, too.
    """

    name: str
    calls: CallForm | None = None
    thinking: Sequence[tuple[str, str]] = ()
    calls_end_thinking: bool = False
    is_harmony: bool = False

    @property
    def thinking_start(self) -> str | None:
        return self.thinking[0][0] if self.thinking else None

    @property
    def thinking_end(self) -> str | None:
        return self.thinking[0][1] if self.thinking else None

    def parser(self, prompt: str, tools: Sequence[dict[str, Any]] | None) -> OutputParser:
        """Returns a parser of one output. prompt: its end tells whether reasoning is open. tools: those of the request, in OpenAI's
        form; without any, no text is a call."""
        if self.is_harmony:
            return HarmonyParser(prompt, tools)
        end = prompt.rstrip()
        opened = next((start for start, _ in self.thinking if end.endswith(start)), None)
        return StreamParser(
            self.calls, self.thinking, tools, open_thinking=opened, calls_end_thinking=self.calls_end_thinking
        )
