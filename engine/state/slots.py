"""The slot table: device truth of every running request, one row each, at fixed addresses.

Written by the runner at admission and by the kernels inside the round; the host never reads it back.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from headway.kernels import Adjustments, RowState


@dataclass(frozen=True, slots=True)
class SlotTable:
    """N rows. The tensors are mutable, their addresses are not.

    A row with kv_lengths >= limits is padding: rounds neither change it nor count it.
    kv_lengths counts tokens in the KV cache (L); last_tokens is t_L, the first token not in it.
    Pending pairs are (h_{i-1}, t_i) for i in L - pending_counts + 1 .. L: what the MTP head has not seen.
    """

    last_tokens: torch.Tensor  # [N] int64
    kv_lengths: torch.Tensor  # [N] int64
    limits: torch.Tensor  # [N] int64: positions at or beyond it are never computed
    depth_caps: torch.Tensor  # [N] int64
    last_block_offsets: torch.Tensor  # [N] int64: (L - 1) mod block size
    block_counts: torch.Tensor  # [N] int64: ceil(L / block size)
    last_block_ids: torch.Tensor  # [N] int64
    kv_block_ids: torch.Tensor  # [N, max_blocks] int64: blocks in use, -1 beyond
    granted_block_ids: torch.Tensor  # [N, max_blocks] int64: blocks the row may use
    prefill_status: torch.Tensor  # [N] int64: 1 on rows that the round left alone
    temperatures: torch.Tensor  # [N] float32
    top_k: torch.Tensor  # [N] int64
    top_p: torch.Tensor  # [N] float32
    min_p: torch.Tensor  # [N] float32
    seeds: torch.Tensor  # [N] int64
    pending_tokens: torch.Tensor  # [N, max depth + 1] int64
    pending_hidden: torch.Tensor  # [N, max depth + 1, hidden]
    pending_counts: torch.Tensor  # [N] int64
    chunk_hidden: torch.Tensor  # [N, hidden]: the MTP head's input state of a prefill's last computed token
    adjustments: Adjustments | None = None  # of the same rows, while any of them uses some; not its memory

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        *,
        max_blocks: int,
        max_depth: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> SlotTable:
        def integers(*shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full((num_rows, *shape), fill, dtype=torch.int64, device=device)

        def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((num_rows, *shape), dtype=dtype, device=device)

        return cls(
            last_tokens=integers(),
            kv_lengths=integers(),
            limits=integers(),
            depth_caps=integers(),
            last_block_offsets=integers(),
            block_counts=integers(),
            last_block_ids=integers(fill=-1),
            kv_block_ids=integers(max_blocks, fill=-1),
            granted_block_ids=integers(max_blocks, fill=-1),
            prefill_status=integers(fill=1),
            temperatures=floats(),
            top_k=integers(),
            top_p=floats() + 1,
            min_p=floats(),
            seeds=integers(),
            pending_tokens=integers(max_depth + 1),
            pending_hidden=floats(max_depth + 1, hidden_size, dtype=dtype),
            pending_counts=integers(),
            chunk_hidden=floats(hidden_size, dtype=dtype),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is the table's own: without the adjustments."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "adjustments"}

    def state(self) -> RowState:
        """What a round's bookkeeping changes, in the same memory."""
        return RowState(
            last_tokens=self.last_tokens,
            kv_lengths=self.kv_lengths,
            limits=self.limits,
            depth_caps=self.depth_caps,
            last_block_offsets=self.last_block_offsets,
            block_counts=self.block_counts,
            last_block_ids=self.last_block_ids,
            kv_block_ids=self.kv_block_ids,
            granted_block_ids=self.granted_block_ids,
            prefill_status=self.prefill_status,
            pending_tokens=self.pending_tokens,
            pending_counts=self.pending_counts,
        )

    def first(self, num_rows: int, adjustments: Adjustments | None = None) -> SlotTable:
        """The same memory, only the first rows; with the adjustments of as many rows."""
        tensors = {name: tensor[:num_rows] for name, tensor in self.tensors().items()}
        return SlotTable(**tensors, adjustments=adjustments)

    def at(
        self,
        index: torch.Tensor,  # [n] int64
        adjustments: Adjustments | None = None,  # of the same rows
    ) -> SlotTable:
        """A copy of these rows."""
        tensors = {name: tensor[index] for name, tensor in self.tensors().items()}
        return SlotTable(**tensors, adjustments=adjustments)

    def set_up(
        self,
        integers: torch.Tensor,  # [n, 5] int64: row, limit, depth cap, top-k, seed
        floats: torch.Tensor,  # [n, 3] float32: temperature, top-p, min-p
    ) -> None:
        """Rows that were released are taken. They are padding for rounds until their prefill ends."""
        index, limits, depth_caps, top_k, seeds = integers.unbind(1)
        temperatures, top_p, min_p = floats.unbind(1)
        self.limits.index_copy_(0, index, limits)
        self.kv_lengths.index_copy_(0, index, limits)
        self.depth_caps.index_copy_(0, index, depth_caps)
        self.top_k.index_copy_(0, index, top_k)
        self.seeds.index_copy_(0, index, seeds)
        self.temperatures.index_copy_(0, index, temperatures)
        self.top_p.index_copy_(0, index, top_p)
        self.min_p.index_copy_(0, index, min_p)

    def move(
        self,
        sources: torch.Tensor,  # [n] int64
        targets: torch.Tensor,  # [n] int64: none of them among the sources
    ) -> None:
        """Each source's row goes to its target and becomes padding."""
        for tensor in self.tensors().values():
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))
        self.release(sources)

    def release(
        self,
        index: torch.Tensor,  # [n] int64
    ) -> None:
        """These rows become padding; their blocks are no longer their own."""
        self.limits.index_fill_(0, index, 0)
        self.kv_lengths.index_fill_(0, index, 0)
        self.granted_block_ids.index_fill_(0, index, -1)
        self.kv_block_ids.index_fill_(0, index, -1)


def live_lengths(rows: SlotTable) -> torch.Tensor:
    """[rows] int64: L, and 0 for padding rows, so that they cost attention no context."""
    return rows.kv_lengths * (rows.kv_lengths < rows.limits)
