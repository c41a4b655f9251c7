"""Tracks which published blocks have a checkpoint: a copy of the recurrent state at the block's end.

A prefix hit of a model with row state can only end where there is a checkpoint. Knows ids and opaque keys; no
tensors.
"""

from __future__ import annotations

from collections import OrderedDict


class Checkpoints:
    """Mutable: the prefix cache is the only writer.

    A checkpoint is free, pending (taken for a request whose block is not published yet) or kept under the key
    of a published block. When none is free, the least recently used kept one is taken; pending ones are never
    taken.
    """

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._pending: dict[int, dict[int, int]] = {}  # by request id: checkpoints by number of tokens

    @property
    def num_kept(self) -> int:
        """Returns the number of published blocks with a checkpoint."""
        return len(self._kept)

    def has(self, key: bytes) -> bool:
        return key in self._kept

    def use(self, key: bytes) -> int:
        """Returns the checkpoint of a published block and notes that it was used."""
        self._kept.move_to_end(key)
        return self._kept[key]

    def take(self, request_id: int, num_tokens: int) -> int | None:
        """Returns a checkpoint for the state after the request's first num_tokens tokens; None if there is
        none."""
        if not self._free and self._kept:
            self._free.append(self._kept.popitem(last=False)[1])
        if not self._free:
            return None
        checkpoint = self._free.pop()
        self._pending.setdefault(request_id, {})[num_tokens] = checkpoint
        return checkpoint

    def pending(self, request_id: int) -> list[int]:
        """Returns the numbers of tokens at which the request has pending checkpoints."""
        return list(self._pending.get(request_id, ()))

    def keep(self, request_id: int, num_tokens: int, key: bytes) -> None:
        """Keeps a pending checkpoint under the key of a published block, which may have one already."""
        checkpoint = self._pending[request_id].pop(num_tokens)
        if key in self._kept:
            self._free.append(checkpoint)
        else:
            self._kept[key] = checkpoint

    def drop_pending(self, request_id: int) -> None:
        """Frees the request's pending checkpoints."""
        self._free += self._pending.pop(request_id, {}).values()

    def drop(self, key: bytes) -> None:
        """Frees the checkpoint of a block that is no longer published, if it has one."""
        if (checkpoint := self._kept.pop(key, None)) is not None:
            self._free.append(checkpoint)
