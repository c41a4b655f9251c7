"""Checks the sizes of bookkeeping operations."""


def check_window(num_speculative_tokens: int, block_size_tokens: int) -> None:
    """Raises ValueError if a window may cross more than one block boundary."""
    if num_speculative_tokens >= block_size_tokens:
        raise ValueError(
            f"{num_speculative_tokens} speculative tokens would cross more than one boundary of blocks of "
            f"{block_size_tokens} tokens: use fewer than {block_size_tokens} or larger blocks"
        )


def check_padding_slots(num_padding_slots: int) -> None:
    """Raises ValueError if a request has no slot for its bonus token."""
    if num_padding_slots < 1:
        raise ValueError(
            f"num_padding_slots is {num_padding_slots}, but the bonus token of each request takes one: use 1 or more"
        )
