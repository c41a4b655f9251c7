"""The messages between the API process and the process that renders chat templates, as JSON."""

from __future__ import annotations

import msgspec

from headway.server.base.conversation import Conversation


class MarkedConversation(msgspec.Struct, frozen=True):
    """A conversation in which marks replace texts: `mark` + i + `~` replaces spelled[i].

    by_tokens: only structural tokens are replaced. with_parts: also parts of them, at the ends of texts; None
    if there are no such parts.
    """

    by_tokens: Conversation
    with_parts: Conversation | None
    mark: str
    spelled: tuple[str, ...]


class RenderJob(msgspec.Struct):
    """variables: the template's variables besides the conversation, such as bos_token. marked: rendered as
    well."""

    template: str
    variables: dict[str, str]
    conversation: Conversation
    marked: MarkedConversation | None = None


class Rendered(msgspec.Struct):
    """The result; exactly one field is set. text: that of the marked conversation if there is one; without
    marks it equals the text of the conversation. error: why the template failed. inspected: (field, its
    index or name) of an entry whose marks change more than the marked texts, because the template inspects
    the texts that they replace."""

    text: str | None = None
    error: str | None = None
    inspected: tuple[str, int | str] | None = None
