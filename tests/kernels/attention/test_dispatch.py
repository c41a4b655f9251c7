"""The table of attention: which kernel computes which batch, and the sizes of its programs."""

import pytest

from headway.kernels.attention.dispatch import (
    AttentionKernel,
    AttentionShape,
    PaddedForm,
    TileConfig,
    choose,
    max_prompt_rows,
    padded_form,
    prompt_tile,
    split_kv_config,
    split_kv_tile,
)

HOPPER_BYTES, AMPERE_BYTES = 232_448, 166_912
WINDOWS = (1, 4, 5, 8, 9, 16, 18, 19, 32, 33, 128, 129, 8192)
LETTERS = {"s": AttentionKernel.SPLIT_KV, "p": AttentionKernel.PREFILL, "P": AttentionKernel.PREFILL_TMA}
# GQA group size, cached keys ("-": not known), TMA, and a letter for each window of WINDOWS.
CHOICES = """
7 - tma sssssssPPPPPP
7 - no ssssssspppppp
7 8192 tma PPPPPPPPPPPPP
7 8192 no ppppppppppppp
7 8193 tma sssssssPPPPPP
4 - tma sssssssssPPPP
1 - tma sssssssssssPP
1 0 tma PPPPPPPPPPPPP
16 - tma ssssPPPPPPPPP
128 - no spppppppppppp
129 - no ppppppppppppp
"""


@pytest.mark.parametrize("row", CHOICES.split("\n")[1:-1])
def test_rows_of_one_length(row: str) -> None:
    group, cached, tma, letters = row.split()
    most_cached = None if cached == "-" else int(cached)
    chosen = [
        choose(AttentionShape(window, int(group), most_cached, can_copy=tma == "tma")) for window in WINDOWS
    ]
    assert chosen == [LETTERS[letter] for letter in letters]


@pytest.mark.parametrize("can_copy", [False, True])
def test_rows_whose_lengths_the_device_alone_knows(*, can_copy: bool) -> None:
    expected = AttentionKernel.VARLEN_TMA if can_copy else AttentionKernel.VARLEN
    assert choose(AttentionShape(None, 7, can_copy=can_copy)) is expected


def test_the_kernel_with_tma_knows_no_end_positions() -> None:
    shape = AttentionShape(512, 4, 0, can_copy=True, has_ends=True)
    assert choose(shape) is AttentionKernel.PREFILL


@pytest.mark.parametrize(
    ("window", "group", "most_cached", "max_keys", "expected"),
    [
        (1, 4, None, 2048, 256),
        (1, 4, None, 32_768, 256),
        (1, 4, None, 65_536, 128),
        (20, 4, 10_000, 16_384, 12),
        (32, 4, 10_000, 131_072, 2),
        (32, 4, 10_000, 1_000_000, 1),
        (33, 4, 10_000, 16_384, None),
        (20, 4, 8192, 16_384, None),
    ],
)
def test_rows_of_prompts_in_a_launch(
    window: int, group: int, most_cached: int | None, max_keys: int, expected: int | None
) -> None:
    assert max_prompt_rows(window, group, most_cached, max_keys) == expected


@pytest.mark.parametrize(
    ("num_chunks", "num_tokens", "most_cached", "expected"),
    [
        (1, 16, 0, PaddedForm.WINDOW),
        (1, 32, 100_000, PaddedForm.WINDOW),
        (1, 64, 8192, PaddedForm.CHUNKS),
        (1, 64, 8193, None),
        (2, 32, 8192, PaddedForm.CHUNKS),
        (2, 32, 8193, None),
    ],
)
def test_chunks_of_a_captured_graph(
    num_chunks: int, num_tokens: int, most_cached: int, expected: PaddedForm | None
) -> None:
    assert padded_form(num_chunks, num_tokens, most_cached) is expected


@pytest.mark.parametrize(
    ("head_dim", "itemsize", "memory", "expected"),
    [
        (128, 2, HOPPER_BYTES, (1, 64, 128, 8, 2)),
        (64, 2, AMPERE_BYTES, (1, 64, 128, 8, 2)),
        (128, 2, 101_376, (1, 64, 128, 8, 1)),
        (256, 2, HOPPER_BYTES, (1, 16, 64, 8, 2)),
        (128, 4, HOPPER_BYTES, (1, 16, 32, 8, 2)),
    ],
)
def test_prompts_have_the_tiles_of_keys_of_split_kv(
    head_dim: int, itemsize: int, memory: int, expected: tuple[int, ...]
) -> None:
    tile = prompt_tile(1, head_dim, itemsize, memory)
    assert tile == TileConfig(*expected)
    assert tile.keys == split_kv_tile(head_dim, itemsize)
    assert prompt_tile(4, head_dim, itemsize, memory) == tile._replace(heads=4, queries=tile.queries // 4)


@pytest.mark.parametrize(
    ("rows", "window", "heads", "head_dim", "expected"),
    [
        # Query rows, parts, tile, warps, programs, scanned rows, heads of a combining program, most pieces.
        (1, 1, (28, 4), 128, (16, 1, 128, 4, 528, 32, 1, 16)),
        (1, 4, (28, 4), 128, (32, 1, 128, 8, 528, 32, 1, 16)),
        (1, 5, (28, 4), 128, (32, 2, 128, 8, 528, 32, 1, 16)),
        (33, 1, (28, 4), 128, (16, 1, 128, 4, 528, 64, 2, 528)),
        (128, 4, (28, 4), 128, (32, 1, 128, 8, 528, 256, 28, 265)),
        (1, 1, (14, 2), 64, (16, 1, 128, 4, 264, 32, 1, 16)),
        (5, 1, (14, 2), 64, (16, 1, 128, 4, 528, 32, 1, 80)),
        (1, 1, (16, 4), 256, (16, 1, 64, 8, 528, 32, 1, 32)),
    ],
)
def test_split_kv_sizes(
    rows: int, window: int, heads: tuple[int, int], head_dim: int, expected: tuple[int, ...]
) -> None:
    """In 16 bits on 132 multiprocessors, with block tables for 2,048 keys."""
    config = split_kv_config(rows, window, heads, head_dim, 2, max_keys=2048, num_multiprocessors=132)
    assert (config.quad, config.group) == (4 * config.tile, 16 * config.tile)
    assert (
        config.queries,
        config.parts,
        config.tile,
        config.num_warps,
        config.num_programs,
        config.scanned_rows,
        config.heads_per_program,
        config.most_pieces,
    ) == expected
