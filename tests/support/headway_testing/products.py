"""Inputs and weights of linear layers, and the tolerances of their products against float64."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headway.kernels import GateActivation

# The functions of gates, as PyTorch computes them.
ACTIVATIONS: dict[GateActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# Relative to the root mean square of the result; bfloat16 rounds results to 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def tensors(
    rows: int, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs + inputs)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return x.to(device, dtype), weight.to(device, dtype)


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    error = (result.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) <= TOLERANCE[result.dtype]


def assert_each_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares part by part, so that one wrong part of many right ones shows."""
    scale = expected.abs() + expected.square().mean().sqrt()
    assert float(((result.double() - expected).abs() / scale).max()) <= 2 * TOLERANCE[result.dtype]


class Place:
    """The part of a wider tensor to which a product is written, and around which nothing may be written."""

    def __init__(self, rows: int, outputs: int, like: torch.Tensor) -> None:
        self._around = torch.full((rows + 2, outputs + 16), 7.0, dtype=like.dtype, device=like.device)
        self.out = self._around[1:-1, 8:-8]

    def assert_around_it_nothing_is_written(self) -> None:
        """Overwrites the product, too."""
        self.out.fill_(7.0)
        assert bool((self._around == 7.0).all())


def beside_rubbish(x: torch.Tensor) -> torch.Tensor:
    """Returns the same values as rows of a wider tensor of NaN."""
    rows, inputs = x.shape
    wide = torch.full((rows + 3, inputs + 64), torch.nan, dtype=x.dtype, device=x.device)
    wide[1 : rows + 1, 64:] = x
    return wide[1 : rows + 1, 64:]


def assert_each_launch_waits(
    compute: Callable[[torch.Tensor, bool], torch.Tensor], x: torch.Tensor, generator: torch.Generator
) -> None:
    """compute, of a tensor and whether the host waits between launches, in a graph without, with other inputs
    each time: nothing is read that was there before."""
    out = torch.empty_like(x)
    compute(x, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(compute(x, False))
    for _ in range(20):
        x.copy_(torch.randn(x.shape, generator=generator, device=x.device))
        graph.replay()
        assert torch.equal(out, compute(x, True))
