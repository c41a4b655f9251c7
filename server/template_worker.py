"""The process that renders chat templates: `python -P -m headway.server.template_worker`.

A template is a program out of the model's files. It runs here, sandboxed by transformers' renderer, where it
can be killed and has little memory, and where the renderer's libraries do not weigh on the API process.
It leaves when stdin ends.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

from headway.server.control_text import ChatPrompt
from headway.server.template_frames import LENGTH, MarkedMessages, Rendered, RenderJob, frame

MEMORY_BYTES = 2**30  # beyond what the libraries take
MAX_COMPARISONS = 2  # a template that writes the time may differ once for that reason alone
MAX_SUSPECTS = 16  # messages that are rendered with marks of their own, to name the one at fault


def main(source: BinaryIO, sink: BinaryIO) -> None:
    _limit_memory()
    while head := source.read(LENGTH.size):
        (length,) = LENGTH.unpack(head)
        job = msgspec.json.decode(source.read(length), type=RenderJob)
        sink.write(frame(render(job)))
        sink.flush()


def render(job: RenderJob) -> Rendered:
    try:
        if job.marked is None:
            return Rendered(text=_text(job, job.messages))
        return _with_origins(job, job.marked)
    except Exception as error:  # noqa: BLE001 - whatever a template's code can raise
        return Rendered(error=f"{type(error).__name__}: {error}"[:2000])


def _with_origins(job: RenderJob, marked: MarkedMessages) -> Rendered:
    """The marks tell the origin of the text's pieces only where they change nothing else."""
    for _ in range(MAX_COMPARISONS):
        text = _text(job, job.messages)
        # Parts of tokens are ordinary text: a template that inspects those is no reason to refuse a message.
        for messages in filter(None, (marked.with_parts, marked.messages)):
            marked_text = _marked_text(job, messages)
            if marked_text is not None and _without_marks(marked_text, marked) == text:
                return Rendered(text=marked_text)
        # A template that looks for a token, as one that splits an answer at </think>, still finds it after a mark.
        marked_text = _marked_text(job, _beside_tokens(marked))
        if marked_text is not None:
            marked_text = _in_place_of_tokens(marked_text, marked)
            if _without_marks(marked_text, marked) == text:
                return Rendered(text=marked_text)
    pairs = enumerate(zip(job.messages, marked.messages, strict=True))
    suspects = [i for i, (message, replaced) in pairs if message != replaced]
    for i in suspects[:MAX_SUSPECTS]:
        alone = [*job.messages[:i], marked.messages[i], *job.messages[i + 1 :]]
        marked_text = _marked_text(job, alone)
        if marked_text is None or _without_marks(marked_text, marked) != text:
            return Rendered(inspected=i)
    if not suspects:
        return Rendered(text=text)
    return Rendered(inspected=suspects[0])


def _beside_tokens(marked: MarkedMessages) -> list[dict[str, str]]:
    """The messages with a mark before each structural token instead of in its place."""
    mark = re.compile(re.escape(marked.mark) + r"(\d+)~")

    def kept(match: re.Match[str]) -> str:
        return match[0] + marked.spelled[int(match[1])]

    return [{name: mark.sub(kept, text) for name, text in message.items()} for message in marked.messages]


def _in_place_of_tokens(text: str, marked: MarkedMessages) -> str:
    """A text in which marks stand before tokens with marks in their place; marks whose token the template took are
    dropped."""
    first, *rest = re.split(re.escape(marked.mark) + r"(\d+)~", text)
    pieces = [first]
    for number, piece in zip(rest[::2], rest[1::2], strict=True):
        token = marked.spelled[int(number)]
        if piece.startswith(token):
            pieces += [f"{marked.mark}{number}~", piece[len(token) :]]
        else:
            pieces.append(piece)
    return "".join(pieces)


def _marked_text(job: RenderJob, messages: list[dict[str, str]]) -> str | None:
    """None if the template fails over messages with marks."""
    try:
        return _text(job, messages)
    except Exception:  # noqa: BLE001 - whatever a template's code can raise
        return None


def _without_marks(text: str, marked: MarkedMessages) -> str:
    return ChatPrompt(text, marked.mark, marked.spelled).spelled_out()


def _text(job: RenderJob, messages: list[dict[str, str]]) -> str:
    variables: dict[str, Any] = dict(job.variables)
    # Its annotation says str; it is a pair of lists, of which the first holds a text for each conversation.
    texts = render_jinja_template(
        conversations=[messages], chat_template=job.template, add_generation_prompt=True, **variables
    )
    return str(texts[0][0])


def _limit_memory() -> None:
    """Linux only: elsewhere the address space in use is not known."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        in_use_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
