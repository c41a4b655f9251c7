"""The KV cache's memory: one tensor for all layers, MTP layers included as further layers of the same blocks."""

from __future__ import annotations

import torch


class KVPool:
    """Paged keys and values, and for each block the hidden state of its last token.

    keys, values: [layers, num_blocks, block_size, kv_heads, head_dim] in the model's dtype.
    block_hidden: [num_blocks + 1, hidden_size], the state that the MTP head is fed with at a block's last
    position, so that the first pair after a prefix hit can be formed; None without an MTP head. The last
    entry belongs to no block: states that are not to be kept go there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        hidden_size: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.block_hidden = (
            None
            if hidden_size is None
            else torch.zeros((num_blocks + 1, hidden_size), dtype=dtype, device=device)
        )

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of one layer: [num_blocks, block_size, kv_heads, head_dim] each."""
        return self.keys[index], self.values[index]

    def wipe(
        self,
        block_ids: torch.Tensor,  # [n] int64
    ) -> None:
        """Zeros all that these blocks hold."""
        for cache in (self.keys, self.values):
            cache.index_fill_(1, block_ids, 0)
        if self.block_hidden is not None:
            self.block_hidden.index_fill_(0, block_ids, 0)

    def keep_hidden(
        self,
        slot_mapping: torch.Tensor,  # [n] int64: block id * block size + offset; -1: not in the cache
        states: torch.Tensor,  # [n, hidden_size]
    ) -> None:
        """Keeps the states of tokens that end a block.

        A rejected token leaves a state that the true token overwrites; a block is published only after that.
        """
        if self.block_hidden is not None:
            ends_block = slot_mapping % self.block_size == self.block_size - 1
            block_ids = torch.where(ends_block, slot_mapping // self.block_size, self.num_blocks)
            self.block_hidden[block_ids] = states  # -1 // size is -1, the last entry
