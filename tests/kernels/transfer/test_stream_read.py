"""stream_read sees every number, the first and the last included."""

import pytest
import torch

from headway.kernels import stream_read

LEAST = -(1 << 31)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 200_000])
def test_the_greatest_number_is_found_wherever_it_stands(size: int, device: torch.device) -> None:
    for place in {0, size // 2, size - 1}:
        data = torch.full((size,), LEAST, dtype=torch.int32, device=device)
        data[place] = -7
        result = stream_read(data)
        assert (result.item(), result.dtype, result.shape) == (-7, torch.int32, ())
