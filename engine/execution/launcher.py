"""Launches steps kernel by kernel: those of a key, whose sizes are padded, and chunks of prompts of any
size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.execution.device_rows import DeviceRows
from headway.engine.execution.padded_prefill import HEADER, packed_chunks, padded_chunks
from headway.engine.execution.prefill import prefill_inputs
from headway.engine.execution.step import (
    HalfStep,
    StepContext,
    StepOutcome,
    forward_half,
    run_step,
    sample_half,
)
from headway.engine.execution.step_key import StepKey
from headway.engine.scheduling.plan import PrefillChunk
from headway.engine.speculation.drafter import PromptTokens
from headway.engine.state.masks import MaskTable
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.transfer import copy_to_device


class StepLauncher:
    """Mutable: keeps the chunks of the last `pack`, which a key with prompt tokens computes when it is
    launched or replayed."""

    def __init__(
        self, context: StepContext, table: DeviceRows, masks: MaskTable, *, max_prompt_tokens: int
    ) -> None:
        """max_prompt_tokens: the most prompt tokens of a key."""
        self.context = context
        self._table = table
        self.masks = masks
        size = HEADER + max_prompt_tokens
        self._packed = torch.zeros(
            size, dtype=torch.int64, device=table.device
        )  # graphs read chunks from here

    def pack(self, chunks: Sequence[PrefillChunk], key: StepKey) -> None:
        """Copies the chunks to the device."""
        copy_to_device(packed_chunks(chunks, key.num_prompt_tokens), self._packed)

    def launch(self, key: StepKey) -> StepOutcome:
        """Launches the key's rows, which are the first ones of the table, and the packed chunks."""
        rows, prompts = self.operands(key)
        if key.catches_up:
            assert rows is not None, "there are rows to catch up with"
            self.context.drafter.catch_up(rows)
            return StepOutcome(None, None)
        return run_step(self.context, rows, key.depth, prompts, keeps_logits=key.keeps_logits)

    def begin(self, key: StepKey) -> HalfStep:
        """Launches the first half of a key with masked rows. The host gets the drafts before the target model
        has run."""
        rows, prompts = self.operands(key)
        return forward_half(self.context, rows, key.depth, prompts, tells_drafts=True, keeps_logits=True)

    def finish(self, key: StepKey, half: HalfStep) -> StepOutcome:
        """Launches the second half, with the masks that the table got last."""
        masks = self.masks.first(key.num_rows)
        return sample_half(self.context, half, keeps_logits=key.keeps_logits, masks=masks)

    def operands(self, key: StepKey) -> tuple[RowTensors | None, PromptTokens | None]:
        """Returns the rows of the key's round, with their logits processors only while a row uses any, and
        its prompt tokens, which kernels compute from the packed chunks."""
        rows = prompts = None
        if key.num_rows:
            rows = self._table.first(key.num_rows, is_adjusted=key.is_adjusted)
        if key.num_prompt_tokens:
            packed = self._packed[: HEADER + key.num_prompt_tokens]
            size = self.context.pool.block_size
            prompts = padded_chunks(packed, self._table.numbers, size, is_window=key.is_window)
        return rows, prompts

    def launch_chunks(self, chunks: Sequence[PrefillChunk]) -> torch.Tensor:
        """Launches a pass of these chunks alone. Returns [tokens, hidden]: the hidden states in the order of
        the chunks."""
        return self.launch_tokens(self.tokens_of(chunks))

    def tokens_of(self, chunks: Sequence[PrefillChunk]) -> PromptTokens:
        """Copies the chunks to the device, for a pass of their own."""
        return prefill_inputs(
            chunks,
            self._table.numbers,
            self.context.pool.block_size,
            gqa_group_sizes={kind.gqa_group_size for kind in self.context.model.spec.attentions},
        )

    def launch_tokens(self, tokens: PromptTokens) -> torch.Tensor:
        """Launches the pass, as `launch_chunks` does; nothing is copied from the host."""
        hidden = run_step(self.context, None, 0, tokens).prompt_hidden
        assert hidden is not None, "the step has prompts"
        return hidden
