"""What the API process and the process that renders chat templates tell each other, as JSON."""

from __future__ import annotations

import msgspec

from headway.server.base.conversation import Conversation


class MarkedConversation(msgspec.Struct, frozen=True):
    """A conversation in which texts are replaced by marks: spelled[i] by `mark` + i + `~`.

    by_tokens: structural tokens are. with_parts: also parts of them, at the ends of texts; None if there are
    no such parts.
    """

    by_tokens: Conversation
    with_parts: Conversation | None
    mark: str
    spelled: tuple[str, ...]


class RenderJob(msgspec.Struct):
    """variables: what the template sees in addition to the conversation, such as bos_token. marked: to render
    as well."""

    template: str
    variables: dict[str, str]
    conversation: Conversation
    marked: MarkedConversation | None = None


class Rendered(msgspec.Struct):
    """Exactly one field is set. text: of the marked conversation if there is one, which without marks is that
    of the conversation. error: the reason why the template failed. inspected: (field, its index or name) of
    an entry whose marks change more than the marked texts, because the template looks at what they
    replace."""

    text: str | None = None
    error: str | None = None
    inspected: tuple[str, int | str] | None = None
