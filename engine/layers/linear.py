"""A linear layer with a weight of any format.

A row's result depends on no other row, not even in its last bit, or a text would depend on what is served with it: on a CPU
always, on a GPU where the weight is batch-invariant, as it is by default. None of this holds for the formats of drafts, which may be wrong, and so may depend on
what else is drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from headway.kernels import (
    Activation,
    DenseWeight,
    Epilogue,
    Float8Weight,
    Weight,
    adds_residual,
    linear,
    rows_of_each_kernel,
)


class Linear:
    """x W^T + b. Mutable: after loading, `store` and `make_batch_invariant` change the weight's format."""

    def __init__(
        self,
        weight: torch.Tensor | Weight,  # [out, in]
        bias: torch.Tensor | None = None,  # [out]
    ) -> None:
        self.bias = bias
        self._stored: Weight = DenseWeight(weight) if isinstance(weight, torch.Tensor) else weight

    @property
    def stored(self) -> Weight:
        """The weight in its format."""
        return self._stored

    @property
    def weight(self) -> torch.Tensor:  # [out, in]
        assert isinstance(self._stored, DenseWeight), "the weight was given up for another format"
        return self._stored.values

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0]

    def parts(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Returns views of the weight and the bias by path, some outputs each, in order. sizes: the outputs of each path."""
        tensors = {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
        return {
            f"{path}.{kind}": part
            for kind, tensor in tensors.items()
            for path, part in zip(sizes, tensor.split_with_sizes(list(sizes.values())), strict=True)
        }

    def __call__(self, x: Activation | torch.Tensor) -> torch.Tensor:  # [n, in] -> [n, out]
        activation = x if isinstance(x, Activation) else Activation(x)
        return linear(activation, self._stored, Epilogue(self.bias)).values

    def gated(self, x: Activation) -> torch.Tensor:  # [n, in] -> [n, out / 2]
        """Returns silu of the first half of the outputs times the second half."""
        return linear(x, self._stored, Epilogue(self.bias, "silu_mul")).values

    def added_to(
        self,
        residual: torch.Tensor,  # [n, out], in place where the product adds itself
        x: torch.Tensor,  # [n, in]
    ) -> torch.Tensor | None:
        """Returns what is still to be added to the residual, [n, out]; None: it was added."""
        if not adds_residual(x, self._stored, has_bias=self.bias is not None):
            return self(x)
        linear(Activation(x), self._stored, Epilogue(self.bias, residual=residual), out=residual)
        return None

    def store(self, weight: Weight) -> None:
        """From now on the layer multiplies by this weight; the one before is given up."""
        self._stored = weight

    def make_batch_invariant(self, *, is_library_ordered: bool) -> None:
        """On a GPU, from now on, a row's result is the same among any number of others. Not in float64, nor in float8.

        is_library_ordered: the library's products of this weight are known to have the same bits.
        """
        if isinstance(self._stored, DenseWeight):
            self._stored = DenseWeight(self._stored.values, True, is_library_ordered)

    @property
    def is_batch_invariant(self) -> bool:
        return isinstance(self._stored, DenseWeight) and self._stored.is_batch_invariant

    @property
    def input_step(self) -> torch.Tensor | None:  # [1] float32
        """The step of which inputs are multiples, float8_e4m3fn each; None: inputs are of the weight's dtype."""
        return self._stored.step if isinstance(self._stored, Float8Weight) else None


def compile_linears(linears: Iterable[Linear], most_rows: int) -> None:
    """Compiles the kernels that the number of rows chooses, up to that number, by multiplying zeros."""
    kinds = {(layer.weight.shape, layer.bias is None): layer for layer in linears if layer.is_batch_invariant}
    for layer in kinds.values():
        for num_rows in rows_of_each_kernel(layer.stored, most_rows):
            layer(layer.weight.new_zeros(num_rows, layer.weight.shape[1]))
