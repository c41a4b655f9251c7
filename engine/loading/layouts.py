"""Reads the values of a quantised weight from its parts, by layout: codes less zero points, times scales, in
float32.

The layouts are those of transformers' FineGrainedFP8Config, compressed-tensors 0.20, ModelOpt, GPTQModel and
AutoAWQ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Protocol

import torch

from headway.engine.loading.files import Reader, Span, spans_within
from headway.engine.models.quantization import Block, Layout, Quantization
from headway.engine.protocol.errors import ModelError

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the positions of AWQ outputs within a word
EVERYTHING = slice(None)
FLOATS = {"F32", "BF16", "F16"}
EXPONENTS = {"U8", "F8_E8M0"}  # scales that are powers of two
# The ends of the names of the parts, by layout: those that every weight has, and those that it may have.
PARTS: Mapping[Layout, tuple[frozenset[str], frozenset[str]]] = {
    "scaled": (frozenset({"weight"}), frozenset({"weight_scale_inv", "weight_scale", "weight_zero_point"})),
    "packed": (
        frozenset({"weight_packed", "weight_scale", "weight_shape"}),
        frozenset({"weight_zero_point", "weight_g_idx"}),
    ),
    "gptq": (frozenset({"qweight", "qzeros", "scales"}), frozenset({"g_idx"})),
    "awq": (frozenset({"qweight", "qzeros", "scales"}), frozenset()),
}
CODES = ("F8_E4M3", "I8")
WIDTHS = (4, 8)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the files."""

    name: str
    reader: Reader

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.reader.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return self.reader.get_slice(self.name).get_dtype()

    def read(self, rows: slice = EVERYTHING, columns: slice = EVERYTHING) -> torch.Tensor:
        """Returns the tensor. rows, columns: the part to be read of a matrix."""
        if len(self.shape) != 2:
            return self.reader.get_tensor(self.name)
        return self.reader.get_slice(self.name)[rows, columns]

    def checked(self, dtypes: Collection[str], *shapes: tuple[int, ...]) -> Part:
        """Returns itself. Raises ModelError unless it has one of these dtypes and one of these shapes, if
        any."""
        if self.dtype not in dtypes:
            raise self.fault(f"is {self.dtype}, not {' or '.join(sorted(dtypes))}")
        if shapes and self.shape not in shapes:
            raise self.fault(f"is {list(self.shape)}, not {' or '.join(map(str, map(list, shapes)))}")
        return self

    def scales(self, rows: slice = EVERYTHING, columns: slice = EVERYTHING) -> torch.Tensor:  # float32
        """Reads as `read` does. Raises ModelError for a scale that is zero, infinite or not a number."""
        values = self.read(rows, columns)
        if self.dtype in EXPONENTS:
            exponents = values.view(torch.uint8)
            values = torch.where(exponents == 255, torch.nan, torch.exp2(exponents.double() - 127))
        values = values.float()
        if not bool((values.isfinite() & (values != 0)).all()):
            raise self.fault("has a scale that is zero, infinite or not a number")
        return values

    def fault(self, what: str) -> ModelError:
        return ModelError(
            f"{self.name} {what}; check that config.json belongs to these weights, or fetch them again"
        )


class Coded(NamedTuple):
    """A weight as kernels can read it: the bits of float8_e4m3fn, or integers from 0 to 15."""

    bits: int  # 8, or 4
    codes: torch.Tensor  # [outputs, inputs] uint8
    scales: torch.Tensor  # [outputs, groups] float32
    zeros: torch.Tensor  # [outputs, groups], of integers


# Codes [n, inputs] uint8, zero points [n, groups] and scales [n, groups] float32 of some outputs.
Grouped = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Codes(Protocol):
    """A layout's reader of values."""

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (outputs, inputs)."""

    @property
    def scale_dtype(self) -> str: ...

    @property
    def code_bits(self) -> int | None:
        """Returns the bits of a code; None where kernels read none of the kind."""

    def values(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Returns the values of some outputs, [last - first, inputs] float32."""

    def coded(self, first: int, last: int, device: torch.device) -> Coded | None:
        """Returns the codes of some outputs; None where kernels read none of the kind."""


