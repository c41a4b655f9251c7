"""Device functions of verification, preparation, rewind and drafters' inputs.

The public kernels (`verify`, `prepare`, `rewind`, `prepare_next_tokens`, `advance_draft_step`) and those that
a decode round launches (`prepare_verify_inputs`, `open_drafts`, `verify_and_rewind`) call these functions, so
that each rule has one implementation. Every argument that is not a pointer or a constant is a block with one
lane per row.
"""

from __future__ import annotations

from headway.kernels.runtime._triton import jit, tl


@jit
def accepts_draft(is_accepted: tl.tensor, draft: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Returns whether this draft and all before it are accepted: they equal what the target chose.
    is_accepted: whether all before it are."""
    return is_accepted & (draft == target)


@jit
def count_accepted(accepted: tl.tensor, is_accepted: tl.tensor) -> tl.tensor:
    """Returns the number of accepted tokens including this one, int64."""
    return accepted + is_accepted.to(tl.int64)


@jit
def token_or_none(is_present: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Returns the token, or -1 if there is none: -1 equals no token that the target chooses."""
    return tl.where(is_present, token, -1)


@jit
def slot_or_none(
    is_present: tl.tensor, block: tl.tensor, position: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Returns the slot of the position in that block, int64; -1 if there is none. block: int64."""
    return tl.where(is_present, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)


@jit
def rewind_row(
    row: tl.tensor,
    length: tl.tensor,
    offset: tl.tensor,
    accepted: tl.tensor,
    is_live: tl.tensor,
    length_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    count_ptr: tl.tensor,
    last_id_ptr: tl.tensor,
    table_ptr: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    max_blocks: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Removes the DEPTH - accepted rejected tokens from live rows. Returns whether a row loses its last
    block."""
    rewound = DEPTH - accepted
    tl.store(length_ptr + row, length - rewound, mask=is_live)
    remainder = offset - rewound
    # At most one block is lost, because DEPTH < BLOCK_SIZE.
    falls_back = is_live & (remainder < 0)
    tl.store(offset_ptr + row, tl.where(falls_back, remainder + BLOCK_SIZE, remainder), mask=is_live)
    count = tl.load(count_ptr + row, mask=falls_back, other=1).to(tl.int64) - 1
    tl.store(count_ptr + row, count, mask=falls_back)
    entry_ptr = table_ptr + row * row_stride + count * column_stride
    # A window may reach past the table's last column: that entry does not exist and needs no clearing.
    tl.store(entry_ptr, -1, mask=falls_back & (count < max_blocks))
    previous = tl.load(entry_ptr - column_stride, mask=falls_back & (count > 0), other=-1)
    tl.store(last_id_ptr + row, previous, mask=falls_back)
    return falls_back
