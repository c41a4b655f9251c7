"""Compiles the grammars of requests in a thread besides the engine's loop, each source once."""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from weakref import WeakSet

from llguidance import LLMatcher, LLTokenizer

from headway.engine.grammar.compile import compile_matcher, make_tokenizer
from headway.engine.grammar.guide import Guide
from headway.engine.protocol.errors import RequestError
from headway.engine.protocol.grammar import Grammar, TokenTable

MAX_KEPT = 16  # sources, whose lexers may have 34 MB each
MAX_KEPT_CHARACTERS = 2 * 2**20  # of theirs: a text of 200,000 characters makes a lexer of 60 MiB
# The compile time of all kept grammars together, the newest excepted. A grammar that takes long to compile is
# large: some 140 MB for each second.
MAX_KEPT_COMPILE_SECONDS = 2.0
KEPT_SECONDS = 20.0  # after a source was asked for last
TEND_SECONDS = 10.0
# The loop renews full lexers. A source that takes longer is not renewed: its request ends, and no other waits
# for it.
MAX_RENEWAL_SECONDS = 0.05


@dataclass(slots=True)
class _Kept:
    """Mutable: `used_seconds` is set at each use."""

    matcher: LLMatcher
    compile_seconds: float
    used_seconds: float


class GrammarCompiler:
    """Mutable: a thread compiles, and caches the grammars that it compiled last. The API process has checked
    every source before."""

    def __init__(self, table: TokenTable | None, vocab_size: int) -> None:
        """table: None if no grammar can be served. Returns at once, since the thread makes the tokenizer."""
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._guides: WeakSet[Guide] = WeakSet()
        self._is_used, self._tended_seconds = False, time.monotonic()
        self._lock = Lock()  # the loop keeps what it renews, too
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tokenizer: Future[LLTokenizer] | None = None
        self._end_ids = () if table is None else tuple(i for i in table.end_ids if i < vocab_size)
        if table is not None:
            self._tokenizer = self._thread.submit(make_tokenizer, table, vocab_size)

    def compile(self, grammar: Grammar) -> Future[Guide]:
        """Returns the future guide of a new request, which raises RequestError if the grammar cannot be
        enforced."""
        return self._thread.submit(self._guide, grammar)

    def tend(self) -> None:
        """Frees the memory of grammars that are not needed any more. The loop calls it often, the thread
        works now and then."""
        now = time.monotonic()
        if self._is_used and now - self._tended_seconds >= TEND_SECONDS:
            self._tended_seconds = now
            self._is_used = bool(self._kept or self._guides)
            self._thread.submit(self._drop_old, now - KEPT_SECONDS)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _guide(self, grammar: Grammar) -> Guide:
        if self._tokenizer is None:
            raise RequestError(
                "this server's tokenizer gives its tokens no text, so that no grammar can be enforced; leave the grammar out",
                code="unsupported_parameter",
            )
        tokenizer, source = self._tokenizer.result(), grammar.source
        kept = self._found(source) or self._keep(source, tokenizer)
        renew = partial(self._renewed, source, tokenizer, kept.compile_seconds)
        guide = Guide(kept.matcher, grammar.thinking, end_ids=self._end_ids, renew=renew)
        self._guides.add(guide)
        self._is_used = True
        return guide

    def _renewed(
        self, source: str, tokenizer: LLTokenizer, compile_seconds: float, full: LLMatcher
    ) -> LLMatcher:
        """Returns a matcher with a new lexer: the one that has replaced the full one, if there is any; the
        full one itself if a new one takes too long to make. Called by the loop."""
        found = self._found(source)
        if found is not None and found.matcher is not full:
            return found.matcher
        return full if compile_seconds > MAX_RENEWAL_SECONDS else self._keep(source, tokenizer).matcher

    def _found(self, source: str) -> _Kept | None:
        with self._lock:
            kept = self._kept.get(source)
            if kept is not None:
                self._kept.move_to_end(source)
                kept.used_seconds = time.monotonic()
            return kept

    def _keep(self, source: str, tokenizer: LLTokenizer) -> _Kept:
        since = time.monotonic()
        matcher = compile_matcher(tokenizer, source)
        now = time.monotonic()
        kept = _Kept(matcher, now - since, now)
        with self._lock:
            self._kept[source] = kept
            self._kept.move_to_end(source)
            while self._keeps_too_much():
                self._kept.popitem(last=False)
        return kept

    def _keeps_too_much(self) -> bool:
        if len(self._kept) > MAX_KEPT or sum(map(len, self._kept)) > MAX_KEPT_CHARACTERS:
            return True
        seconds = sum(kept.compile_seconds for kept in self._kept.values())
        return len(self._kept) > 1 and seconds > MAX_KEPT_COMPILE_SECONDS

    def _drop_old(self, oldest_seconds: float) -> None:
        with self._lock:
            old = [source for source, kept in self._kept.items() if kept.used_seconds < oldest_seconds]
            for source in old:
                del self._kept[source]
        if old or not self._guides:
            _give_back()


def _give_back() -> None:
    """Returns free memory to the system; glibc's allocator keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
