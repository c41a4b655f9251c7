"""POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec

from headway.server.protocol.chat import Message


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Either a prompt or messages. add_special_tokens: as for a prompt of /v1/completions; it is the default."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    model: str | None = None


class Tokens(msgspec.Struct):
    """token_strs: the text of each token, written as in log-probabilities."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str]


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    skip_special_tokens: bool | None = None
    model: str | None = None


class Text(msgspec.Struct):
    prompt: str
