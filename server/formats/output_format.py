"""One format of output: how a model delimits its reasoning and writes its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from headway.engine import RequestError
from headway.server.formats.calls import CallForm
from headway.server.formats.harmony import TOKENS as HARMONY_TOKENS
from headway.server.formats.harmony import HarmonyParser
from headway.server.formats.parser import StreamParser
from headway.server.formats.pieces import Piece
from headway.server.formats.tool_grammar import harmony_grammar, tool_grammar


class OutputParser(Protocol):
    """A parser of one output. Any split of an output gives the same pieces once neighbours of one kind are
    joined.

    is_in_content: the next text is content unless a delimiter comes. held_content: the text that is content
    if no delimiter comes.
    """

    @property
    def is_in_content(self) -> bool: ...
    @property
    def held_content(self) -> str: ...

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """is_cut: a limit ended the text, not the model."""
        ...


@dataclass(frozen=True)
class OutputFormat:
    """The data of one family.

    thinking: the pairs of delimiters of reasoning, the usual one first. calls_end_thinking: a call ends
    reasoning that was not closed. is_harmony: the output is messages with headers, and the tool grammar
    covers the reasoning before a call, too. call_id_length: the length of ids of letters and digits, if the
    family's templates accept no others.
    """

    name: str
    calls: CallForm | None = None
    thinking: Sequence[tuple[str, str]] = ()
    calls_end_thinking: bool = False
    is_harmony: bool = False
    call_id_length: int | None = None

    @property
    def thinking_start(self) -> str | None:
        return self.thinking[0][0] if self.thinking else None

    @property
    def thinking_end(self) -> str | None:
        return self.thinking[0][1] if self.thinking else None

    @property
    def has_calls(self) -> bool:
        """Returns whether the model has a format for calls of tools."""
        return self.calls is not None or self.is_harmony

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Returns the special tokens that a parser must see; all others may stay hidden."""
        if self.is_harmony:
            return HARMONY_TOKENS
        form = astuple(self.calls) if self.calls else ()
        texts = [
            one
            for field in (*form, *self.thinking)
            for one in (field if isinstance(field, tuple) else [field])
        ]
        return tuple(
            one.strip() for one in texts if isinstance(one, str) and one.startswith(("<", "[", "｜"))
        )

    def parser(self, prompt: str, tools: Sequence[dict[str, Any]] | None) -> OutputParser:
        """Returns a parser of one output. prompt: its end tells whether reasoning is open. tools: those of
        the request, in OpenAI's form; without any, no text is a call."""
        if self.is_harmony:
            return HarmonyParser(prompt, tools)
        end = prompt.rstrip()
        opened = next((start for start, _ in self.thinking if end.endswith(start)), None)
        return StreamParser(
            self.calls, self.thinking, tools, open_thinking=opened, calls_end_thinking=self.calls_end_thinking
        )

    def tool_grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        required: bool,
        parallel: bool,
        special_ids: Mapping[str, int],
    ) -> str:
        """Returns a grammar in llguidance's dialect of Lark for the text after the reasoning, and for harmony
        of the whole answer.

        required: only calls of these tools, with arguments by their schemas; otherwise text, which such calls
        may follow. parallel: one call or more; otherwise one. special_ids: the ids of the tokenizer's special
        tokens by their text, which no text of a grammar matches. Raises RequestError if the format has no
        calls, or cannot enforce a tool's parameters.
        """
        if self.is_harmony:
            return harmony_grammar(tools, required=required, special_ids=special_ids)
        if self.calls is None:
            raise RequestError(
                f"calls of tools cannot be enforced: the model's output format ({self.name}) has none; --tool-format names another",
                param="tools",
            )
        return tool_grammar(self.calls, tools, required=required, parallel=parallel, special_ids=special_ids)
