"""The families by the name that config.json gives them, and what the engine asks of each."""

from __future__ import annotations

from typing import Protocol

import torch

from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.layers.mimo import MiMo
from headway.engine.layers.qwen2 import Qwen2
from headway.engine.models.model_config import ModelConfig
from headway.engine.state.pool import KVPool


class CausalLM(Protocol):
    """A decoder, with or without an MTP head. The methods that draft may be called only if `has_mtp`.

    Keys and values go to the pool's layers 0 .. num_kv_layers - 1, the MTP layer's to the last of them.
    A row's result depends on no other row, but for drafts by few bits. Inputs are left as they are.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    num_kv_layers: int
    has_mtp: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter once, under its name in the checkpoint; to be written in place by the loader."""
        ...

    def linears(self) -> tuple[Linear, ...]:
        """Every linear layer once; when they are packed, `tensors` can be called no more."""
        ...

    def forward(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        """Returns the residual stream h before the final norm, [tokens, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden] of `forward`. Returns [n, vocab]."""
        ...

    def draft_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden] of `forward`. Returns [n, hidden]: what the MTP head is fed with."""
        ...

    def draft(self, inputs: ForwardInputs, hidden: torch.Tensor, pool: KVPool) -> torch.Tensor:
        """One pass of the MTP layer over pairs: token t_i of `inputs` at position i, and hidden of i - 1.

        hidden: [tokens, hidden], of `draft_hidden` or the carry of an earlier pass. Returns the carry,
        [tokens, hidden]. Position 0 has no pair: nothing attends to it.
        """
        ...

    def draft_logits(self, carry: torch.Tensor) -> torch.Tensor:
        """carry: [n, hidden] of `draft`. Returns [n, vocab], for the token at position i + 1."""
        ...

    def quantize_draft_lm_head(self) -> None:
        """From now on `draft_logits` uses a copy of the lm_head in float8_e4m3fn; `logits` does not."""
        ...

    def screen_draft_lm_head(self) -> None:
        """From now on few rows of `draft_logits` are exact where they could be greatest, else about right; many stay as
        they were."""
        ...

    def draft_linears(self) -> tuple[Linear, ...]:
        """Those of the MTP head whose inputs are norms' outputs; () without a head."""
        ...

    def round_draft_linears(self) -> None:
        """From now on `draft_linears` multiply float8_e4m3fn by float8_e4m3fn; their weights are given up, and `tensors`
        can be called no more."""
        ...

    def fill_draft_cache(self, inputs: ForwardInputs, hidden: torch.Tensor, pool: KVPool) -> None:
        """What `draft` leaves in the pool, without computing its result."""
        ...


MODELS: dict[str, type[Qwen2 | MiMo]] = {
    "Qwen2ForCausalLM": Qwen2,
    "MiMoForCausalLM": MiMo,
}
