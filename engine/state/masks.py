"""The masks of a step on the host and on the device: the tokens that the grammars of its rows allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headway.engine.grammar.masks import MaskBuffer


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of R rows, as `mask_logits` reads them."""

    entries: torch.Tensor  # [R] int64: the row's entry of `allowed`; -1: everything is allowed
    allowed: torch.Tensor  # [n, window, words] int32

    def at(
        self,
        index: torch.Tensor,  # [n] int64
    ) -> Masks:
        """Returns the masks of these rows."""
        return Masks(self.entries[index], self.allowed)


def mask_bytes(num_rows: int, window: int, vocab_size: int) -> int:
    """Returns the bytes that a MaskTable takes on the device."""
    return num_rows * (4 * window * _num_words(vocab_size) + 8)


class MaskTable:
    """Mutable: the host fills the buffer while a step runs, `upload` copies it. On a CPU host and device
    share the memory.

    It holds the masks of one step. The buffer may be filled again when that step is done.
    """

    def __init__(self, num_rows: int, window: int, vocab_size: int, device: torch.device) -> None:
        words = _num_words(vocab_size)
        is_gpu = device.type == "cuda"
        self._allowed = torch.zeros(num_rows, window, words, dtype=torch.int32, pin_memory=is_gpu)
        self._entries = torch.full((num_rows,), -1, dtype=torch.int64, pin_memory=is_gpu)
        self._on_device = Masks(self._entries.to(device), self._allowed.to(device))
        # Copies run concurrently with the forward pass of the step.
        self._stream = torch.Stream(device=device) if is_gpu else None
        self.buffer = MaskBuffer(self._allowed.data_ptr(), num_rows, window, words)

    def filled(self, count: int) -> bytes:
        """Returns the first entries of the buffer, for the table of another rank."""
        return self._allowed[:count].numpy().tobytes()

    def fill(self, content: bytes) -> None:
        """Writes the result of `filled` to the buffer."""
        numbers = torch.frombuffer(bytearray(content), dtype=torch.int32) if content else self._allowed[:0]
        self._allowed.view(-1)[: numbers.numel()] = numbers.view(-1)

    def upload(self, entries: Mapping[int, int]) -> Masks:
        """Copies the masks to the device for all later launches. Returns those of all rows. entries: the
        entry of the buffer for each masked row; the first entries are used."""
        self._entries.copy_(torch.tensor([entries.get(row, -1) for row in range(len(self._entries))]))
        if self._stream is not None:
            with self._stream:
                self._on_device.entries.copy_(self._entries, non_blocking=True)
                self._on_device.allowed[: len(entries)].copy_(
                    self._allowed[: len(entries)], non_blocking=True
                )
            torch.accelerator.current_stream().wait_stream(self._stream)
        return self._on_device

    @property
    def all(self) -> Masks:
        """Returns the masks of all rows as `upload` returned them."""
        return self._on_device

    def first(self, num_rows: int) -> Masks:
        """Returns the masks of the first rows, in the table's own memory."""
        return Masks(self._on_device.entries[:num_rows], self._on_device.allowed)


def _num_words(vocab_size: int) -> int:
    """Returns the numbers of 32 bits that hold one bit for each token."""
    return -(-vocab_size // 32)
