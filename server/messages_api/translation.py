"""Translates requests of Anthropic's Messages API to chats, and errors back. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.server.base.errors import ApiError
from headway.server.base.field_names import FieldNames
from headway.server.messages_api.turns import Turn, turns_of
from headway.server.protocol.chat import ChatRequest
from headway.server.protocol.checks import check_range, missing, require
from headway.server.protocol.messages_api import (
    CHOICES,
    DISPLAYS,
    EDITS,
    EFFORTS,
    THINKING,
    MessagesFormat,
    MessagesRequest,
    MessagesThinking,
    MessagesTool,
    PromptFields,
)
from headway.server.protocol.parameters import MAX_INTEGER
from headway.server.protocol.structured import JsonSchemaFormat, ResponseFormat
from headway.server.protocol.tools import FunctionDefinition, NamedChoice, NamedFunction, Tool, ToolChoice
from headway.server.protocol.unserved import PAGE
from headway.server.text.reasoning_effort import effort_variables

# Fields of a chat that have other names in the Messages API, for errors.
NAMES = {
    "max_completion_tokens": "max_tokens", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort", "stop": "stop_sequences", "thinking_budget_tokens": "thinking.budget_tokens",
    "tool_choice.function": "tool_choice",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ThinkingModel:
    """The properties of the model that decide about a request's wishes for thinking. template: the source
    of the chat template. is_bounded: a single token closes the model's reasoning, so that a token budget
    can be enforced. thinks: the model reasons."""

    template: str = ""
    is_bounded: bool = False
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class Translation:
    """turns: the origin of each message of the chat. format_path: the field with the form of the text.
    ignored: paths of fields without effect, and of blocks that the model is not shown."""

    chat: ChatRequest
    turns: Sequence[Turn]
    format_path: str = "output_config.format"
    ignored: Sequence[str] = ()

    def names(self) -> FieldNames:
        """Returns the request's names of the chat's fields."""
        names = FieldNames(NAMES)
        for path in ("response_format", "response_format.json_schema"):
            names.add(path, self.format_path)
        for i, turn in enumerate(self.turns):
            for path, own in turn.names():
                names.add(f"messages[{i}]{path}", own)
        for i in range(len(self.chat.tools or ())):
            names.add(f"tools[{i}].function", f"tools[{i}]")
            names.add(f"tools[{i}].function.parameters", f"tools[{i}].input_schema")
        return names

    def told(self, error: ApiError) -> ApiError:
        """Returns the error with the field names of the Messages API."""
        told = self.names().renamed(error)
        if told.code != "context_length_exceeded":
            return told
        # Clients recognise by these words that they must shorten the prompt.
        message = f"prompt is too long: {told}"
        return ApiError(message, status=told.status, param=told.param, code=told.code, headers=told.headers)


def translate(body: PromptFields, model: ThinkingModel | None = None) -> Translation:
    """Raises ApiError with the names of the Messages API."""
    if body.thread is not None:
        message = "thread is not served: this server keeps no conversations; send the whole conversation"
        raise ApiError(message, param="thread", code="thread_unsupported_request")
    _check_edits(body)
    turns = turns_of(body)
    thinking = _Thinking.of(body, model or ThinkingModel())
    form, format_path = _form(body)
    chat = ChatRequest(
        model=body.model,
        messages=[turn.message() for turn in turns],
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=False
        if body.tool_choice and body.tool_choice.disable_parallel_tool_use
        else None,
        reasoning_effort=thinking.effort,
        thinking_budget_tokens=thinking.budget_tokens,
        response_format=form,
        continue_final_message=_continues(turns),
    )
    if isinstance(body, MessagesRequest):
        chat.max_tokens, chat.stream, chat.stop = body.max_tokens, body.stream, body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    hidden = [path for turn in turns for path in turn.hidden]
    return Translation(chat, turns, format_path, [*thinking.ignored, *hidden])


def _check_edits(body: PromptFields) -> None:
    edits = (body.context_management.edits if body.context_management else None) or ()
    for i, edit in enumerate(edits):
        if edit.type not in EDITS:
            path = f"context_management.edits[{i}].type"
            message = f"{path} is {edit.type!r}, which is not served; this server leaves every turn as it is: shorten the messages yourself"
            raise ApiError(message, param=path, code="unsupported_parameter")


def _continues(turns: Sequence[Turn]) -> bool | None:
    """Returns whether the answer continues the last message, which is then the assistant's."""
    if not turns or turns[-1].role != "assistant":
        return None
    if turns[-1].calls:
        path = turns[-1].calls[-1].path
        message = f"{path} is a tool_use without its tool_result; send a message of the user with the result after it"
        raise ApiError(message, param=path, code="invalid_value")
    return True


