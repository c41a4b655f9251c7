"""The state of running requests on the device, one row each, at fixed addresses.

The runner writes it at admission, and kernels within rounds. The host never reads it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, NamedTuple, get_type_hints

import torch

from headway.engine.scheduling.plan import RowSetup
from headway.kernels import LogitsProcessorState, RowState


class RowSizes(NamedTuple):
    """The sizes that the shapes of columns depend on. pending: the most pairs of a row that wait for the
    drafter."""

    max_blocks: int
    pending: int


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor, with a value or a vector or matrix of values for each row.

    shape: the shape of one row's values. source: the value of a row that a request gets; None: kernels write
    it. released: the value of a row that becomes padding; None: it keeps its value.
    """

    shape: Callable[[RowSizes], tuple[int, ...]] = lambda _: ()
    dtype: torch.dtype = torch.int64
    fill: float = 0
    source: Callable[[RowSetup], float] | None = None
    released: float | None = None


def _seed(setup: RowSetup) -> int:
    """Returns the 64 bits of the seed as a signed integer."""
    seed = setup.sampling.seed
    return seed - (1 << 64) if seed >= 1 << 63 else seed


@dataclass(frozen=True, slots=True)
class RowTensors:
    """N rows. The tensors are mutable, their addresses are not. Each column is declared once, here;
    allocation, set-up, moves and the view that kernels get are derived.

    A row with kv_lengths >= limits is padding: rounds neither change it nor count it. kv_lengths is the
    number of tokens in the KV cache (L); last_tokens is t_L, the first token not in it. Pending pairs, which
    the drafter has not processed yet, are (h_{i-1}, t_i) for i in L - pending_counts + 1 .. L, from the first
    column on. A round with drafts consumes them and leaves its own; a round without drafts appends one. Only
    the tokens t_i are stored here; a drafter stores the rest in its own state, by state id.
    """

    last_tokens: Annotated[torch.Tensor, Column()]  # [N] int64
    # [N] int64. A row that is set up stays padding for rounds until its prefill ends.
    kv_lengths: Annotated[torch.Tensor, Column(source=lambda setup: setup.limit, released=0)]
    # [N] int64: positions at or beyond it are never computed
    limits: Annotated[torch.Tensor, Column(source=lambda setup: setup.limit, released=0)]
    # [N] int64: where the pool keeps the row's state, always a permutation of 0 .. N - 1
    state_ids: Annotated[torch.Tensor, Column()]
    depth_caps: Annotated[torch.Tensor, Column(source=lambda setup: setup.depth_cap)]  # [N] int64
    last_block_offsets: Annotated[torch.Tensor, Column()]  # [N] int64: (L - 1) mod block size
    block_counts: Annotated[torch.Tensor, Column()]  # [N] int64: ceil(L / block size)
    last_block_ids: Annotated[torch.Tensor, Column(fill=-1)]  # [N] int64
    # [N, max_blocks] int64: blocks in use, -1 beyond
    kv_block_ids: Annotated[torch.Tensor, Column(lambda sizes: (sizes.max_blocks,), fill=-1, released=-1)]
    # [N, max_blocks] int64: blocks the row may use, -1 beyond
    granted_block_ids: Annotated[
        torch.Tensor, Column(lambda sizes: (sizes.max_blocks,), fill=-1, released=-1)
    ]
    prefill_status: Annotated[
        torch.Tensor, Column(fill=1)
    ]  # [N] int64: 1 for rows that took no part in the last round
    temperatures: Annotated[
        torch.Tensor, Column(dtype=torch.float32, source=lambda s: s.sampling.temperature)
    ]  # [N]
    top_k: Annotated[torch.Tensor, Column(source=lambda setup: setup.sampling.top_k)]  # [N] int64
    top_p: Annotated[
        torch.Tensor, Column(dtype=torch.float32, fill=1, source=lambda s: s.sampling.top_p)
    ]  # [N]
    min_p: Annotated[torch.Tensor, Column(dtype=torch.float32, source=lambda s: s.sampling.min_p)]  # [N]
    seeds: Annotated[torch.Tensor, Column(source=_seed)]  # [N] int64
    pending_tokens: Annotated[torch.Tensor, Column(lambda sizes: (sizes.pending,))]  # [N, max_pending] int64
    pending_counts: Annotated[torch.Tensor, Column()]  # [N] int64
    # [N] int64: tokens that its output is predicted to be, and the position at which the output begins
    prediction_lengths: Annotated[torch.Tensor, Column(source=lambda s: len(s.prediction_token_ids))]
    output_starts: Annotated[torch.Tensor, Column(source=lambda setup: setup.num_prompt_tokens)]
    # [N] int64, 0: n-gram lookup does not draft together with another drafter
    joins_ngrams: Annotated[torch.Tensor, Column(source=lambda setup: setup.joins_ngrams)]
    processors: LogitsProcessorState | None = (
        None  # of the same rows, if any of them uses some; in memory of its own
    )

    @classmethod
    def allocate(
        cls, num_rows: int, *, max_blocks: int, max_pending: int, device: torch.device
    ) -> RowTensors:
        """Allocates rows that are padding. max_pending: max depth + 1, or more where rounds without drafts
        leave pairs pending."""
        sizes = RowSizes(max_blocks, max_pending)
        tensors = {
            name: torch.full((num_rows, *column.shape(sizes)), column.fill, dtype=column.dtype, device=device)
            for name, column in _COLUMNS.items()
        }
        # The ids are made on the CPU: on the device meta, where only sizes matter, torch.arange imports sympy
        # for a second.
        tensors["state_ids"].copy_(torch.arange(num_rows))
        return cls(**tensors, processors=None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the columns by name, without the state of logits processors."""
        return {name: getattr(self, name) for name in _COLUMNS}

    def state(self) -> RowState:
        """Returns the columns that a round's bookkeeping changes, in the same memory."""
        return RowState(**{f.name: getattr(self, f.name) for f in fields(RowState)})

    def first(self, num_rows: int, processors: LogitsProcessorState | None = None) -> RowTensors:
        """Returns the first rows in the same memory, with the state of their logits processors."""
        tensors = {name: tensor[:num_rows] for name, tensor in self.tensors().items()}
        return RowTensors(**tensors, processors=processors)

    def at(
        self,
        index: torch.Tensor,  # [n] int64
        processors: LogitsProcessorState | None = None,  # of the same rows
    ) -> RowTensors:
        """Returns a copy of these rows."""
        tensors = {name: tensor[index] for name, tensor in self.tensors().items()}
        return RowTensors(**tensors, processors=processors)

    def set_up(
        self,
        integers: torch.Tensor,  # [n, 1 + columns] int64: the row, then as `numbers_of` gives them
        floats: torch.Tensor,  # [n, columns] float32, as `numbers_of` gives them
    ) -> None:
        """Sets up released rows for requests. The rows are padding for rounds until their prefill ends."""
        index, *whole = integers.unbind(1)
        for names, values in ((_WHOLE, whole), (_REAL, floats.unbind(1))):
            for name, value in zip(names, values, strict=True):
                getattr(self, name).index_copy_(0, index, value)

    def move(
        self,
        sources: torch.Tensor,  # [n] int64
        targets: torch.Tensor,  # [n] int64: none of them among the sources
    ) -> None:
        """Copies each source's row to its target; the source becomes padding and gets the target's state
        id."""
        spare = self.state_ids.index_select(0, targets)
        for tensor in self.tensors().values():
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))
        self.state_ids.index_copy_(0, sources, spare)
        self.release(sources)

    def release(
        self,
        index: torch.Tensor,  # [n] int64
    ) -> None:
        """Turns these rows into padding, without blocks."""
        for name, column in _COLUMNS.items():
            if column.released is not None:
                getattr(self, name).index_fill_(0, index, column.released)


_COLUMNS: dict[str, Column] = {
    name: column
    for name, hint in get_type_hints(RowTensors, include_extras=True).items()
    for column in getattr(hint, "__metadata__", ())
}
_TAKEN = {name: column for name, column in _COLUMNS.items() if column.source is not None}
_WHOLE = tuple(name for name, column in _TAKEN.items() if column.dtype == torch.int64)
_REAL = tuple(name for name, column in _TAKEN.items() if column.dtype == torch.float32)


def numbers_of(setup: RowSetup) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `RowTensors.set_up` writes for one row: [1 + columns] int64 and [columns] float32 on the
    CPU.

    Raises RuntimeError or OverflowError for a number that its column cannot hold.
    """
    values = {name: column.source(setup) for name, column in _TAKEN.items() if column.source is not None}
    integers = torch.tensor([setup.row, *(values[name] for name in _WHOLE)], dtype=torch.int64)
    return integers, torch.tensor([values[name] for name in _REAL], dtype=torch.float32)
