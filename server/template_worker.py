"""The process that renders chat templates: `python -P -m headway.server.template_worker`.

A template is a program out of the model's files. It runs here, sandboxed by transformers' renderer, where it
can be killed and has little memory, and where the renderer's libraries do not weigh on the API process.
It leaves when stdin ends.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

from headway.server.template_frames import LENGTH, Rendered, RenderJob, frame

MEMORY_BYTES = 2**30  # beyond what the libraries take


def main(source: BinaryIO, sink: BinaryIO) -> None:
    _limit_memory()
    while head := source.read(LENGTH.size):
        (length,) = LENGTH.unpack(head)
        job = msgspec.json.decode(source.read(length), type=RenderJob)
        sink.write(frame(render(job)))
        sink.flush()


def render(job: RenderJob) -> Rendered:
    variables: dict[str, Any] = dict(job.variables)
    try:
        # Its annotation says str; it is a pair of lists, of which the first holds a text for each conversation.
        texts = render_jinja_template(
            conversations=[job.messages], chat_template=job.template, add_generation_prompt=True, **variables
        )
        return Rendered(text=texts[0][0])
    except Exception as error:  # noqa: BLE001 - whatever a template's code can raise
        return Rendered(error=f"{type(error).__name__}: {error}"[:2000])


def _limit_memory() -> None:
    """Linux only: elsewhere the address space in use is not known."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        in_use_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
