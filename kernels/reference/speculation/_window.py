"""Checks that a window crosses at most one block boundary."""


def check_window(num_speculative_tokens: int, block_size_tokens: int) -> None:
    if num_speculative_tokens >= block_size_tokens:
        raise ValueError(
            f"{num_speculative_tokens} speculative tokens would cross more than one boundary of blocks of "
            f"{block_size_tokens} tokens: use fewer than {block_size_tokens} or larger blocks"
        )
