"""Imports Triton if it is installed, and decides which tensors Triton computes and which the twins.

Knows no operation. Without Triton (macOS) the kernels remain plain functions that are never called.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

try:
    import triton
    import triton.experimental.gluon.language as gl
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    triton = tl = gluon = gl = hopper = mma_v2 = TensorDescriptor = None

_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Kernel(Protocol):
    """A compiled function. It is launched as kernel[grid](...), and other kernels call it directly."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def jit(function: Callable[..., Any]) -> Kernel:
    """Returns the function compiled by Triton, or itself without Triton."""
    return cast(Kernel, function if triton is None else triton.jit(function))


def jit_once_for(*names: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Like `jit`, but the named arguments cause no further specialisations: neither integers that are 1 or
    divisible by 16, nor pointers that are not aligned to 16 bytes."""

    def wrap(function: Callable[..., Any]) -> Kernel:
        if triton is None:
            return cast(Kernel, function)
        return cast(
            Kernel, triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)
        )

    return wrap


def gluon_jit_once_for(*names: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Like `jit_once_for`, for Gluon, Triton's lower-level language."""

    def wrap(function: Callable[..., Any]) -> Kernel:
        return cast(Kernel, function if gluon is None else gluon.jit(function, do_not_specialize=names))

    return wrap


def constexpr_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function of constants that is called while a Gluon kernel is compiled."""
    return function if gluon is None else cast(Callable[..., Any], gluon.constexpr_function(function))


def takes_triton(tensor: torch.Tensor) -> bool:
    """Returns whether Triton computes the tensor: it is on CUDA, or TRITON_INTERPRET=1 was set before the
    first import."""
    return triton is not None and (tensor.is_cuda or _IS_INTERPRETED)


def falls_back_to(twin: Callable[_P, _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a launcher call its twin if Triton does not take the first tensor among the arguments.
    Launchers of operations that run in every layer decide for themselves, without the search."""

    def wrap(launch: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(launch)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            first = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            return launch(*args, **kwargs) if takes_triton(first) else twin(*args, **kwargs)

        return call

    return wrap


def takes_gluon(tensor: torch.Tensor) -> bool:
    """Returns whether Gluon computes the tensor: it is on CUDA; nothing interprets Gluon."""
    return gluon is not None and tensor.is_cuda and not _IS_INTERPRETED


def check_dense(*tensors: torch.Tensor) -> None:
    """Asserts that the tensors are contiguous, because kernels compute their addresses from the shape
    alone."""
    for tensor in tensors:
        assert tensor.is_contiguous(), (tuple(tensor.shape), tensor.stride())


def blocks_of(size: int, block: int) -> int:
    """Returns the number of blocks of `block` elements that cover `size`."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def warps_of(block: int) -> int:
    """Returns the number of warps of a program that reads a row of `block` elements once."""
    return min(max(block // 512, 1), 16)


__all__ = [
    "Kernel",
    "TensorDescriptor",
    "blocks_of",
    "check_dense",
    "constexpr_function",
    "falls_back_to",
    "gl",
    "gluon_jit_once_for",
    "hopper",
    "jit",
    "jit_once_for",
    "mma_v2",
    "power_of_two",
    "takes_gluon",
    "takes_triton",
    "tl",
    "warps_of",
]
