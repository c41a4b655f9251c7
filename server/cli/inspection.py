"""The report on a model folder before it is served: the API process's findings, and those of the engine,
which a process of its own makes.

All findings come from the code that serves, so that an inspection tells what a start would find.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headway.engine import (
    EngineConfig,
    Inspection,
    ModelError,
    collected_warnings,
    read_model_spec,
)
from headway.server.engine.inspector import EngineInspector
from headway.server.formats import find_format
from headway.server.text.chat_template import load_chat_template
from headway.server.text.tokenizer import load_tokenizer


class ChatReport(msgspec.Struct, frozen=True, kw_only=True):
    """has_tool_template: conversations with tools have a template of their own. tool_format: one of the
    formats of --tool-format. thinking: the delimiters of reasoning. note: a remark for users on the
    model's chats."""

    has_template: bool
    has_tool_template: bool
    tool_format: str
    has_calls: bool
    thinking: tuple[str, str] | None
    note: str | None


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """problems: the reasons why `headway serve` with the same options would not start, in the order in
    which it would meet them. chat: None for a model whose tokenizer's files cannot be read."""

    name: str
    folder: str
    is_servable: bool
    problems: list[str]
    warnings: list[str]
    chat: ChatReport | None
    model: Inspection


def inspect_folder(
    name: str,
    folder: Path,
    engine: EngineInspector,
    engine_config: EngineConfig,
    *,
    gpu_memory_bytes: int | None = None,
    template_file: Path | None = None,
    tool_format: str | None = None,
) -> ModelReport:
    """Raises ConfigError for a template or a format that does not exist, and EngineDeadError."""
    with collected_warnings() as warnings:
        problems, chat = _own_findings(folder, template_file, tool_format)
    config = msgspec.structs.replace(engine_config, model_path=str(folder))
    found = engine.ask(config, gpu_memory_bytes)
    problems += [] if found.problem is None else [found.problem]
    return ModelReport(
        name=name,
        folder=str(folder),
        is_servable=not problems,
        problems=list(dict.fromkeys(problems)),
        warnings=[*warnings, *found.warnings],
        chat=chat,
        model=found,
    )


def _own_findings(
    folder: Path, template_file: Path | None, tool_format: str | None
) -> tuple[list[str], ChatReport | None]:
    """Returns the problems of the API process, found by the steps of `serve` in their order, and the chat."""
    problems: list[str] = []
    chat = vocab_size = None

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except ModelError as error:
            problems.append(str(error))

    with noted():
        vocab_size = read_model_spec(folder).vocab_size
    with noted():
        load_tokenizer(folder, vocab_size, template_file)
    with noted():
        template = load_chat_template(folder, template_file)
        form = find_format("" if template is None else template.text, name=tool_format)
        chat = ChatReport(
            has_template=template is not None,
            has_tool_template=template is not None and template.tool_source is not None,
            tool_format=form.name,
            has_calls=form.has_calls,
            thinking=form.thinking[0] if form.thinking else None,
            note=None if template is None else template.note,
        )
    return problems, chat
