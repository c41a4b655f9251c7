"""The events of a streamed answer of /v1/responses, under OpenAI's names."""

from __future__ import annotations

import msgspec

from headway.server.protocol.chat import TokenLogprob
from headway.server.protocol.responses_objects import (
    Item,
    OutputText,
    ReasoningText,
    ResponseObject,
    SummaryText,
)


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """sequence_number: counts from 0; set when the event is sent."""

    sequence_number: int = 0

    @property
    def event_name(self) -> str:
        name = self.__struct_config__.tag
        assert isinstance(name, str), self
        return name


class ItemEvent(Event, kw_only=True):
    output_index: int


class PartEvent(ItemEvent, kw_only=True):
    item_id: str
    content_index: int = 0


class Created(Event, tag="response.created"):
    response: ResponseObject


class InProgress(Event, tag="response.in_progress"):
    response: ResponseObject


class Completed(Event, tag="response.completed"):
    response: ResponseObject


class Incomplete(Event, tag="response.incomplete"):
    response: ResponseObject


class Failed(Event, tag="response.failed"):
    response: ResponseObject


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    item: Item


class ItemDone(ItemEvent, tag="response.output_item.done"):
    item: Item


class PartAdded(PartEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(PartEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(PartEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(PartEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(PartEvent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(PartEvent, tag="response.reasoning_text.done"):
    text: str


class SummaryEvent(ItemEvent, kw_only=True):
    item_id: str
    summary_index: int = 0


class SummaryAdded(SummaryEvent, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryDelta(SummaryEvent, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryTextDone(SummaryEvent, tag="response.reasoning_summary_text.done"):
    text: str


class SummaryDone(SummaryEvent, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    item_id: str
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    item_id: str
    name: str
    arguments: str


class CustomInputDelta(ItemEvent, tag="response.custom_tool_call_input.delta"):
    item_id: str
    delta: str


class CustomInputDone(ItemEvent, tag="response.custom_tool_call_input.done"):
    item_id: str
    input: str
