"""rope_append against rms_norm, a rotation of complex numbers in float64, and writes to the cache."""

import pytest
import torch
from headway_testing.rotation import turned

from headway.kernels import HeadNorms, rms_norm, rope_append

MAX_POSITION, BLOCK_SIZE, BLOCKS = 50, 4, 6
SLOTS = {
    "none": [],
    "one": [23],
    "padding only": [-1, -1],
    "block boundary": [3, 4],
    "mixed": [9, -1, 0, 22, -1],
    "all": list(range(23, -1, -1)),
}


# Of a number as large as 4: what is turned is rounded once, to the dtype of the heads.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case:
    """Tensors of one call. The table is no table of angles: pairs are scaled, too."""

    def __init__(
        self,
        slots: list[int],
        shape: tuple[int, int, int],  # query heads, heads of keys, head_dim
        device: torch.device,
        *,
        rotary_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        *self.heads, head_dim = shape
        generator = torch.Generator().manual_seed(len(slots))
        num_heads = self.heads[0] + 2 * self.heads[1]
        self.fused = torch.randn(len(slots), num_heads, head_dim, generator=generator).to(device, dtype)
        caches = torch.randn(2, BLOCKS, BLOCK_SIZE, self.heads[1], head_dim, generator=generator)
        self.caches = caches.to(device, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        table = torch.rand(MAX_POSITION, rotary_dim or head_dim, generator=generator, dtype=torch.float64)
        self.table = (2 * table - 1).to(device, wide)
        self.positions = torch.randint(0, MAX_POSITION, (len(slots),), generator=generator).to(device)
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.fused.split([*self.heads, self.heads[1]], dim=1)

    def check(self, norms: HeadNorms | None = None) -> None:
        query, key, value = (part.clone() for part in self.parts())
        if norms is not None:
            for heads, weight in ((query, norms.query), (key, norms.key)):
                rows = heads.view(-1, heads.shape[2])
                heads.copy_(
                    rms_norm(rows, weight, norms.epsilon, unit_offset=norms.unit_offset).view(heads.shape)
                )
        query, key = (turned(heads, self.positions, self.table) for heads in (query, key))
        caches = self.caches.double()
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                caches[:, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = torch.stack(
                    (key[token], value[token].double())
                )
        rope_append(*self.parts(), self.positions, self.table, *self.caches, self.slots, norms=norms)
        tolerance = TOLERANCES[self.fused.dtype]
        expected = torch.cat((query, key, value.double()), dim=1)
        torch.testing.assert_close(self.fused.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(self.caches.double(), caches, rtol=tolerance, atol=tolerance)
        untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        untouched[self.slots[self.slots >= 0].cpu()] = False
        assert torch.equal(
            self.caches.double().flatten(1, 2)[:, untouched], caches.flatten(1, 2)[:, untouched]
        )
        assert torch.equal(self.parts()[2], value)


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("shape", [(1, 1, 2), (4, 2, 64), (7, 1, 80), (2, 3, 128)])
def test_queries_and_keys_turn_and_the_named_slots_change(
    slots: list[int], shape: tuple[int, int, int], device: torch.device
) -> None:
    Case(slots, shape, device).check()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_heads_of_every_dtype_are_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    Case(SLOTS["mixed"], (4, 1, 32), device, dtype=dtype).check()


@pytest.mark.parametrize("unit_offset", [False, True], ids=["weight", "one-plus-weight"])
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [((4, 2, 64), 64), ((4, 2, 64), 32), ((3, 1, 80), 20), ((2, 3, 256), 64), ((1, 1, 6), 2)],
)
def test_heads_are_normed_whole_and_turned_in_part(
    shape: tuple[int, int, int], rotary_dim: int, has_norms: bool, unit_offset: bool, device: torch.device
) -> None:
    case = Case(SLOTS["mixed"], shape, device, rotary_dim=rotary_dim)
    weights = torch.randn(2, shape[2], generator=torch.Generator().manual_seed(0)).to(device)
    case.check(HeadNorms(*weights, 1e-2, unit_offset) if has_norms else None)
