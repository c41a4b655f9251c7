"""Where parameters live, and the maker of all linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headway.engine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and dtype of parameters, and the dtype of the KV cache. The device "meta" gives shapes
    without memory.

    kv_dtype: None for that of the parameters.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None

    @property
    def cache_dtype(self) -> torch.dtype:
        """Returns the dtype of keys and values in the cache."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def linear(self, outputs: Mapping[str, int], inputs: int, *, has_bias: bool = False) -> Linear:
        """Returns a layer with parameters that are not initialised.

        outputs: by the path of each parameter that the layer keeps fused, its number of outputs, in order.
        """
        total = sum(outputs.values())
        return Linear(self.empty(total, inputs), self.empty(total) if has_bias else None, outputs=outputs)
