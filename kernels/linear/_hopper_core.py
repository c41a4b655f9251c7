"""The core of the skinny GEMMs on Hopper: up to 64 rows (128 with a gate) times a large weight in 16 bits or
float8, which TMA loads to shared memory.

A program has a multiprocessor to itself and loads its first weights before the preceding kernel has ended
(PDL). It waits for that kernel only before it loads inputs, so that memory is read while kernels end and
start. The core is written in Gluon, where copies are issued and waited for separately; nothing interprets it.
Other devices use _skinny_core.py. No launch that is still running may write the weight. Knows no operation
but the product.
"""

from __future__ import annotations

import torch

from headway.kernels.linear._hopper_tiles import WARPS, layout_of_sums, next_turn, thin_product
from headway.kernels.linear.dispatch import (
    COPY_BYTES,
    MAX_ROWS,
    OUTPUTS,
    PAIRED,
    DeviceTraits,
    FusedOperation,
    LinearChoice,
    LinearShape,
    TmaGemmConfig,
    WeightFormat,
    choose,
)
from headway.kernels.runtime._device import is_hopper, memory_bandwidth, multiprocessors, shared_memory_bytes
from headway.kernels.runtime._triton import (
    TensorDescriptor,
    gl,
    gluon_jit_once_for,
    hopper,
    power_of_two,
    takes_gluon,
    takes_triton,
    tl,
)

# The fewest rows of an MMA instruction, so that weights get most of the shared memory.
_MIN_TILE_ROWS = 8
# Programs begin their sums at this number of different inputs: not all load the same inputs at once, but some
# do, which saves L2 traffic. The numbers are for whole sums, for split sums, and for more rows than MAX_ROWS.
# 64 rows of q, k and v take 14.9 us with 4 starts, 15.4 with 16.
_STARTS, _STARTS_OF_PARTS, _STARTS_OF_MANY = 4, 6, 16
# The program of a split sum's last part loads the other partial sums AHEAD copies before its own end. 64 rows
# of `o` take 9.4 us; they took 11.3 when all parts ended at once.
AHEAD = 3
_SWIZZLE_BYTES = 128


@gluon_jit_once_for()
def _fetch_weights(
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    arrival: gl.shared_memory_descriptor,
    weights: gl.shared_memory_descriptor,  # [stages * TILES, OUTPUTS, INPUTS]
    stage: gl.tensor,
    block: gl.tensor,
    first: gl.tensor,
    copy: gl.tensor,
    exists: gl.tensor,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    TILES: gl.constexpr,
    PAIRED: gl.constexpr,
) -> None:
    """Issues the copies of TILES tiles of weights. first: the first output, or with pairs the first run of
    PAIRED outputs in a block."""
    runs: gl.constexpr = OUTPUTS // (2 * PAIRED) if PAIRED > 0 else 0
    for tile in gl.static_range(TILES):
        place = weights.index(stage * TILES + tile)
        if PAIRED > 0:
            paired = place._reinterpret(weights.dtype, [1, runs, 2, PAIRED, INPUTS], weight_desc.layout)
            corner = [block, first + tile * runs, 0, 0, copy * INPUTS]
            hopper.tma.async_copy_global_to_shared(weight_desc, corner, arrival, paired, pred=exists)
        else:
            corner = [first + tile * OUTPUTS, copy * INPUTS]
            hopper.tma.async_copy_global_to_shared(weight_desc, corner, arrival, place, pred=exists)


