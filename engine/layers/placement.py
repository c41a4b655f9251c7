"""Says where parameters live, and makes all linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headway.engine.layers.group import ALONE, Group
from headway.engine.layers.linear import Linear
from headway.engine.protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and dtype of parameters, the dtype of the KV cache, and the ranks that share the model. On
    the device "meta" parameters have shapes without memory.

    kv_dtype: None for the dtype of the parameters. defers_weights: the weights of linear layers and of
    experts get no memory until `Linear.store` and `Experts.store` set them in their formats.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    group: Group = ALONE
    defers_weights: bool = False

    @property
    def cache_dtype(self) -> torch.dtype:
        """Returns the dtype of keys and values in the cache."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def empty_weight(self, *shape: int) -> torch.Tensor:
        """Returns a weight that is not initialised, without memory where weights are deferred."""
        device = "meta" if self.defers_weights else self.device
        return torch.empty(shape, device=device, dtype=self.dtype)

    def share(self, count: int, name: str) -> int:
        """Returns this rank's part of a number of outputs or heads. Raises ModelError where the ranks cannot
        have equal parts."""
        size = self.group.size
        if count % size > 0:
            raise ModelError(
                f"the model has {count:,} {name}, which {size} ranks cannot share alike; take a number of ranks that divides it"
            )
        return count // size

    def copies(self, num_heads: int) -> int:
        """Returns the number of ranks that have the same head, if there are fewer heads than ranks and their
        number divides that of the ranks; else 1."""
        return max(1, self.group.size // num_heads) if self.group.size % num_heads == 0 else 1

    def linear(
        self, outputs: Mapping[str, int], inputs: int, *, has_bias: bool = False, is_gate: bool = False
    ) -> Linear:
        """Returns a layer with parameters that are not initialised, of this rank's share of the outputs.

        outputs: by the path of each parameter that the layer keeps fused, its number of outputs over all
        ranks, in order. is_gate: see `Linear`. Raises ModelError as `share` does.
        """
        own = {path: self.share(count, f"outputs of {path}") for path, count in outputs.items()}
        total = sum(own.values())
        weight = self.empty_weight(total, inputs)
        return Linear(weight, self.empty(total) if has_bias else None, outputs=own, is_gate=is_gate)
