"""A linear layer with a weight of any format.

A row's result does not depend on other rows, not even in its last bit; otherwise a text would depend on what
is served with it. This holds always on a CPU, and on a GPU if the weight is batch-invariant, which is the
default. It does not hold for the formats of drafts, which may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import prod
from typing import Literal

import torch

from headway.engine.protocol.config import CpuWeights
from headway.kernels import (
    Activation,
    DenseWeight,
    Epilogue,
    Float8Weight,
    GateActivation,
    Int4ScreenedWeight,
    IntegerCpuWeight,
    PackedCpuWeight,
    QuantizedWeight,
    Weight,
    adds_residual,
    can_be_integers,
    can_be_packed,
    expanded_weight,
    has_order,
    integer_cpu_bytes,
    integer_cpu_weight,
    least_packed_rows,
    library_is_ordered,
    linear,
    pack_weight,
    rows_of_each_kernel,
)

ROUTER = "feed_forward.router"  # the path of its parameters
Kind = tuple[tuple[int, int], bool]  # the shape of a weight, and whether there is a bias


class Linear:
    """x W^T + b. Mutable: after loading, `finish`, `store` and `order_sums` change the weight's format.

    Only modules of this package read the dense weight; others use its shape, its bytes and its parameters.
    """

    def __init__(
        self,
        weight: torch.Tensor | Weight,  # [out, in]
        bias: torch.Tensor | None = None,  # [out]
        *,
        outputs: Mapping[str, int] | None = None,
        is_gate: bool = False,
    ) -> None:
        """outputs: see `Placement.linear`; None for a tied lm_head, whose parameters are the embedding's.
        is_gate: the layer is called by `gated` alone."""
        self.bias, self.is_gate = bias, is_gate
        self._stored: Weight = DenseWeight(weight) if isinstance(weight, torch.Tensor) else weight
        self._outputs = outputs or {}
        self.shape = _shape_of(self._stored)

    @property
    def stored(self) -> Weight:
        """The weight in its format."""
        return self._stored

    @property
    def weight(self) -> torch.Tensor:  # [out, in]
        assert isinstance(self._stored, DenseWeight), "the weight was given up for another format"
        return self._stored.values

    @property
    def is_lm_head(self) -> bool:
        """Returns whether the outputs are logits; a tied lm_head has no parameters of its own."""
        return not self._outputs or "lm_head" in self._outputs

    @property
    def num_weights(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the weight in its format, without its expanded copy."""
        stored = self._stored
        return _nbytes_of(stored._replace(many=None) if isinstance(stored, QuantizedWeight) else stored)

    @property
    def expanded_bytes(self) -> int:
        """Returns the bytes that `keep_expanded` takes."""
        return self.num_weights * torch.bfloat16.itemsize if self.is_quantized else 0

    @property
    def own_bytes(self) -> int:
        """Returns the bytes of the weight, 0 for a tied lm_head, whose weight is the embedding's."""
        return self.nbytes if self._outputs else 0

    @property
    def kind(self) -> Kind:
        """Returns the properties by which kernels are chosen for layers of one format."""
        return self.shape, self.bias is not None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters by path, as views where outputs are fused. A weight that is not dense has
        only biases, and the weights of outputs that are not quantised."""
        if not self._outputs:
            return {}
        weight = None
        if isinstance(self._stored, QuantizedWeight):
            weight = self._stored.rest
        elif isinstance(self._stored, DenseWeight):
            weight = self._stored.values
        found, ends = {}, list(accumulate(self._outputs.values()))
        for kind, tensor in (("weight", weight), ("bias", self.bias)):
            first = self.shape[0] if tensor is None else self.shape[0] - len(tensor)
            for (path, count), end in zip(self._outputs.items(), ends, strict=True):
                if tensor is not None and end > first:
                    found[f"{path}.{kind}"] = tensor[end - count - first : end - first]
        return found

    @property
    def output_counts(self) -> list[int]:
        """Returns the number of outputs of each parameter that the layer keeps fused, in order."""
        return list(self._outputs.values())

    def __call__(self, x: Activation | torch.Tensor) -> torch.Tensor:  # [n, in] -> [n, out]
        activation = x if isinstance(x, Activation) else Activation(x)
        return linear(activation, self._stored, Epilogue(self.bias)).values

    def gated(self, x: Activation, activation: GateActivation) -> torch.Tensor:  # [n, in] -> [n, out / 2]
        """Returns the activation of the first half of the outputs times the second half."""
        return linear(x, self._stored, Epilogue(self.bias, activation)).values

    def added_to(
        self,
        residual: torch.Tensor,  # [n, out], changed in place if the addition is fused with the product
        x: torch.Tensor,  # [n, in]
    ) -> torch.Tensor | None:
        """Returns the product, [n, out], if it still has to be added to the residual; None if it was
        added."""
        if not adds_residual(x, self._stored, has_bias=self.bias is not None):
            return self(x)
        linear(Activation(x), self._stored, Epilogue(self.bias, residual=residual), out=residual)
        return None

    def zeros(self, num_rows: int) -> torch.Tensor:
        """Returns an input of zeros, [num_rows, in]."""
        like = self._stored.scales if isinstance(self._stored, QuantizedWeight) else self.weight
        return like.new_zeros(
            num_rows, self.shape[1], dtype=torch.bfloat16 if self.is_quantized else like.dtype
        )

    def store(self, weight: Weight) -> None:
        """Replaces the weight by which the layer multiplies."""
        self._stored = weight

    def finish(self, tried: dict[Kind, int | None], cpu_weights: CpuWeights = "full") -> None:
        """Converts the loaded weight to its format on a CPU: integers by cpu_weights, with 8 bits for an
        lm_head, or packed if that gives the same results for any number of rows.

        4 rows through [4096, 256] take 86 us packed, 193 us unpacked, 435 us unpacked with 16 rows (AVX-512,
        one thread). tried: the least numbers of rows that packing needs, as found for other layers; each kind
        is tried once.
        """
        if self.is_quantized:
            return
        if not self._stays_full(cpu_weights) and can_be_integers(self.weight):
            self.store(integer_cpu_weight(self.weight, bits=self._integer_bits(cpu_weights)))
            return
        if not can_be_packed(self.weight):
            return
        if self.kind not in tried:
            tried[self.kind] = least_packed_rows(self.weight, self.bias)
        least_rows = tried[self.kind]
        if least_rows is not None:
            self.store(pack_weight(self.weight, least_rows=least_rows))

    def _stays_full(self, cpu_weights: CpuWeights) -> bool:
        """Routers stay full, since they are small and lose much by rounding."""
        return cpu_weights == "full" or ROUTER in self._outputs

    def _integer_bits(self, cpu_weights: CpuWeights) -> Literal[4, 8]:
        return 4 if cpu_weights == "int4" and not self.is_lm_head else 8

    def saved_bytes(self, cpu_weights: CpuWeights) -> int:
        """Returns the bytes that the integers of `finish` save. A tied lm_head saves none, since its dense
        weight stays as the embedding."""
        if self._stays_full(cpu_weights):
            return 0
        return self.own_bytes - integer_cpu_bytes(self.shape, bits=self._integer_bits(cpu_weights))

    def has_order(self, device: torch.device) -> bool:
        """Returns whether a row's result on that device is independent of the number of other rows, or can be
        made so by `order_sums`."""
        return has_order(self._stored, device)

    def order_sums(self, tried: dict[Kind, bool]) -> None:
        """Makes a row's result on a GPU independent of the number of other rows, where `has_order`.

        tried: whether the library's products have the same bits, as found for other layers; each kind is
        tried once.
        """
        stored = self._stored
        if self.kind not in tried:
            weight = expanded_weight(stored) if isinstance(stored, QuantizedWeight) else self.weight
            tried[self.kind] = library_is_ordered(weight, self.bias)
        if isinstance(stored, QuantizedWeight):
            self._stored = stored._replace(is_library_ordered=tried[self.kind])
        else:
            self._stored = DenseWeight(self.weight, True, tried[self.kind])

    def keep_expanded(self) -> None:
        """Makes many rows multiply by an expanded copy of a quantised weight. The order of sums has been
        chosen before."""
        if isinstance(self._stored, QuantizedWeight):
            expanded = expanded_weight(self._stored)
            many = DenseWeight(expanded, True, self._stored.is_library_ordered)
            self._stored = self._stored._replace(many=many)

    def trust_library(self) -> None:
        """Lets the library multiply many rows by an expanded weight, whatever its order of sums."""
        if isinstance(self._stored, QuantizedWeight):
            self._stored = self._stored._replace(is_library_ordered=True)

    @property
    def is_batch_invariant(self) -> bool:
        if isinstance(self._stored, QuantizedWeight):
            return True
        return isinstance(self._stored, DenseWeight) and self._stored.is_batch_invariant

    @property
    def is_quantized(self) -> bool:
        return isinstance(self._stored, QuantizedWeight)

    @property
    def input_step(self) -> torch.Tensor | None:  # [1] float32
        """Returns the step of inputs in float8_e4m3fn; None: inputs have the weight's dtype."""
        return self._stored.step if isinstance(self._stored, Float8Weight) else None


