"""copy_entries moves whole entries of all layers, of any dtype, and changes nothing else."""

from __future__ import annotations

import pytest
import torch

from headway.kernels import copy_entries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5000)], ids=str)
@pytest.mark.parametrize("copies", [(), ((4, 1),), ((5, 0), (5, 2), (3, 1))], ids=str)
def test_entries_are_copied_bit_by_bit(
    copies: tuple[tuple[int, int], ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    memory = torch.randint(-99, 99, (2, 6, *shape), generator=torch.Generator().manual_seed(0))
    memory = memory.to(device, dtype)
    wanted = memory.clone()
    for source, target in copies:
        wanted[:, target] = memory[:, source]
    sources, targets = (
        torch.tensor([pair[i] for pair in copies], dtype=torch.int64, device=device) for i in range(2)
    )
    copy_entries(memory, sources, targets)
    assert torch.equal(memory, wanted)


@pytest.mark.gpu
def test_no_memory_is_taken_for_what_is_under_way() -> None:
    """32 rows of a 27B model would take 5 GB, which nothing reserves."""
    memory = torch.zeros(4, 20, 1 << 18, device="cuda")
    ids = torch.arange(10, device="cuda")
    copy_entries(memory, ids, ids + 10)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copy_entries(memory, ids, ids + 10)
    assert torch.cuda.max_memory_allocated() - before < memory.nbytes / 100


@pytest.mark.gpu
def test_entries_beyond_32_bits_of_elements_are_found() -> None:
    size = 1 << 20
    memory = torch.zeros(3, 1000, size, dtype=torch.int8, device="cuda")
    memory[2, 999] = 7
    one = torch.tensor([999], device="cuda")
    copy_entries(memory, one, one - 1)
    assert memory[2, 998].eq(7).all()
    assert not memory[2, :998].any()
    assert not memory[:2].any()
