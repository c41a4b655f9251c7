"""Writes the parts of an answer as items of /v1/responses, and the events of a stream that builds them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace

from headway.server.formats import Content, Reasoning
from headway.server.generation.choice import Delta
from headway.server.generation.choice_output import NumberedCall, Part
from headway.server.generation.logprobs import PartLogprobs
from headway.server.protocol.chat import TokenLogprob
from headway.server.protocol.responses_events import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    SummaryAdded,
    SummaryDelta,
    SummaryDone,
    SummaryTextDone,
    TextDelta,
    TextDone,
)
from headway.server.protocol.responses_objects import (
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SearchCallItem,
    SummaryText,
)
from headway.server.responses_api.carried_reasoning import carried
from headway.server.responses_api.tools import ResponseTools

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


@dataclass(frozen=True, slots=True)
class ReasoningForms:
    """The forms of the reasoning in the answer. is_told: it is shown at all. is_carried: also in the form
    that clients send back. is_summarized: also as a summary."""

    is_told: bool = True
    is_carried: bool = False
    is_summarized: bool = False


@dataclass(slots=True)
class OpenText:
    """A message or a reasoning item that is being written. Mutable: its writer appends to it."""

    item_id: str
    is_reasoning: bool
    forms: ReasoningForms
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def part(self) -> OutputText | ReasoningText:
        text = "".join(self.texts)
        return ReasoningText(text) if self.is_reasoning else OutputText(text, [*self.logprobs])

    def item(self, status: str) -> Item:
        """Returns the item with the text so far; without a part while it is in progress."""
        part = self.part
        if isinstance(part, ReasoningText):
            if status == IN_PROGRESS:
                return ReasoningItem(self.item_id, status, [])
            text = carried(part.text) if self.forms.is_carried else None
            summary = [SummaryText(part.text)] if self.forms.is_summarized else []
            return ReasoningItem(self.item_id, status, [part], summary, text)
        return MessageItem(self.item_id, status, [] if status == IN_PROGRESS else [part])


class OutputItems:
    """Mutable: receives the deltas of the one choice in order."""

    def __init__(
        self, forms: ReasoningForms, tools: ResponseTools, logprobs: PartLogprobs | None, draws: Random
    ) -> None:
        """logprobs: finds the tokens of the messages' texts; None if none are requested. draws: the
        generator of the items' ids."""
        self._draws = draws
        self.done: list[Item] = []
        self._open: OpenText | None = None
        self._forms, self._tools = forms, tools
        self._logprobs = logprobs
        self._num_characters = 0  # characters of texts that are not split into parts

    def take(self, delta: Delta) -> Iterator[Event]:
        if self._logprobs is not None:
            self._logprobs.add(delta)
        for part in self._parts(delta):
            if isinstance(part, NumberedCall):
                yield from self._close(COMPLETED)
                yield from self._call(part)
            elif part.text:
                yield from self._write(part)

    def end(self, status: str) -> Iterator[Event]:
        """status: that of the open item. A complete answer gets a message or a call, by which clients end
        their loops."""
        yield from self._close(status)
        has_answer = any(not isinstance(item, ReasoningItem) for item in self.done)
        if not has_answer and (status == COMPLETED or not self.done):
            yield from self._begin(is_reasoning=False)
            yield from self._close(status)

    def _parts(self, delta: Delta) -> Sequence[Part]:
        if delta.parts is not None:
            return delta.parts
        start, self._num_characters = self._num_characters, self._num_characters + len(delta.text)
        return (Content(delta.text, start),)

    def _write(self, part: Reasoning | Content) -> Iterator[Event]:
        is_reasoning = isinstance(part, Reasoning)
        logprobs = [] if self._logprobs is None else self._logprobs.of(part)
        if is_reasoning and not self._forms.is_told:
            return
        if self._open is None or self._open.is_reasoning != is_reasoning:
            yield from self._close(COMPLETED)
            yield from self._begin(is_reasoning=is_reasoning)
        assert self._open is not None
        place: dict[str, Any] = {"output_index": len(self.done), "item_id": self._open.item_id}
        self._open.texts.append(part.text)
        if is_reasoning:
            yield ReasoningDelta(**place, delta=part.text)
            if self._forms.is_summarized:
                yield SummaryDelta(**place, delta=part.text)
        else:
            self._open.logprobs += logprobs
            yield TextDelta(**place, delta=part.text, logprobs=logprobs)

    def _begin(self, *, is_reasoning: bool) -> Iterator[Event]:
        opened = OpenText(self._new_id("rs" if is_reasoning else "msg"), is_reasoning, self._forms)
        self._open, index = opened, len(self.done)
        yield ItemAdded(output_index=index, item=opened.item(IN_PROGRESS))
        yield PartAdded(output_index=index, item_id=opened.item_id, part=opened.part)
        if is_reasoning and self._forms.is_summarized:
            yield SummaryAdded(output_index=index, item_id=opened.item_id, part=SummaryText(""))

    def _close(self, status: str) -> Iterator[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return
        place: dict[str, Any] = {"output_index": len(self.done), "item_id": opened.item_id}
        part = opened.part
        if isinstance(part, ReasoningText):
            yield ReasoningDone(**place, text=part.text)
        else:
            yield TextDone(**place, text=part.text, logprobs=part.logprobs)
        yield PartDone(**place, part=part)
        if opened.is_reasoning and self._forms.is_summarized:
            yield SummaryTextDone(**place, text=part.text)
            yield SummaryDone(**place, part=SummaryText(part.text))
        yield from self._finished(opened.item(status))

    def _call(self, call: NumberedCall) -> Iterator[Event]:
        """Writes a call. Its arguments are one delta, since calls are complete."""
        item = self._tools.item(call, self._new_id("fc"), COMPLETED)
        yield ItemAdded(output_index=len(self.done), item=_begun(item))
        place: dict[str, Any] = {"output_index": len(self.done), "item_id": item.id}
        if isinstance(item, CustomCallItem):
            yield CustomInputDelta(**place, delta=item.input)
            yield CustomInputDone(**place, input=item.input)
        elif isinstance(item, FunctionCallItem):
            yield ArgumentsDelta(**place, delta=item.arguments)
            yield ArgumentsDone(**place, name=item.name, arguments=item.arguments)
        yield from self._finished(item)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._draws.randbytes(12).hex()}"

    def _finished(self, item: Item) -> Iterator[Event]:
        yield ItemDone(output_index=len(self.done), item=item)
        self.done.append(item)


def _begun(item: CallItem) -> CallItem:
    """Returns the call before any of its arguments."""
    if isinstance(item, CustomCallItem):
        return replace(item, status=IN_PROGRESS, input="")
    if isinstance(item, SearchCallItem):
        return replace(item, status=IN_PROGRESS)
    return replace(item, status=IN_PROGRESS, arguments="")
