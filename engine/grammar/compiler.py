"""Compiles the grammars of requests beside the engine's loop, each source once."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from headway.engine.grammar.compile import compile_matcher, make_tokenizer
from headway.engine.grammar.guide import Guide
from headway.engine.protocol.errors import RequestError
from headway.engine.protocol.grammar import Grammar, TokenTable

MAX_KEPT = 128  # sources
MAX_KEPT_CHARACTERS = 2 * 2**20  # of theirs: a text of 200,000 characters makes a lexer of 60 MiB


class GrammarCompiler:
    """Mutable: a thread compiles, and keeps what it compiled last. The API process has checked every source before."""

    def __init__(self, table: TokenTable | None, vocab_size: int) -> None:
        """table: None where no grammar can be served. Returns at once: the tokenizer is made by the thread."""
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()  # the loop keeps what it renews, too
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tokenizer: Future[LLTokenizer] | None = None
        self._end_ids = () if table is None else tuple(i for i in table.end_ids if i < vocab_size)
        if table is not None:
            self._tokenizer = self._thread.submit(make_tokenizer, table, vocab_size)

    def compile(self, grammar: Grammar) -> Future[Guide]:
        """Returns the guide of a new request, whose result raises RequestError where the grammar cannot be enforced."""
        return self._thread.submit(self._guide, grammar)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _guide(self, grammar: Grammar) -> Guide:
        if self._tokenizer is None:
            raise RequestError(
                "this server's tokenizer gives its tokens no text, so that no grammar can be enforced; leave the grammar out",
                code="unsupported_parameter",
            )
        tokenizer, source = self._tokenizer.result(), grammar.source
        matcher = self._found(source) or self._keep(source, compile_matcher(tokenizer, source))
        return Guide(
            matcher, grammar.thinking, end_ids=self._end_ids, renew=partial(self._renewed, source, tokenizer)
        )

    def _renewed(self, source: str, tokenizer: LLTokenizer, full: LLMatcher) -> LLMatcher:
        """Returns a matcher with a lexer of its own: the one that came in place of the full one, if there is any. Called by the loop."""
        found = self._found(source)
        if found is None or found is full:
            return self._keep(source, compile_matcher(tokenizer, source))
        return found

    def _found(self, source: str) -> LLMatcher | None:
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def _keep(self, source: str, matcher: LLMatcher) -> LLMatcher:
        with self._lock:
            self._kept[source] = matcher
            self._kept.move_to_end(source)
            while len(self._kept) > MAX_KEPT or sum(map(len, self._kept)) > MAX_KEPT_CHARACTERS:
                self._kept.popitem(last=False)
        return matcher
