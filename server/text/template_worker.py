"""The process that renders chat templates: `python -P -m headway.server.text.template_worker`.

A template is a program in the model's files. It runs here, in the sandbox of transformers' renderer, where it
can be killed and has little memory, and where the renderer's libraries do not burden the API process.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

from headway.server.base import worker_process
from headway.server.base.conversation import Conversation
from headway.server.text.control_text import ChatPrompt, json_form
from headway.server.text.template_frames import MarkedConversation, Rendered, RenderJob

MAX_RENDERED_BYTES = 32 * 2**20
MAX_COMPARISONS = 2  # two renderings of a template that writes the time may differ
# The most messages, tools and other entries that are marked one by one to find the one at fault.
MAX_SUSPECTS = 16


def answer(payload: bytes) -> bytes:
    rendered = msgspec.json.encode(render(msgspec.json.decode(payload, type=RenderJob)))
    if len(rendered) <= MAX_RENDERED_BYTES:
        return rendered
    reason = f"makes a prompt of {len(rendered)} bytes, the limit is {MAX_RENDERED_BYTES}; send less"
    return msgspec.json.encode(Rendered(error=reason))


def render(job: RenderJob) -> Rendered:
    try:
        if job.marked is None:
            return Rendered(text=_text(job, job.conversation))
        return _with_origins(job, job.marked)
    except Exception as error:  # noqa: BLE001 - whatever a template's code can raise
        # transformers' error about a final message that is not found shows the whole chat after the reason.
        reason = str(error).partition("Final message to continue:")[0]
        return Rendered(error=f"{type(error).__name__}: {reason}"[:2000])


def _with_origins(job: RenderJob, marked: MarkedConversation) -> Rendered:
    """Returns a rendering in which marks tell the origin of the text's pieces, provided that they change
    nothing else."""
    for _ in range(MAX_COMPARISONS):
        text = _text(job, job.conversation)
        # Parts of tokens are ordinary text: no message is refused because a template inspects them.
        for conversation in filter(None, (marked.with_parts, marked.by_tokens)):
            marked_text = _marked_text(job, conversation)
            if marked_text is not None and _without_marks(marked_text, marked) == text:
                return Rendered(text=marked_text)
        # A template that searches for a token, such as one that splits an answer at </think>, still finds it
        # after a mark.
        marked_text = _marked_text(job, _beside_tokens(marked))
        if marked_text is not None:
            marked_text = _in_place_of_tokens(marked_text, marked)
            if _without_marks(marked_text, marked) == text:
                return Rendered(text=marked_text)
    pairs = zip(job.conversation.entries(), marked.by_tokens.entries(), strict=True)
    suspects = [(part, key) for (part, key, entry), (_, _, replaced) in pairs if entry != replaced]
    for part, key in suspects[:MAX_SUSPECTS]:
        marked_text = _marked_text(job, job.conversation.with_entry(part, key, marked.by_tokens))
        if marked_text is None or _without_marks(marked_text, marked) != text:
            return Rendered(inspected=(part, key))
    if not suspects:
        return Rendered(text=text)
    return Rendered(inspected=suspects[0])


def _beside_tokens(marked: MarkedConversation) -> Conversation:
    """Returns the conversation with a mark before each structural token instead of in its place."""
    mark = re.compile(re.escape(marked.mark) + r"(\d+)~")

    def kept(match: re.Match[str]) -> str:
        return match[0] + marked.spelled[int(match[1])]

    return marked.by_tokens.with_strings(lambda text: mark.sub(kept, text))


def _in_place_of_tokens(text: str, marked: MarkedConversation) -> str:
    """Returns the text with marks that precede tokens replacing these tokens. Marks whose token the
    template removed are dropped."""
    first, *rest = re.split(re.escape(marked.mark) + r"(\d+)~", text)
    numbers = {spelled: number for number, spelled in enumerate(marked.spelled)}
    pieces = [first]
    for number, piece in zip(rest[::2], rest[1::2], strict=True):
        token = marked.spelled[int(number)]
        written = next((form for form in (token, json_form(token)) if piece.startswith(form)), None)
        if written is None:
            pieces.append(piece)
        else:
            pieces += [f"{marked.mark}{numbers[written]}~", piece[len(written) :]]
    return "".join(pieces)


def _marked_text(job: RenderJob, conversation: Conversation) -> str | None:
    """Returns None if the template fails for a conversation with marks."""
    try:
        return _text(job, conversation)
    except Exception:  # noqa: BLE001 - whatever a template's code can raise
        return None


def _without_marks(text: str, marked: MarkedConversation) -> str:
    return ChatPrompt(text, marked.mark, marked.spelled).spelled_out()


def _text(job: RenderJob, conversation: Conversation) -> str:
    """Renders like transformers' apply_chat_template: null fields of a message are left out."""
    variables: dict[str, Any] = conversation.template_variables | job.variables
    messages = [
        {name: value for name, value in message.items() if value is not None}
        for message in conversation.messages
    ]
    # It is annotated as str, but returns a pair of lists, of which the first has a text for each
    # conversation.
    texts = render_jinja_template(
        conversations=[messages],
        tools=None if conversation.tools is None else [*conversation.tools],
        documents=conversation.documents,
        chat_template=job.template,
        add_generation_prompt=conversation.adds_generation_prompt,
        continue_final_message=conversation.continues_final_message,
        **variables,
    )
    return str(texts[0][0])


if __name__ == "__main__":
    worker_process.main(lambda _: answer)