def _tool(tool: MessagesTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        message = (
            f"{where}.type is {tool.type!r}, it must be 'custom' or left out: this server runs no tools itself; describe the tool "
            f"by its name and input_schema, and run it yourself. See {PAGE}"
        )
        raise ApiError(message, param=f"{where}.type", code="unsupported_parameter")
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise missing(f"{where}.{name}")
    assert tool.name is not None
    return Tool("function", FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict))


def _tool_choice(body: PromptFields) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    kinds = ", ".join(map(repr, (*CHOICES, "tool")))
    require(
        choice.type in CHOICES or choice.type == "tool",
        "tool_choice.type",
        repr(choice.type),
        f"one of {kinds}",
    )
    has_tools = bool(body.tools) or choice.type in ("auto", "none")
    require(has_tools, "tool_choice.type", repr(choice.type), "'auto' or 'none' where there are no tools")
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise missing("tool_choice.name")
    return NamedChoice("function", NamedFunction(choice.name))


def _form(body: PromptFields) -> tuple[ResponseFormat | None, str]:
    """Returns (the form of the text, the path of its field)."""
    forms: Mapping[str, MessagesFormat | None] = {
        "output_config.format": body.output_config.format if body.output_config else None,
        "output_format": body.output_format,
    }
    given = [(path, form) for path, form in forms.items() if form is not None]
    if not given:
        return None, "output_config.format"
    require(len(given) == 1, "output_format", "given", "left out beside output_config.format")
    ((path, form),) = given
    require(form.type == "json_schema", f"{path}.type", repr(form.type), "'json_schema'")
    if form.schema is None:
        raise missing(f"{path}.schema")
    return ResponseFormat("json_schema", JsonSchemaFormat(schema=dict(form.schema))), path


@dataclass(frozen=True, slots=True)
class _Thinking:
    """The wishes for thinking as far as the model can follow them. Others are ignored: thinking changes no
    form of a text, and clients send their wishes to every model."""

    effort: str | None = None
    budget_tokens: int | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: PromptFields, model: ThinkingModel) -> _Thinking:
        effort = body.output_config.effort if body.output_config else None
        require(
            effort is None or effort in EFFORTS,
            "output_config.effort",
            repr(effort),
            f"one of {', '.join(EFFORTS)}",
        )
        wanted = body.thinking
        if wanted is not None:
            _check_thinking(wanted)
        ignored = ["output_config.effort"] if effort and not effort_variables(effort, model.template) else []
        if wanted is not None and wanted.type == "disabled":
            return cls("none", ignored=tuple(ignored))
        if wanted is not None and not model.thinks:
            ignored.append("thinking")
        elif wanted is not None and wanted.budget_tokens is not None and not model.is_bounded:
            ignored.append("thinking.budget_tokens")
        is_told = effort is not None and bool(effort_variables(effort, model.template))
        if not is_told and wanted is not None:
            # A template that can only turn thinking on and off turns it on.
            variables = effort_variables("high", model.template)
            effort, is_told = "high", bool(variables) and "reasoning_effort" not in variables
        return cls(
            effort if is_told else None,
            wanted.budget_tokens if wanted is not None and model.is_bounded else None,
            tuple(ignored),
        )


def _check_thinking(wanted: MessagesThinking) -> None:
    require(wanted.type in THINKING, "thinking.type", repr(wanted.type), f"one of {', '.join(THINKING)}")
    check_range("thinking.budget_tokens", wanted.budget_tokens, 1, MAX_INTEGER)
    is_known = wanted.display is None or wanted.display in DISPLAYS
    require(is_known, "thinking.display", repr(wanted.display), f"one of {', '.join(DISPLAYS)}")