def compile_linears(linears: Iterable[Linear], most_rows: int) -> None:
    """Compiles the kernels that the number of rows chooses, up to that number, by multiplying zeros."""
    kinds = {layer.kind: layer for layer in linears if layer.is_batch_invariant}
    for layer in kinds.values():
        for num_rows in rows_of_each_kernel(layer.stored, most_rows):
            x = layer.zeros(num_rows)
            if layer.is_gate and layer.is_quantized:
                layer.gated(Activation(x), "silu")
            else:
                layer(x)


def finish_linears(linears: Iterable[Linear], cpu_weights: CpuWeights = "full") -> None:
    """Converts loaded layers to their final format, one by one, so that no second copy of the model
    exists."""
    tried: dict[Kind, int | None] = {}
    for layer in linears:
        layer.finish(tried, cpu_weights)


def _shape_of(weight: Weight) -> tuple[int, int]:
    if isinstance(weight, QuantizedWeight):
        return weight.shape
    assert not isinstance(weight, PackedCpuWeight | IntegerCpuWeight), "a layer is packed once it is loaded"
    outputs, inputs = (weight.exact if isinstance(weight, Int4ScreenedWeight) else weight.values).shape
    return outputs, inputs


def _nbytes_of(weight: Weight) -> int:
    return sum(
        part.nbytes if isinstance(part, torch.Tensor) else _nbytes_of(part)
        for part in weight
        if isinstance(part, torch.Tensor | DenseWeight | Float8Weight)
    )
