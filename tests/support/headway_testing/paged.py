"""Runs a model by hand on a paged cache: sequences with scattered blocks, chunk by chunk or window by
window."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import ChunkTokens, ForwardInputs, RowTokens
from headway.engine.layers.model_pair import ModelPair
from headway.engine.loading.checkpoint import load_model
from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.config import FULL, MAX_DEPTH, CpuWeights, Quantize
from headway.engine.speculation.mtp import mtp_state
from headway.engine.speculation.select import announced_head
from headway.engine.state.pool import StatePool
from headway.kernels import QueryBatch, TokenSpans


def load(path: Path, *, dtype: str = "auto") -> CausalLM:
    """Loads the target on the CPU, without a progress bar."""
    return load_pair(path, dtype=dtype).target


def load_pair(
    path: Path,
    *,
    dtype: str = "auto",
    with_draft_head: bool = True,
    quantize: Quantize = FULL,
    cpu_weights: CpuWeights = "full",
) -> ModelPair:
    """Loads the target with the draft head that config.json announces."""
    return load_model(
        path,
        device=torch.device("cpu"),
        dtype=dtype,
        make_draft=announced_head(read_model_spec(path)) if with_draft_head else None,
        progress=lambda _: None,
        quantize=quantize,
        cpu_weights=cpu_weights,
    )


class PagedSequences:
    """The cache of several sequences, with blocks in random order and garbage in those not yet written.

    A span is (row, first position, number of tokens); each becomes a batch of one row.
    """

    def __init__(
        self, models: CausalLM | ModelPair, num_rows: int, max_tokens: int, *, block_size: int = 16
    ) -> None:
        per_row = -(-max_tokens // block_size)
        pair = isinstance(models, ModelPair)
        self.model, self.head = (models.target, models.draft) if pair else (models, None)
        self.block_size = block_size
        self.pool = StatePool(
            self.model.state(),
            () if self.head is None else mtp_state(self.head, 1),
            draft_layers=() if self.head is None else self.head.state(MAX_DEPTH + 1),
            num_blocks=num_rows * per_row,
            num_rows=num_rows,
            block_size=block_size,
            device=self.model.device,
        )
        for tensor in self.pool.by_block():
            tensor.fill_(1e4)
        order = torch.randperm(num_rows * per_row, generator=torch.Generator().manual_seed(1))
        self.block_table = order.view(num_rows, per_row)  # [rows, blocks of a row] int64

    def forward(self, spans: Sequence[tuple[int, int, int]], tokens: torch.Tensor) -> torch.Tensor:
        """Takes [all tokens of the spans] int64. Returns the last states, [all tokens, hidden]."""
        return self.model.forward(self.inputs(spans, tokens), self.pool).last

    def draft(
        self, spans: Sequence[tuple[int, int, int]], tokens: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Takes tokens [all tokens] int64 and hidden [all tokens, hidden]. Returns the carries [all tokens,
        hidden]."""
        return self.head.draft(self.inputs(spans, tokens), hidden, self.pool)

    def fill(self, spans: Sequence[tuple[int, int, int]], tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        self.head.fill_cache(self.inputs(spans, tokens), hidden, self.pool)

    def inputs(self, spans: Sequence[tuple[int, int, int]], tokens: torch.Tensor) -> ForwardInputs:
        positions = torch.cat([torch.arange(first, first + count) for _, first, count in spans])
        rows = torch.cat([torch.full((count,), row) for row, _, count in spans])
        slots = self.block_table[rows, positions // self.block_size] * self.block_size
        slots += positions % self.block_size
        batches, offset = [], 0
        for row, first, count in spans:
            table = self.block_table[row : row + 1]
            batches.append(QueryBatch.of_windows(table, torch.tensor([first]), count, first_token=offset))
            offset += count
        lengths = torch.tensor([count for _, _, count in spans])
        row_ids = torch.tensor([row for row, _, _ in spans])
        is_generated = torch.zeros(len(spans), dtype=torch.bool)
        chunks = ChunkTokens(TokenSpans(row_ids, lengths.cumsum(0) - lengths, lengths, is_generated))
        return ForwardInputs(
            token_ids=tokens,
            positions=positions,
            slot_mapping=slots,
            batches=tuple(batches),
            rows=RowTokens(torch.arange(len(self.block_table)), chunks=chunks),
        )
