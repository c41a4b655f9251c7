"""Log-probabilities as OpenAI writes them: flat lists for completions, one object a token for chats."""

from __future__ import annotations

from collections.abc import Sequence

from headway.engine import TokenLogprobs
from headway.server.formats import Content, Reasoning
from headway.server.generation.choice import Delta, TokenInfo
from headway.server.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from headway.server.protocol.completions import CompletionLogprobs
from headway.server.text.detokenizer import Detokenizer, Vocabulary
from headway.server.text.prompt import EncodedPrompt
from headway.server.text.tokenizer import Tokenizer


def completion_logprobs(
    tokens: Sequence[TokenInfo], vocabulary: Vocabulary, *, offset: int = 0
) -> CompletionLogprobs:
    """offset: the number of characters of the choice's text before the text of these tokens."""
    return CompletionLogprobs(
        tokens=[token_name(token.token_id, vocabulary) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_top(token, vocabulary) for token in tokens],
        text_offset=[token.start + offset for token in tokens],
    )


def token_name(token_id: int, vocabulary: Vocabulary) -> str:
    """Returns the token's text; for a part of a character `bytes:` and its bytes, as OpenAI writes it."""
    content = vocabulary.token_bytes(token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _top(token: TokenInfo, vocabulary: Vocabulary) -> dict[str, float] | None:
    """Returns the top tokens by name. The token itself is always among them, as in OpenAI's API. Of two
    tokens with one name the better one stays."""
    if token.logprob is None:
        return None
    named = {token_name(token.token_id, vocabulary): token.logprob}
    for token_id, logprob in token.top:
        named.setdefault(token_name(token_id, vocabulary), logprob)
    return dict(sorted(named.items(), key=lambda item: -item[1]))


def chat_logprobs(tokens: Sequence[TokenInfo], vocabulary: Vocabulary) -> ChoiceLogprobs:
    return ChoiceLogprobs([_chat_token(token, vocabulary) for token in tokens if token.logprob is not None])


def _chat_token(token: TokenInfo, vocabulary: Vocabulary) -> TokenLogprob:
    own = _top_logprob(token.token_id, token.logprob or 0.0, vocabulary)
    top = [_top_logprob(token_id, logprob, vocabulary) for token_id, logprob in token.top]
    return TokenLogprob(own.token, own.logprob, own.bytes, top)


def _top_logprob(token_id: int, logprob: float, vocabulary: Vocabulary) -> TopLogprob:
    content = vocabulary.token_bytes(token_id)
    return TopLogprob(content.decode(errors="replace"), logprob, list(content))


class PartLogprobs:
    """Finds the tokens of the parts of a text. Mutable: fed with deltas, then asked for their parts in
    order. A token belongs to the part in which it begins."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[TokenInfo] = []  # from the end of the last part on

    def add(self, delta: Delta) -> None:
        self._tokens += delta.tokens

    def of(self, part: Reasoning | Content) -> list[TokenLogprob]:
        """part: the next one."""
        begin, end = part.start, part.start + len(part.text)
        passed = [token for token in self._tokens if token.start < end]
        self._tokens = self._tokens[len(passed) :]
        return chat_logprobs([t for t in passed if t.start >= begin], self._vocabulary).content


def prompt_tokens(
    prompt: EncodedPrompt, logprobs: TokenLogprobs | None, tokenizer: Tokenizer
) -> list[TokenInfo]:
    """Returns the tokens of an echoed prompt. The first has no log-probability, since nothing precedes it."""
    starts = _starts(prompt, tokenizer)
    if logprobs is None:
        return [TokenInfo(i, start) for i, start in zip(prompt.token_ids, starts, strict=True)]
    first = TokenInfo(prompt.token_ids[0], starts[0])
    pairs = list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
    width = logprobs.num_top
    rest = [
        TokenInfo(token_id, start, logprob, tuple(pairs[i * width : (i + 1) * width]))
        for i, (token_id, start, logprob) in enumerate(
            zip(prompt.token_ids[1:], starts[1:], logprobs.logprobs, strict=True)
        )
    ]
    return [first, *rest]


def _starts(prompt: EncodedPrompt, tokenizer: Tokenizer) -> list[int]:
    """Returns where each token's text begins in the echo: in the client's text, or in the decoded ids."""
    if prompt.starts:
        return prompt.starts
    detokenizer = Detokenizer(tokenizer.vocabulary)
    starts = []
    for token_id in prompt.token_ids:
        before = detokenizer.num_characters
        detokenizer.push([token_id])
        starts.append(detokenizer.start_of(token_id, before))
    return starts
