"""Fills the masks of windows: at each position the tokens that the grammar allows if the drafts before it are
right."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLExecutor, LLMatcher

from headway.engine.grammar.guide import Guide
from headway.engine.protocol.errors import RequestError

_MAX_THREADS = 8
_ALL = 0xFF


@dataclass(frozen=True, slots=True)
class MaskBuffer:
    """Memory of [entries, window, words] int32 on the host: bit i % 32 of word i // 32 is 1 if token i is
    allowed.

    The creator owns the memory.
    """

    address: int
    num_entries: int
    window: int
    words: int

    @property
    def line_bytes(self) -> int:
        return 4 * self.words

    def address_of(self, entry: int, place: int = 0) -> int:
        return self.address + (entry * self.window + place) * self.line_bytes


@dataclass(frozen=True, slots=True)
class GuidedWindow:
    """A masked row of the step. drafts: those of its round; () after a prompt. entry: the entry of the buffer
    for its masks."""

    guide: Guide
    drafts: Sequence[int]
    entry: int


class MaskFiller:
    """Owns the threads of the library. It has no mutable state of its own."""

    def __init__(self) -> None:
        self._executor = LLExecutor(num_threads=max(1, min((os.cpu_count() or 1) // 2, _MAX_THREADS)))

    def fill(self, windows: Sequence[GuidedWindow], buffer: MaskBuffer) -> list[tuple[Guide, RequestError]]:
        """Fills the entries of the windows. Returns the guides without an allowed token, whose entries then
        allow everything."""
        alone: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for window in windows:
            self._prepare(window, buffer)
            num_free = window.guide.num_free(window.drafts)
            if num_free > len(window.drafts):
                continue
            line, drafts = window.entry * buffer.window + num_free, list(window.drafts[num_free:])
            if drafts:
                drafted.append((window.guide.matcher, line, drafts))
            else:
                alone.append((window.guide.matcher, line))
        place = buffer.address, buffer.line_bytes, buffer.num_entries * buffer.window
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *place)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        return [dead for window in windows if (dead := self._finish(window, buffer)) is not None]

    def _prepare(self, window: GuidedWindow, buffer: MaskBuffer) -> None:
        """Allows everything, except an end of the text before the end of the reasoning. The library does not
        fill positions after a draft that is not allowed."""
        ctypes.memset(buffer.address_of(window.entry), _ALL, buffer.window * buffer.line_bytes)
        for place in range(window.guide.num_free(window.drafts)):
            for token_id in window.guide.end_ids:
                _set(buffer.address_of(window.entry, place), token_id, is_allowed=False)

    def _finish(self, window: GuidedWindow, buffer: MaskBuffer) -> tuple[Guide, RequestError] | None:
        guide, first = window.guide, buffer.address_of(window.entry)
        if guide.matcher.is_error():
            try:
                self._look_ahead(window, buffer)
            except RequestError as error:
                return self._dead_end(window, buffer, error)
        if guide.opening_id is not None:
            _set(first, guide.opening_id, is_allowed=True)
        if any(ctypes.string_at(first, buffer.line_bytes)):
            return None
        return self._dead_end(window, buffer, guide.dead_end())

    def _look_ahead(self, window: GuidedWindow, buffer: MaskBuffer) -> None:
        """Fills the positions up to the one at which the library failed."""
        num_free = window.guide.num_free(window.drafts)
        masks = window.guide.look_ahead(num_free, window.drafts)
        self._prepare(window, buffer)
        for place, mask in enumerate(masks, start=num_free):
            ctypes.memmove(buffer.address_of(window.entry, place), mask, buffer.line_bytes)

    def _dead_end(
        self, window: GuidedWindow, buffer: MaskBuffer, error: RequestError
    ) -> tuple[Guide, RequestError]:
        ctypes.memset(buffer.address_of(window.entry), _ALL, buffer.window * buffer.line_bytes)
        return window.guide, error


def _set(address: int, token_id: int, *, is_allowed: bool) -> None:
    """Sets the bit of one token in the line at the address, on a little-endian machine."""
    byte = ctypes.c_uint8.from_address(address + token_id // 8)
    bit = 1 << (token_id % 8)
    byte.value = byte.value | bit if is_allowed else byte.value & ~bit