class Scaled:
    """Codes of 8 bits, with scales of the whole weight, of each output, of blocks or of groups of inputs."""

    def __init__(self, layer: str, parts: Mapping[str, Part], quantization: Quantization) -> None:
        has_integers = quantization.method == "compressed-tensors"
        self._weight = parts["weight"].checked(CODES if has_integers else CODES[:1])
        if len(self._weight.shape) != 2 or 0 in self._weight.shape:
            raise self._weight.fault(f"is {list(self._weight.shape)}, not a matrix")
        outputs, inputs = self.shape = self._weight.shape[0], self._weight.shape[1]
        self._scale = _one_of(layer, parts, "weight_scale_inv", "weight_scale").checked(FLOATS | EXPONENTS)
        self.scale_dtype = self._scale.dtype
        blocks: dict[tuple[int, ...], Block] = {}  # by the shape of the scales
        if "tensor" in quantization.strategies:
            blocks |= dict.fromkeys([(), (1,), (1, 1)], (outputs, inputs))
        if "channel" in quantization.strategies:
            blocks |= dict.fromkeys([(outputs,), (outputs, 1)], (1, inputs))
        for rows, columns in quantization.blocks:
            of_rows, of_columns = ceil(outputs / rows), ceil(inputs / columns)
            # ModelOpt has four dimensions.
            blocks |= dict.fromkeys([(of_rows, of_columns), (of_rows, 1, of_columns, 1)], (rows, columns))
        for size in quantization.group_sizes:
            blocks[outputs, ceil(inputs / size)] = 1, size
        if not blocks:
            raise self._scale.fault(f"is {list(self._scale.shape)}, and config.json gives no shape for it")
        self._block = blocks[self._scale.checked(FLOATS | EXPONENTS, *blocks).shape]
        self._zeros = parts.get("weight_zero_point")
        if self._zeros is not None:
            self._zeros.checked({"I8"}, self._scale.shape)
        is_read = self._weight.dtype == CODES[0] and inputs % self._block[1] == 0
        self.code_bits: int | None = 8 if is_read else None

    def values(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        values = self._weight.read(slice(first, last)).to(device).float()
        if self._zeros is not None:
            _apply(
                torch.Tensor.sub_, values, self._of_outputs(self._zeros.read(), first, last), self._block[1]
            )
        return _apply(
            torch.Tensor.mul_, values, self._of_outputs(self._scale.scales(), first, last), self._block[1]
        )

    def coded(self, first: int, last: int, device: torch.device) -> Coded | None:
        if self.code_bits is None:
            return None
        scales = self._of_outputs(self._scale.scales(), first, last).to(device)
        codes = self._weight.read(slice(first, last)).to(device).view(torch.uint8)
        return Coded(8, codes, scales, torch.zeros_like(scales))

    def _of_outputs(self, grid: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """grid: one value a block. Returns the values of some outputs, [last - first, blocks of inputs]."""
        rows, columns = self._block
        return grid.reshape(-1, ceil(self.shape[1] / columns))[torch.arange(first, last) // rows]


class Integers(ABC):
    """Integers of 4 or 8 bits in words, with scales of groups of inputs."""

    shape: tuple[int, int]
    scale_dtype: str
    _bits: int
    _groups: Groups

    @property
    def code_bits(self) -> int | None:
        return 4 if self._bits == 4 else None

    def values(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        return self._groups.expanded(*self._parts(first, last, device))

    def coded(self, first: int, last: int, device: torch.device) -> Coded | None:
        if self._bits != 4 or not self._groups.follow_each_other:
            return None
        codes, zeros, scales = self._parts(first, last, device)
        return Coded(self._bits, codes, scales.to(codes.device), zeros.to(codes.device))

    @abstractmethod
    def _parts(self, first: int, last: int, device: torch.device) -> Grouped:
        """Returns codes, zero points and scales of some outputs."""


class Packed(Integers):
    """Integers of 4 or 8 bits in words along the inputs, as compressed-tensors has them, with scales of an
    output or of groups of its inputs."""

    def __init__(self, layer: str, parts: Mapping[str, Part], quantization: Quantization) -> None:
        words = parts["weight_packed"].checked({"I32"})
        stated = parts["weight_shape"].checked({"I64", "I32"}, (2,)).read().tolist()
        outputs, inputs = self.shape = stated[0], stated[1]
        if min(stated) < 1:
            raise parts["weight_shape"].fault(f"says {outputs} x {inputs}")
        self._words, self._bits = words, _width(words, {
            bits: (outputs, ceil(inputs * bits / WORD_BITS)) for bits in WIDTHS
        })  # fmt: skip
        self._scale = parts["weight_scale"].checked(FLOATS)
        self.scale_dtype = self._scale.dtype
        self._groups = Groups(
            self._scale, self._scale.shape, parts.get("weight_g_idx"), self.shape, quantization
        )
        self._zeros = parts.get("weight_zero_point")
        if self._zeros is not None:
            self._zeros.checked({"I32"}, (ceil(outputs * self._bits / WORD_BITS), self._groups.count))

    def _parts(self, first: int, last: int, device: torch.device) -> Grouped:
        rows = slice(first, last)
        codes = unpacked(self._words.read(rows).to(device), self._bits)[:, : self.shape[1]]
        # Zero points are stored as codes are, with the same offset.
        zeros = torch.full((last - first, self._groups.count), 1 << (self._bits - 1))
        if self._zeros is not None:
            words, skipped = _word_range(first, last, self._bits)
            zeros = unpacked(self._zeros.read(words).T, self._bits).T[skipped : skipped + last - first]
        return codes, zeros, self._scale.scales(rows)


class Gptq(Integers):
    """Integers of 4 or 8 bits in words along the inputs, inputs first, as GPTQ has them. `g_idx` gives the
    group of each input."""

    def __init__(self, layer: str, parts: Mapping[str, Part], quantization: Quantization) -> None:
        self._words, self._scale = parts["qweight"].checked({"I32"}), parts["scales"].checked(FLOATS)
        words, grid = self._words.shape, self._scale.shape
        if len(words) != 2 or len(grid) != 2 or grid[1] != words[1] or 0 in (*words, *grid):
            raise self._scale.fault(f"is {list(grid)}, beside a qweight of {list(words)}")
        self._zeros, (num_groups, outputs) = parts["qzeros"].checked({"I32"}), grid
        self._bits = _width(
            self._zeros, {bits: (num_groups, ceil(outputs * bits / WORD_BITS)) for bits in WIDTHS}
        )
        self.shape, self.scale_dtype = (outputs, words[0] * WORD_BITS // self._bits), self._scale.dtype
        self._groups = Groups(self._scale, grid[::-1], parts.get("g_idx"), self.shape, quantization)
        self._adds_one = quantization.adds_one

    def _parts(self, first: int, last: int, device: torch.device) -> Grouped:
        columns = slice(first, last)
        codes = unpacked(self._words.read(columns=columns).to(device).T, self._bits)
        words, skipped = _word_range(first, last, self._bits)
        stored = unpacked(self._zeros.read(columns=words), self._bits)[:, skipped : skipped + last - first].T
        zeros = (stored + self._adds_one) & ((1 << self._bits) - 1)  # of 8 bits, like the codes
        return codes, zeros, self._scale.scales(columns=columns).T


class Awq(Integers):
    """Integers of 4 bits in words along the outputs, inputs first, in the order of AWQ's GEMM kernels."""

    _bits = 4

    def __init__(self, layer: str, parts: Mapping[str, Part], quantization: Quantization) -> None:
        self._words, self._scale = parts["qweight"].checked({"I32"}), parts["scales"].checked(FLOATS)
        words, grid = self._words.shape, self._scale.shape
        per_word = WORD_BITS // self._bits
        if len(words) != 2 or len(grid) != 2 or grid[1] != words[1] * per_word or 0 in (*words, *grid):
            raise self._scale.fault(f"is {list(grid)}, beside a qweight of {list(words)}")
        self.shape, self.scale_dtype = (grid[1], words[0]), self._scale.dtype
        self._zeros = parts["qzeros"].checked({"I32"}, (grid[0], words[1]))
        self._groups = Groups(self._scale, grid[::-1], None, self.shape, quantization)

    def _parts(self, first: int, last: int, device: torch.device) -> Grouped:
        words, skipped = _word_range(first, last, self._bits)
        codes, zeros = (
            unpacked(part.read(columns=words).to(device), self._bits, AWQ_ORDER)[
                :, skipped : skipped + last - first
            ].T
            for part in (self._words, self._zeros)
        )
        return codes, zeros, self._scale.scales(columns=slice(first, last)).T


class Groups:
    """The groups of inputs of an output that share a scale. count: the number of groups."""

    def __init__(
        self,
        scale: Part,
        grid: tuple[int, ...],  # (outputs, groups): the shape of the scales
        listed: Part | None,  # the group of each input, [inputs]
        shape: tuple[int, int],
        quantization: Quantization,
    ) -> None:
        """Raises ModelError for scales that no group size of config.json gives."""
        outputs, inputs = shape
        sizes = {ceil(inputs / size): size for size in quantization.group_sizes}
        if "channel" in quantization.strategies:
            sizes[1] = inputs
        if listed is None:
            sizes = {count: size for count, size in sizes.items() if inputs % size == 0}
        if grid not in {(outputs, count) for count in sizes}:
            stated = " or ".join(map(str, sizes)) or "no"
            raise scale.fault(
                f"is {list(scale.shape)} of a weight of {outputs} x {inputs}; by config.json an output has {stated} groups of "
                "inputs"
            )
        self.count = grid[1]
        self._size = sizes[self.count]
        self._listed = None if listed is None else listed.checked({"I32", "I64"}, (inputs,))

    def expanded(
        self,
        codes: torch.Tensor,  # [n, inputs] uint8
        zeros: torch.Tensor,  # [n, groups] integers
        scales: torch.Tensor,  # [n, groups] float32
    ) -> torch.Tensor:  # [n, inputs] float32
        values, groups = codes.float(), self._order()
        zeros, scales = zeros.to(values.device).float(), scales.to(values.device)
        if groups is not None:
            groups = groups.to(values.device)
            return values.sub_(zeros.index_select(1, groups)).mul_(scales.index_select(1, groups))
        _apply(torch.Tensor.sub_, values, zeros, self._size)
        return _apply(torch.Tensor.mul_, values, scales, self._size)

    @property
    def follow_each_other(self) -> bool:
        return self._order() is None

    def _order(self) -> torch.Tensor | None:  # [inputs] int64
        """Returns the group of each input; None where groups follow each other."""
        if self._listed is None:
            return None
        groups = self._listed.read().long()
        if not bool(((groups >= 0) & (groups < self.count)).all()) and not bool((groups == -1).all()):
            raise self._listed.fault(f"has groups that are not from 0 to {self.count - 1}")
        # The list may be unfilled if inputs were quantised in their order.
        is_in_order = torch.equal(groups, torch.arange(len(groups)) // self._size)
        return None if is_in_order or bool((groups == groups[0]).all()) else groups


class SomeRows:
    """The Codes of some outputs of a weight."""

    def __init__(self, codes: Codes, spans: Sequence[Span]) -> None:
        self._codes, self._spans = codes, spans
        self.shape = sum(count for _, count in spans), codes.shape[1]
        self.scale_dtype, self.code_bits = codes.scale_dtype, codes.code_bits

    def values(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        wanted = spans_within(self._spans, first, last)
        return torch.cat([self._codes.values(start, start + count, device) for start, count in wanted])

    def coded(self, first: int, last: int, device: torch.device) -> Coded | None:
        wanted = spans_within(self._spans, first, last)
        return joined([self._codes.coded(start, start + count, device) for start, count in wanted])


def joined(pieces: Sequence[Coded | None]) -> Coded | None:
    """Concatenates the outputs of the pieces; None if one of them is None."""
    read = [piece for piece in pieces if piece is not None]
    if len(read) < len(pieces):
        return None
    return Coded(read[0].bits, *(torch.cat(parts) for parts in list(zip(*read, strict=True))[1:]))


READERS: Mapping[Layout, Callable[[str, Mapping[str, Part], Quantization], Codes]] = {
    "scaled": Scaled, "packed": Packed, "gptq": Gptq, "awq": Awq,
}  # fmt: skip


def unpacked(
    words: torch.Tensor,  # [n, words] int32
    bits: int,  # 4 or 8
    order: tuple[int, ...] | None = None,
) -> torch.Tensor:  # [n, words * 32 / bits] uint8
    """Returns the codes of the words. order: their positions within a word, from its lowest bits on; None:
    one after the other."""
    codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # lowest bits first
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    return codes if order is None else codes.view(len(codes), -1, len(order))[:, :, list(order)].flatten(1)


def _apply(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    values: torch.Tensor,  # [n, inputs] float32, changed in place
    grid: torch.Tensor,  # [n, ceil(inputs / size)], on any device
    size: int,
) -> torch.Tensor:
    """Changes each group of `size` values of an output by its value of the grid. Returns the values."""
    inputs, grid = values.shape[1], grid.to(values.device)
    if inputs % size == 0:
        change(values.view(len(values), -1, size), grid[:, :, None])
        return values
    return change(values, grid.repeat_interleave(size, 1)[:, :inputs])


def _one_of(layer: str, parts: Mapping[str, Part], *kinds: str) -> Part:
    found = [parts[kind] for kind in kinds if kind in parts]
    if len(found) != 1:
        what = "has no scale" if not found else f"has {len(found)} scales"
        raise ModelError(
            f"{layer}.weight is {parts['weight'].dtype} and {what} ({' or '.join(kinds)}); fetch the weights again"
        )
    return found[0]


def _width(words: Part, shapes: Mapping[int, tuple[int, int]]) -> int:
    """Returns the bits of a code. shapes: the expected shape of the words, by bits."""
    fitting = [bits for bits, shape in shapes.items() if shape == words.shape]
    if len(fitting) != 1:
        wanted = " or ".join(f"{list(shape)} ({bits} bits)" for bits, shape in shapes.items())
        raise words.fault(f"is {list(words.shape)}, not {wanted}")
    return fitting[0]


def _word_range(first: int, last: int, bits: int) -> tuple[slice, int]:
    """Returns the words that hold the codes, and the number of earlier codes in the first word."""
    begin = first * bits // WORD_BITS
    return slice(begin, ceil(last * bits / WORD_BITS)), first - begin * WORD_BITS // bits