@gluon_jit_once_for()
def fetch_inputs(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    arrival: gl.shared_memory_descriptor,
    inputs: gl.shared_memory_descriptor,  # [stages, ROWS, INPUTS]
    stage: gl.tensor,
    copy: gl.tensor,
    exists: gl.tensor,
    ROWS: gl.constexpr,
    INPUTS: gl.constexpr,
) -> None:
    halves = inputs.index(stage)._reinterpret(inputs.dtype, [2, ROWS // 2, INPUTS], x_desc.layout)
    hopper.tma.async_copy_global_to_shared(x_desc, [0, 0, copy * INPUTS], arrival, halves, pred=exists)


@gluon_jit_once_for()
def rows_of(num_rows: gl.tensor, ROWS: gl.constexpr, layout: gl.constexpr) -> gl.tuple:
    """Returns (row, is_row), [ROWS] each: the row that `described_rows` loads to each index of a tile, and
    whether that index stores it. 5 rows in a tile of 8 are rows 0, 1, 2, 3, 1, 2, 3, 4, of which all but the
    fifth to seventh are stored."""
    place = gl.arange(0, ROWS, layout=layout)
    is_first = place < ROWS // 2
    row = gl.where(is_first, place, place - ROWS + num_rows)
    return row, gl.where(is_first, place < num_rows, row >= ROWS // 2)


@gluon_jit_once_for()
def open_stream(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    block: gl.tensor,
    first: gl.tensor,
    tile: gl.tensor,  # the program's first tile
    begin: gl.tensor,
    end: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    TILES: gl.constexpr,
    PAIRED: gl.constexpr,
    STAGES: gl.constexpr,
    STARTS: gl.constexpr,
    UNIT: gl.constexpr,
) -> gl.tuple:
    """Fills the STAGES of the pipeline with copies from begin to end - 1, beginning at one of STARTS inputs.

    UNIT copies have the size of one large copy. Weights are loaded before the preceding kernel has ended,
    inputs after it. When this returns, the next kernel may start. The last value of the result is the sums of
    the tiles, zeros so far, [OUTPUTS, ROWS] float32 each in the layout of the tensor cores.
    """
    bits: gl.constexpr = x_desc.dtype.primitive_bitwidth
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits)
    stage_bytes: gl.constexpr = (TILES * OUTPUTS + ROWS) * INPUTS * bits // 8
    weights = gl.allocate_shared_memory(x_desc.dtype, [STAGES * TILES, OUTPUTS, INPUTS], shared)
    inputs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, INPUTS], shared)
    arrivals = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    copies = end - begin
    own = begin + tile % STARTS * (copies // UNIT) // STARTS * UNIT
    copy = own
    for stage in gl.static_range(STAGES):
        arrival = arrivals.index(stage)
        hopper.mbarrier.init(arrival, count=1)
        exists = stage < copies
        hopper.mbarrier.expect(arrival, stage_bytes, pred=exists)
        _fetch_weights(
            weight_desc, arrival, weights, stage, block, first, copy, exists, OUTPUTS, INPUTS, TILES, PAIRED
        )
        copy = gl.where(copy + 1 == end, begin, copy + 1)
    # The wait comes first: a following attention kernel reads start positions before its own wait, and a
    # preceding norm may not have waited yet.
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    copy = own
    for stage in gl.static_range(STAGES):
        fetch_inputs(x_desc, arrivals.index(stage), inputs, stage, copy, stage < copies, ROWS, INPUTS)
        copy = gl.where(copy + 1 == end, begin, copy + 1)
    layout: gl.constexpr = layout_of_sums(OUTPUTS, ROWS, bits)
    zeros = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    return weights, inputs, arrivals, own, 0, 0, (zeros,) * TILES


@gluon_jit_once_for()
def sum_stream(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    stream: gl.tuple,  # from open_stream or sum_stream, called with the same arguments
    block: gl.tensor,
    first: gl.tensor,
    begin: gl.tensor,
    end: gl.tensor,
    done: gl.tensor,
    until: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    TILES: gl.constexpr,
    PAIRED: gl.constexpr,
    STAGES: gl.constexpr,
    UNDER_WAY: gl.constexpr,
) -> gl.tuple:
    """Returns the stream with `until` copies summed, of which `done` were summed before. The products of
    UNDER_WAY copies, 0 or 1, are still running while the next are issued."""
    gl.static_assert(UNDER_WAY < STAGES and UNDER_WAY <= 1)
    stage_bytes: gl.constexpr = (TILES * OUTPUTS + ROWS) * INPUTS * x_desc.dtype.primitive_bitwidth // 8
    weights, inputs, arrivals, own, stage, parity, sums = stream
    copies = end - begin
    for turn in range(done, until):
        hopper.mbarrier.wait(arrivals.index(stage), parity)
        transposed = inputs.index(stage).permute((1, 0))
        running: gl.tuple = ()
        # Float8 sums stay in the tensor cores, at about 13 bits, from the first input to the last, as in
        # Triton on Hopper: sums that are added in registers at intervals would depend on the size of copies.
        if OUTPUTS < 64:
            gl.static_assert(TILES == 1 and UNDER_WAY == 0)
            sums = (thin_product(weights.index(stage), transposed, sums[0], INPUTS),)
            tl.debug_barrier()  # the stage is free once all warps have read it
        else:
            for tile in gl.static_range(TILES):
                place = weights.index(stage * TILES + tile)
                running += (hopper.warpgroup_mma(place, transposed, sums[tile], is_async=True),)
            sums = _waited(running, UNDER_WAY, TILES)
        # The next copy goes to the stage that has been multiplied.
        free = gl.where(stage == 0, STAGES - 1, stage - 1) if UNDER_WAY > 0 else stage
        summed = turn - UNDER_WAY
        exists = (summed >= 0) & (summed + STAGES < copies)
        copy = own + summed + STAGES
        copy = gl.where(copy >= end, copy - copies, copy)
        arrival = arrivals.index(free)
        hopper.mbarrier.expect(arrival, stage_bytes, pred=exists)
        _fetch_weights(
            weight_desc, arrival, weights, free, block, first, copy, exists, OUTPUTS, INPUTS, TILES, PAIRED
        )
        fetch_inputs(x_desc, arrival, inputs, free, copy, exists, ROWS, INPUTS)
        stage, parity = next_turn((stage, parity), STAGES)
    return weights, inputs, arrivals, own, stage, parity, sums


@gluon_jit_once_for()
def _waited(running: gl.tuple, UNDER_WAY: gl.constexpr, TILES: gl.constexpr) -> gl.tuple:
    """Waits until the products of at most UNDER_WAY copies are still running."""
    if TILES == 1:
        return (hopper.warpgroup_mma_wait(num_outstanding=UNDER_WAY, deps=running),)
    else:
        return hopper.warpgroup_mma_wait(num_outstanding=UNDER_WAY * TILES, deps=running)


@gluon_jit_once_for()
def sums_of(stream: gl.tuple, TILES: gl.constexpr) -> gl.tuple:
    """Returns the sums of each tile, [OUTPUTS, ROWS] float32, after all products of all warps have ended."""
    sums = stream[-1]
    if sums[0].shape[0] >= 64:
        sums = _waited(sums, 0, TILES)
    tl.debug_barrier()
    return sums


@gluon_jit_once_for()
def close_stream(stream: gl.tuple, STAGES: gl.constexpr) -> None:
    """Invalidates the barriers at the end of a program."""
    arrivals = stream[2]
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(arrivals.index(stage))


@gluon_jit_once_for()
def by_rows(
    cells: gl.tensor,  # [OUTPUTS, ROWS] in the layout of the tensor cores, where a thread has two rows of an output
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
) -> gl.tensor:
    """Returns the cells in a layout where a thread has adjacent outputs of a row, so that it accesses up to
    16 bytes of memory at once instead of 2. Tiles of 8 rows keep their layout, which is faster."""
    if ROWS > 8:
        own: gl.constexpr = min(OUTPUTS * ROWS // (32 * gl.num_warps()), 8)
        across: gl.constexpr = OUTPUTS // own
        layout: gl.constexpr = gl.BlockedLayout([own, 1], [across, 32 // across], [1, gl.num_warps()], [0, 1])
        cells = gl.convert_layout(cells, layout)
    return cells


@gluon_jit_once_for()
def cells_of(
    tile: gl.tensor,
    num_rows: gl.tensor,
    num_outputs: gl.tensor,
    stride: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tuple:
    """Returns the offset of each cell of a tile and whether it exists, [OUTPUTS, ROWS] each. stride: of
    rows."""
    row, is_row = rows_of(num_rows, ROWS, gl.SliceLayout(0, layout))
    output = tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    return row[None, :] * stride + output[:, None], is_row[None, :] & (output < num_outputs)[:, None]


@gluon_jit_once_for()
def split_paired(
    sums: gl.tensor,  # [OUTPUTS, ROWS]
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    PAIRED: gl.constexpr,
) -> gl.tuple:
    """Returns the first and the second outputs of the pairs, [OUTPUTS / 2, ROWS] each."""
    runs: gl.constexpr = OUTPUTS // (2 * PAIRED)
    first, second = gl.split(gl.permute(gl.reshape(sums, [runs, 2, PAIRED, ROWS]), (0, 2, 3, 1)))
    return gl.reshape(first, [OUTPUTS // 2, ROWS]), gl.reshape(second, [OUTPUTS // 2, ROWS])


def has_bulk_copies(x: torch.Tensor) -> bool:
    """Returns whether the kernels with TMA run on x's device, which is Hopper."""
    return takes_gluon(x) and is_hopper(x.device)


def choice_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    operation: FusedOperation,
    out: torch.Tensor | None = None,
    weight_format: WeightFormat = WeightFormat.PLAIN,
) -> LinearChoice:
    """Returns the choice of `dispatch.choose` for these tensors."""
    shape = shape_of(x, weight, out)._replace(format=weight_format)
    return choose(shape, traits_of(x), operation)


def shape_of(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> LinearShape:
    (outputs, inputs), rows = weight.shape, x.shape[0]
    is_dense = x.dim() == 2 and x.stride(-1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype
    is_bulk = has_bulk_copies(x) and is_dense and is_copied(weight) and is_copied(x)
    is_bulk_out = out is None or (out.dtype == x.dtype and is_copied(out))
    return LinearShape(rows, outputs, inputs, x.dtype, is_dense, is_bulk, is_bulk_out)


def traits_of(x: torch.Tensor) -> DeviceTraits:
    return DeviceTraits(
        multiprocessors(x.device),
        has_bulk_copies(x),
        takes_triton(x),
        is_interpreted=not x.is_cuda,
        bandwidth=memory_bandwidth(x.device),
    )


def is_copied(tensor: torch.Tensor) -> bool:
    """Returns whether TMA can copy the tensor: its rows are dense and begin at multiples of 16 bytes."""
    row_bytes = tensor.stride(0) * tensor.element_size()
    return tensor.stride(1) == 1 and row_bytes % 16 == 0 and tensor.data_ptr() % 16 == 0


def stream_constants_of(x: torch.Tensor, streams: TmaGemmConfig) -> dict[str, int | bool]:
    """Returns the constants that all kernels share, and the options of the launch."""
    rows = padded_rows(x.shape[0])
    # With several waves of programs, or with MAX_ROWS, waiting for products delays copies: `gate_up` of 64
    # rows takes 45.2 us, and 47.3 with the wait. Otherwise the bytes in flight matter more, above all for
    # MANY_ROWS, which leave room for two or three copies.
    is_under_way = rows == MAX_ROWS or streams.programs > multiprocessors(x.device)
    stage_bytes = (streams.tiles * streams.outputs + rows) * streams.copy_bytes
    return {
        "ROWS": rows,
        "OUTPUTS": streams.outputs,
        "INPUTS": inputs_of(x, streams),
        "STAGES": shared_memory_bytes(x.device) // stage_bytes,
        "STARTS": _starts(streams, rows),
        "UNIT": COPY_BYTES // streams.copy_bytes,
        # Thin tiles are multiplied by synchronous instructions.
        "UNDER_WAY": int(is_under_way and streams.outputs == OUTPUTS),
        "num_warps": WARPS,
        "launch_pdl": True,
    }


def _starts(streams: TmaGemmConfig, rows: int) -> int:
    if streams.is_ordered:
        return 1
    if rows > MAX_ROWS:
        return _STARTS_OF_MANY
    return _STARTS if streams.split == 1 else _STARTS_OF_PARTS


def inputs_of(tensor: torch.Tensor, streams: TmaGemmConfig) -> int:
    """Returns the number of inputs of a TMA copy."""
    return streams.copy_bytes // tensor.element_size()


def described_rows(x: torch.Tensor, streams: TmaGemmConfig) -> TensorDescriptor:
    """Returns the TMA descriptor of x as two halves of a tile, which overlap if the tile has more rows than
    x: 5 rows in a tile of 8 are rows 0 .. 3 and rows 1 .. 4.

    TMA copies a row that is out of bounds more slowly than one that exists: with a tile of 64 `gate_up` took
    52 us if 33 rows existed, 47 if all did. With this layout rows are out of bounds only if x has 1 to 4 of
    them.
    """
    (rows, num_inputs), half = x.shape, padded_rows(x.shape[0]) // 2
    shape = [1 if rows <= half else 2, min(rows, half), num_inputs]
    strides = [max(rows - half, 1) * x.stride(0), x.stride(0), 1]
    return _described(x, shape, strides, [2, half, inputs_of(x, streams)])


def padded_rows(num_rows: int) -> int:
    """Returns the rows of a tile that has num_rows rows."""
    return max(power_of_two(num_rows), _MIN_TILE_ROWS)


def described_pairs(weight: torch.Tensor, streams: TmaGemmConfig, *, blocks: int) -> TensorDescriptor:
    """Returns the TMA descriptor of a weight as [blocks, runs, 2, PAIRED, inputs], in which output i of a
    block's first half is paired with output i of its second half."""
    num_inputs, half = weight.shape[1], weight.shape[0] // (2 * blocks)
    shape = [blocks, half // PAIRED, 2, PAIRED, num_inputs]
    strides = [2 * half * num_inputs, PAIRED * num_inputs, half * num_inputs, num_inputs, 1]
    block = [1, OUTPUTS // (2 * PAIRED), 2, PAIRED, inputs_of(weight, streams)]
    return _described(weight, shape, strides, block)


def described_weight(weight: torch.Tensor, streams: TmaGemmConfig) -> TensorDescriptor:
    block = [streams.outputs, inputs_of(weight, streams)]
    return _described(weight, list(weight.shape), [weight.shape[1], 1], block)


def _described(
    tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(_SWIZZLE_BYTES, 8 * tensor.element_size(), rank=len(block))
    return TensorDescriptor(tensor, shape, strides, block, layout)
