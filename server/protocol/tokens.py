"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from headway.server.protocol.chat import Message
from headway.server.protocol.tools import Tool
from headway.server.protocol.unserved import TOKENIZE, Table

CHAT_FIELDS = ("tools", "documents", "reasoning_effort", "chat_template_kwargs", "continue_final_message")


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Either a prompt or messages. add_special_tokens: as for a prompt of /v1/completions; true by default.

    return_token_strs: true by default; false leaves them out. The fields from tools on are those of a chat.
    """

    unserved: ClassVar[Table] = TOKENIZE

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    model: str | None = None


class Tokens(msgspec.Struct):
    """token_strs: the text of each token, written as in log-probabilities; null if not requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    skip_special_tokens: bool | None = None
    model: str | None = None


class Text(msgspec.Struct):
    prompt: str


class TokenizerDescription(msgspec.Struct):
    """The model's tokenizer_config.json with special tokens as strings; it has further fields."""

    tokenizer_class: str
