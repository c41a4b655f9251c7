"""The tokenizer of a model folder, together with the defaults from its files (model_defaults.py)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, normalizers

from headway.engine import (
    MAX_TOKENIZER_BYTES,
    ModelError,
    SamplingParams,
    TokenTable,
    check_readable,
    is_regular_file,
)
from headway.server.text.chat_template import ChatTemplate, load_chat_template
from headway.server.text.control_text import (
    ChatPrompt,
    TokenParts,
    control_pattern,
    is_structural,
    token_parts,
)
from headway.server.text.detokenizer import Vocabulary
from headway.server.text.encoding import EncodingPool
from headway.server.text.fim import NAMES, Fim, make_fim
from headway.server.text.model_defaults import (
    check_vocabulary,
    check_writes,
    read_model_defaults,
    read_tokenizer_config,
    token_content,
)
from headway.server.text.speller import Speller
from headway.server.text.text_cuts import TextCuts, find_cuts

JsonObject = dict[str, object]
MAX_NFC_SHRINKING = 3  # 9 bytes of Hangul letters become a syllable of 3, and no composition shrinks more
KEEPING_BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an encoded text. starts: the index of each token's first character in the whole text, if
    requested."""

    token_ids: list[int]
    starts: list[int]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Encodes text to ids. start_token_id: put before prompts if the model asks for it, or in place of an
    empty one.

    full_vocabulary: also shows special tokens. control_pattern: finds structural tokens in a text;
    control_parts: parts of them at its ends. max_token_bytes: the most bytes of a prompt that one token
    stands for; None if unbounded. prefix, suffix: ids that the model's files put around a prompt. cuts: None
    if a text must be encoded whole. fim: None for a model that cannot fill gaps.
    """

    vocabulary: Vocabulary
    full_vocabulary: Vocabulary
    speller: Speller
    max_token_bytes: int | None
    control_pattern: re.Pattern[str] | None
    control_parts: TokenParts
    start_token_id: int | None
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    cuts: TextCuts | None
    stop_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    fim: Fim | None = None
    pool: EncodingPool = field(default_factory=EncodingPool)
    showing: dict[frozenset[str], Vocabulary] = field(default_factory=dict)  # filled by vocabulary_showing

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a prompt. Blocks for about a second per megabyte, without holding the
        interpreter lock."""
        return [token_id for ids in self.encode_in_pieces(text) for token_id in ids]

    def encode_in_pieces(self, text: str) -> Iterator[list[int]]:
        """Yields the ids of a prompt piece by piece; joined they are those of `encode`."""
        last: list[int] = []
        is_first = True
        for piece in self.pieces(text):
            if is_first:
                yield list(self.prefix[: self.num_added_before(piece.token_ids)])
            is_first, last = False, piece.token_ids
            yield last
        if is_first:
            yield self.surrounded([])
        elif self.suffix and tuple(last[-len(self.suffix) :]) != self.suffix:
            yield list(self.suffix)

    def surrounded(self, token_ids: list[int], keep_last: int | None = None) -> list[int]:
        """Returns the ids with the model's special tokens around them, unless the text has them already.

        keep_last: the most ids; the special tokens are never cut off.
        """
        prefix, suffix = list(self.prefix), list(self.suffix)
        if prefix and token_ids[: len(prefix)] == prefix:
            token_ids = token_ids[len(prefix) :]
        if suffix and token_ids[-len(suffix) :] == suffix:
            token_ids = token_ids[: -len(suffix)]
        if keep_last is not None:
            room = max(0, keep_last - len(prefix) - len(suffix))
            token_ids = token_ids[max(0, len(token_ids) - room) :]
        ids = [*prefix, *token_ids, *suffix]
        if not ids and self.start_token_id is not None:
            return [self.start_token_id]
        return ids

    def num_added_before(self, token_ids: list[int]) -> int:
        """Returns the number of ids that `surrounded` puts before these."""
        prefix = list(self.prefix)
        if prefix and token_ids[: len(prefix)] != prefix:
            return len(prefix)
        return int(not token_ids and not prefix and not self.suffix and self.start_token_id is not None)

    def encode_plain(self, text: str) -> list[int]:
        """Returns the ids of a text, with nothing put around it. Blocks like `encode`."""
        return [token_id for piece in self.pieces(text) for token_id in piece.token_ids]

    def pieces(self, text: str, *, with_starts: bool = False) -> Iterator[Piece]:
        """Yields the ids of the text piece by piece, so that the caller may stop early."""
        if self.cuts is None:
            yield self._piece(text, 0, with_starts=with_starts)
            return
        for start, end in self.cuts.spans(text):
            yield self._piece(self.cuts.piece(text, start, end), start, with_starts=with_starts)

    def last_ids(self, text: str, count: int) -> list[int]:
        """Returns the last `count` ids of the text, or all of them. If cuts are known, only the end of the
        text is encoded."""
        if self.cuts is None:
            ids = self.encode_plain(text)
            return ids[max(0, len(ids) - count) :]
        found: list[list[int]] = []
        for start, end in self.cuts.spans_from_end(text):
            found.append(self._piece(self.cuts.piece(text, start, end), start, with_starts=False).token_ids)
            if sum(map(len, found)) >= count:
                break
        ids = [token_id for ids in reversed(found) for token_id in ids]
        return ids[max(0, len(ids) - count) :]

    def _piece(self, text: str, start: int, *, with_starts: bool) -> Piece:
        """Encodes by the library's calls for batches, which release the interpreter lock; its `encode`
        does not."""
        tokenizer = self.vocabulary.tokenizer
        if not with_starts:
            return Piece(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, [])
        encoding = tokenizer.encode_batch([text], add_special_tokens=False)[0]
        num_dropped = 0 if self.cuts is None else self.cuts.num_dropped(start)
        starts = [start + num_dropped + first for first, _ in encoding.offsets]
        if num_dropped and starts:
            starts[0] = start
        return Piece(encoding.ids, starts)

    def least_tokens(self, text: str) -> int:
        """Returns a lower bound on the number of tokens of the text, without encoding it."""
        return -(-len(text.encode()) // self.max_token_bytes) if self.max_token_bytes else 0

    def encode_chat(self, prompt: ChatPrompt, keep_last: int | None = None) -> list[int]:
        """Returns the ids of a rendered chat. Nothing is put around it: the template wrote everything that
        belongs there.

        keep_last: the most ids; the special tokens at the beginning are not cut off.
        """
        if prompt.spelled or self.speller.is_always_needed:
            ids = self.speller.encode(prompt.pieces())
        else:
            ids = (
                self.encode_plain(prompt.text) if keep_last is None else self.last_ids(prompt.text, keep_last)
            )
        if keep_last is None or len(ids) < keep_last:
            return ids
        begins = self.prefix and prompt.text.startswith(self.full_vocabulary.decode(self.prefix))
        prefix = list(self.prefix) if begins else []
        return [*prefix, *ids[len(ids) - keep_last + len(prefix) :]][:keep_last]

    def decode(self, token_ids: list[int]) -> str:
        return self.vocabulary.decode(token_ids)

    def vocabulary_showing(self, contents: Iterable[str]) -> Vocabulary:
        """Returns the vocabulary in which the special tokens with these contents are text; all requests
        share it."""
        key = frozenset(contents)
        if key not in self.showing:
            self.showing[key] = Vocabulary(self.vocabulary.tokenizer, shown=key)
        return self.showing[key]

    def token_id(self, content: str) -> int | None:
        """Returns the id of the token with this content; None if there is none."""
        return self.vocabulary.tokenizer.token_to_id(content)

    def token_table(self) -> TokenTable | None:
        """Returns the vocabulary for grammars, in some 0.7 s for 152,064 tokens. None if no token ends a
        text.

        A special token has the bytes of its name, by which a Lark grammar may require it.
        """
        if not self.stop_token_ids:
            return None
        vocabulary = self.full_vocabulary
        library = vocabulary.tokenizer
        num_ids = max([*library.get_vocab(with_added_tokens=True).values(), *self.stop_token_ids]) + 1
        added = library.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        return TokenTable(
            tokens=[vocabulary.token_bytes(token_id) for token_id in range(num_ids)],
            special_ids=sorted(special.union(self.stop_token_ids)),
            end_ids=list(self.stop_token_ids),
        )


def load_tokenizer(
    folder: Path, vocab_size: int | None = None, chat_template: Path | None = None
) -> Tokenizer:
    """vocab_size: the model's, against which ids are checked; None if unknown. chat_template: a file that
    replaces the folder's own template. Raises ModelError for missing or broken files, ConfigError for a
    missing template."""
    path = folder / "tokenizer.json"
    if not is_regular_file(path, max_bytes=MAX_TOKENIZER_BYTES):
        raise ModelError(
            f"{folder} has no tokenizer.json; save the model's fast tokenizer there "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
        )
    # The library's own threads do not speed up a single text, and their freed memory would not return to the
    # system.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    check_readable(path)
    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if vocab_size is not None:
        check_writes(path, tokenizer)
        check_vocabulary(path, tokenizer, vocab_size)
    defaults = read_model_defaults(folder, tokenizer, vocab_size)
    start, end = defaults.start_token_id, defaults.end_token_id
    prefix, suffix = _around(tokenizer, start, defaults.adds_start_token)
    tokenizer.post_processor = None  # it would shift offsets; `surrounded` replaces it
    structural = _structural_tokens(tokenizer, folder, load_chat_template(folder, chat_template))
    pattern = control_pattern(structural)
    speller = Speller(tokenizer, pattern)
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    return Tokenizer(
        vocabulary=Vocabulary(tokenizer),
        full_vocabulary=Vocabulary(tokenizer, shows_special=True),
        speller=speller,
        max_token_bytes=_max_token_bytes(tokenizer),
        control_pattern=pattern,
        control_parts=token_parts(structural),
        start_token_id=start if start is not None else end,
        prefix=prefix,
        suffix=suffix,
        cuts=find_cuts(_state(tokenizer), tokenizer.get_vocab(with_added_tokens=False)),
        stop_token_ids=defaults.stop_token_ids,
        default_sampling=defaults.sampling,
        fim=make_fim(added, speller, Speller(tokenizer, pattern, begins_text=False)),
    )


def _around(
    tokenizer: HFTokenizer, start: int | None, adds_start: object
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (prefix, suffix): by add_bos_token if it is given, else by the post-processor."""
    if isinstance(adds_start, bool) and start is not None:
        return ((start,) if adds_start else ()), ()
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), len(full))
    return tuple(full[:at]), tuple(full[at + len(plain) :])


def _state(tokenizer: HFTokenizer) -> JsonObject:
    """Returns a tokenizer's tokenizer.json without its vocabulary, which may be large."""
    model = tokenizer.model
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    normalizer, pre_tokenizer = (None if part is None else json.loads(part.__getstate__()) for part in parts)
    is_bpe = isinstance(model, models.BPE)
    return {
        "model": {
            "type": "BPE" if is_bpe else type(model).__name__,
            "dropout": model.dropout if is_bpe else None,
            "ignore_merges": model.ignore_merges if is_bpe else None,
        },
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "added_tokens": [
            {"content": t.content, "lstrip": t.lstrip, "rstrip": t.rstrip, "single_word": t.single_word}
            for t in tokenizer.get_added_tokens_decoder().values()
        ],
    }


def _structural_tokens(tokenizer: HFTokenizer, folder: Path, template: ChatTemplate | None) -> list[str]:
    """Returns the contents of the structural tokens. Those that tokenizer_config.json names count as
    special, as in transformers."""
    config = read_tokenizer_config(folder)
    named = [token for name, token in config.items() if name.endswith("_token")]
    more = config.get("additional_special_tokens")
    named += more if isinstance(more, list) else []
    special = {token_content(token) for token in named} | NAMES
    source = "" if template is None else template.text
    return [
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if is_structural(token.content, is_special=token.special or token.content in special, template=source)
    ]


def _max_token_bytes(tokenizer: HFTokenizer) -> int | None:
    """Returns the most bytes of a token. It is known only for byte-level tokenizers that preserve all of a
    text, in which one character of a token is one byte."""
    normalizer = tokenizer.normalizer
    added = tokenizer.get_added_tokens_decoder().values()
    plain = tokenizer.get_vocab(with_added_tokens=False)
    is_lossless = (
        isinstance(tokenizer.model, models.BPE)
        and (normalizer is None or isinstance(normalizer, normalizers.NFC))
        and not any(token.lstrip or token.rstrip for token in added)
        and _keeps_all(json.loads(tokenizer.pre_tokenizer.__getstate__()) if tokenizer.pre_tokenizer else {})
    )
    if not is_lossless:
        return None
    longest = max([1, *(len(token.content.encode()) for token in added), *map(len, plain)])
    return longest if normalizer is None else MAX_NFC_SHRINKING * longest


def _keeps_all(pre_tokenizer: JsonObject) -> bool:
    """Returns whether the pre-tokenizer ends in the byte-level one, and drops no characters before."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    assert isinstance(steps, list), pre_tokenizer
    keeps = [
        s["type"] in ("ByteLevel", "Digits") or s.get("behavior") in KEEPING_BEHAVIORS for s in steps if s
    ]
    return bool(keeps) and all(keeps) and steps[-1]["type"] == "ByteLevel"
