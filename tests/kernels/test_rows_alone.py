"""On a CPU a row has the bits that it has alone, among any others, at any place and with any number of
threads.

PyTorch cuts a large tensor into a part for each thread. Some of its functions compute what is left of a part
after the last whole vector by other instructions, so that an element's last bit depends on where it stands.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headway.engine.layers.soft_cap import soft_capped
from headway.engine.sampling.sampler import score_tokens
from headway.kernels.reference import (
    add_rms_norm,
    gated_linear,
    gated_mul,
    gated_rms_norm,
    gumbel_noise,
    rms_norm,
    sigmoid_mul,
)
from headway.kernels.reference._activations import sigmoid, silu, softplus

ROOT = Path(__file__).resolve().parents[2]
TYPES = (torch.float32, torch.float64)  # a CPU promises nothing in 16 bits
# Halves of 500 are cut within a row where threads share them; the other is no multiple of a vector.
WIDTHS = (334, 1000)
NUM_ELEMENTS = 5 * 2**15  # ATen gives a thread 2**15 or more
EPSILON = 1e-6

# These depend on the place, so that nothing that a row goes through may call them; silu and gelu
# where the parts are chosen for them.
BY_PLACE = {"sigmoid", "silu", "softplus", "gelu", "mish", "elu", "selu", "celu", "logsigmoid", "hardswish", "pow", "float_power"}  # fmt: skip
EXCEPTIONS = {("kernels/reference/_activations.py", name) for name in ("silu", "gelu")}
PLACES = (
    "kernels/reference",
    "engine/layers",
    "engine/models",
    "engine/sampling",
    "engine/speculation",
    "engine/state",
)


def weights(x: torch.Tensor, width: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, width).to(x.dtype)


def gated_sigmoid(x: torch.Tensor) -> torch.Tensor:
    values = torch.ones(len(x), 1, x.shape[1], dtype=x.dtype)
    sigmoid_mul(values, x[:, None])
    return values


# The functions of PyTorch that the twins and the sampler call on rows, then the twins that do more than one
# of them.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + EPSILON),
    "square": torch.square,
    "division": lambda x: 3 / (x.abs() + 1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "softmax": lambda x: x.softmax(-1),
    "soft_capped": lambda x: soft_capped(x.clone(), 2.0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "sum of the dimension before": lambda x: (x[:, :32, None] * weights(x, 5)).sum(-2),
    "addcmul": lambda x: x.clone().addcmul_(x, x.round(), value=-1),
    "rms_norm": lambda x: rms_norm(x, weights(x, x.shape[1]), EPSILON),
    "rms_norm with an offset": lambda x: rms_norm(x, weights(x, x.shape[1]), EPSILON, unit_offset=True),
    "add_rms_norm": lambda x: add_rms_norm(x, x.clone(), weights(x, x.shape[1]), EPSILON),
    "gated_rms_norm": lambda x: gated_rms_norm(*x[:, None].chunk(2, -1), weights(x, x.shape[1] // 2), EPSILON),
    "gated_mul": gated_mul,
    "gated_mul by gelu_tanh": lambda x: gated_mul(x, "gelu_tanh"),
    "gated_linear": lambda x: gated_linear(x[:, :1], weights(x, x.shape[1])[:, None]),
    "sigmoid_mul": gated_sigmoid,
    "silu": silu,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "gumbel_noise": lambda x: gumbel_noise((x[:, 0] * 1e6).long(), x[:, 1].long().abs(), x.shape[1]),
    "score_tokens": lambda x: score_tokens(x, (x[:, 0] * 1e6).long() % x.shape[1]),
}  # fmt: skip


@pytest.fixture(
    params=[
        pytest.param(1, marks=pytest.mark.long),
        2,
        pytest.param(3, marks=pytest.mark.long),
        pytest.param(4, marks=pytest.mark.slow),
    ]
)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_bits_that_it_has_alone(name: str, num_threads: int) -> None:
    function = FUNCTIONS[name]
    for dtype in TYPES:
        for width in WIDTHS:
            num_rows = NUM_ELEMENTS // width + 3
            x = (3 * torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width))).to(dtype)
            together = function(x)
            borders = [
                part * num_rows // num_threads + off for part in range(num_threads + 1) for off in (-1, 0, 1)
            ]
            for row in {
                min(max(row, 0), num_rows - 1) for row in (*borders, *range(0, num_rows, num_rows // 4))
            }:
                assert torch.equal(function(x[row : row + 1])[0], together[row]), (dtype, width, row)
            for first, end in ((1, num_rows), (num_rows // 3, num_rows - 1)):
                assert torch.equal(function(x[first:end]), together[first:end]), (dtype, width, first, end)


def test_no_row_goes_through_a_function_whose_bits_depend_on_the_place() -> None:
    found = {
        (str(path.relative_to(ROOT)), node.attr)
        for place in PLACES
        for path in (ROOT / place).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.removesuffix("_") in BY_PLACE
    }
    assert found == EXCEPTIONS
