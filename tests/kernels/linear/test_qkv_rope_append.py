"""qkv_rope_append against a product, a rotation and a cache in float64."""

import pytest
import torch
from headway_testing.late import LateCopy
from headway_testing.products import assert_near, tensors
from headway_testing.rotation import turned

from headway.kernels import Activation, DeferredNorm, DenseWeight, fuses_qkv, qkv_rope_append, rms_norm
from headway.kernels.linear import _skinny_core as _skinny
from headway.kernels.linear.add_linear import add_linear
from headway.kernels.linear.gated_linear import gated_linear
from headway.kernels.runtime._device import is_hopper

MAX_POSITION, BLOCK_SIZE, BLOCKS, EPSILON = 50, 4, 6, 1e-3
SLOTS = {
    "one": [23],
    "padding only": [-1, -1],
    "block boundary": [3, 4],
    "mixed": [9, -1, 0, 22, -1],
    "odd": list(range(18, -1, -1)),
    "beyond": [*range(24), *[-1] * 41],
}
# Query heads, heads of keys, head_dim, hidden: one program a head, two, four, split sums, the twin's.
SHAPES = {
    "64": (4, 2, 64, 256),
    "128": (3, 3, 128, 192),
    "256": (2, 1, 256, 128),
    "split": (1, 1, 64, 4096),
    "library": (7, 1, 80, 256),
}
# On an H200 weights of these stream.
WIDE_SHAPES = [(32, 8, 128, 4096), (64, 18, 64, 2048), (20, 4, 256, 2048)]
MANY_SLOTS = {
    "tile": list(range(8)),
    "beyond a tile": list(range(15, 6, -1)),
    "half": [*range(24), *[-1] * 9],
    "most": [*[-1] * 40, *range(24)],
}


class Case:
    """Tensors of one call. The table is no table of angles: pairs are scaled too."""

    def __init__(
        self,
        slots: list[int],
        shape: tuple[int, int, int, int],
        device: torch.device,
        *,
        has_bias: bool = True,
    ) -> None:
        self.q_heads, self.kv_heads, self.head_dim, hidden = shape
        heads = self.q_heads + 2 * self.kv_heads
        self.x, self.weight = tensors(len(slots), heads * self.head_dim, hidden, device)
        generator = torch.Generator().manual_seed(len(slots))
        bias = torch.randn(heads * self.head_dim, generator=generator).to(self.x)
        self.bias = bias if has_bias else None
        caches = torch.randn(2, BLOCKS, BLOCK_SIZE, self.kv_heads, self.head_dim, generator=generator)
        self.caches = caches.to(self.x)
        self.table = torch.randn(MAX_POSITION, self.head_dim, generator=generator).to(device)
        self.positions = torch.randint(0, MAX_POSITION, (len(slots),), generator=generator).to(device)
        self.slots = torch.tensor(slots, device=device)

    def run(self, x: torch.Tensor, norm: DeferredNorm | None) -> torch.Tensor:
        return qkv_rope_append(
            x, self.weight, self.bias, norm, self.positions, self.table, *self.caches, self.slots
        )

    def check(self, x: torch.Tensor, norm: DeferredNorm | None) -> None:
        """x as it is to be multiplied, in float64."""
        product = x.double() @ self.weight.double().T
        if norm is not None:
            product *= norm.factor(x.shape[1]).double()
        product = product if self.bias is None else product + self.bias.double()
        heads = product.view(len(x), -1, self.head_dim)
        query, key, value = heads.split([self.q_heads, self.kv_heads, self.kv_heads], dim=1)
        query, key = (turned(part, self.positions, self.table) for part in (query, key))
        before = self.caches.clone()
        assert_near(self.run(x, norm), query)
        found, untouched = self.caches.flatten(1, 2), torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        written = self.slots >= 0
        if bool(written.any()):
            assert_near(found[0, self.slots[written]], key[written])
            assert_near(found[1, self.slots[written]], value[written])
        untouched[self.slots[written].cpu()] = False
        assert torch.equal(found[:, untouched], before.flatten(1, 2)[:, untouched])


@pytest.fixture(autouse=True)
def enough_programs_to_split_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles are split only where six programs run at once."""
    counted = _skinny.multiprocessors
    monkeypatch.setattr(_skinny, "multiprocessors", lambda d: 6 if d.type == "cpu" else counted(d))
    _, _, head_dim, hidden = SHAPES["split"]
    assert _skinny.cut_of(3 * head_dim, torch.empty(1, hidden)).split > 1


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_queries_turn_and_the_named_slots_change(
    has_bias: bool, slots: list[int], shape: tuple[int, int, int, int], device: torch.device
) -> None:
    case = Case(slots, shape, device, has_bias=has_bias)
    case.check(case.x, None)


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_a_norm_is_completed(
    has_bias: bool, slots: list[int], shape: tuple[int, int, int, int], device: torch.device
) -> None:
    case = Case(slots, shape, device, has_bias=has_bias)
    hidden = shape[3]
    x, weight = tensors(len(slots), hidden, 128, device)
    stream = 5 * torch.randn(len(slots), hidden, generator=torch.Generator().manual_seed(7)).to(x)
    gain = (1 + torch.randn(hidden, generator=torch.Generator().manual_seed(8)) / 4).to(x)
    case.check(*add_linear(x, weight, stream, gain, EPSILON))


def test_a_row_of_nan_stays_alone(device: torch.device) -> None:
    slots = [1, 5, 9, 13]
    clean, poisoned = (Case(slots, SHAPES["64"], device) for _ in range(2))
    poisoned.x[2] = torch.nan
    others = [0, 1, 3]
    assert torch.equal(poisoned.run(poisoned.x, None)[others], clean.run(clean.x, None)[others])
    caches = [case.caches.flatten(1, 2)[:, [1, 5, 13]] for case in (clean, poisoned)]
    assert torch.equal(*caches)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(32, 8, 128, 4096), (16, 8, 64, 1024), (2, 1, 64, 4096), (14, 2, 64, 896)], ids=str
)
def test_a_row_gets_the_same_beside_any_others(shape: tuple[int, int, int, int]) -> None:
    device = torch.device("cuda")
    hidden = shape[3]
    case = Case([*range(24), *[-1] * 8], shape, device)
    x, weight = tensors(32, hidden, 128, device)
    scaled, norm = add_linear(x, weight, case.x.clone(), torch.ones(hidden).to(x), EPSILON)
    together = case.run(scaled, norm)
    caches = case.caches.clone()
    positions, slots = case.positions, case.slots
    for rows in (1, 2, 4, 16, 17, 27):
        some = slice(3, 3 + rows)
        case.positions, case.slots = positions[some], slots[some]
        assert torch.equal(case.run(scaled[some], DeferredNorm(norm.squares[some], EPSILON)), together[some])
        assert torch.equal(case.caches, caches)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 8, 64, 1024), (32, 8, 128, 4096)], ids=str)
def test_layers_wait_for_one_another_in_a_graph(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers without attention; positions and slots move on in the graph, as they do from round to
    round."""
    monkeypatch.undo()  # poison would be written between launches, and keep them apart
    case = Case([3, 7, 11, 15], shape, torch.device("cuda"))
    q_heads, _, head_dim, hidden = shape
    _, output = tensors(4, hidden, q_heads * head_dim, torch.device("cuda"))
    _, gate_up = tensors(4, 6 * hidden, hidden, torch.device("cuda"))
    _, down = tensors(4, hidden, 3 * hidden, torch.device("cuda"))
    gain = torch.ones(hidden).to(case.x)

    def run() -> torch.Tensor:
        case.positions.copy_((case.positions + 1) % MAX_POSITION)
        case.slots.copy_((case.slots + 1) % (BLOCKS * BLOCK_SIZE))
        stream, norm = case.x.clone(), None
        x = rms_norm(stream, gain, EPSILON)
        for _ in range(4):
            x, norm = add_linear(case.run(x, norm).flatten(1), output, stream, gain, EPSILON)
            x, norm = add_linear(gated_linear(x, gate_up, norm=norm), down, stream, gain, EPSILON)
        return stream

    start = case.positions.clone(), case.slots.clone(), case.caches.clone()
    wanted = []
    for _ in range(20):
        wanted.append((run(), case.caches.clone()))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = run()
    case.positions.copy_(start[0])
    case.slots.copy_(start[1])
    case.caches.copy_(start[2])
    for expected_stream, expected_caches in wanted:
        stream.fill_(torch.nan)
        graph.replay()
        assert torch.equal(stream, expected_stream)
        assert torch.equal(case.caches, expected_caches)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [*SLOTS.values(), *MANY_SLOTS.values()], ids=[*SLOTS, *MANY_SLOTS])
@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_a_wide_product_does_the_same(
    has_bias: bool, slots: list[int], shape: tuple[int, int, int, int]
) -> None:
    """Where bulk copies are, weights stream; of more than 64 rows it is the library's."""
    case = Case(slots, shape, torch.device("cuda"), has_bias=has_bias)
    is_taken = fuses_qkv(Activation(case.x), DenseWeight(case.weight))
    assert is_taken == (is_hopper(case.x.device) and len(slots) <= 64)
    case.check(case.x, None)


@pytest.mark.gpu
def test_a_row_of_a_wide_product_gets_the_same_beside_any_others(hopper: torch.device) -> None:
    """Elsewhere more than 32 rows are the library's."""
    case = Case([*range(24), *[-1] * 40], WIDE_SHAPES[0], hopper)
    x, positions, slots = case.x, case.positions, case.slots
    together, caches = case.run(x, None), case.caches.clone()
    for rows in (1, 3, 8, 9, 16, 17, 32, 33):
        case.caches.zero_()
        case.positions, case.slots = positions[5 : 5 + rows], slots[5 : 5 + rows]
        assert torch.equal(case.run(x[5 : 5 + rows], None), together[5 : 5 + rows])
        written = case.slots[case.slots >= 0]
        found = case.caches.flatten(1, 2)[:, written]
        assert torch.equal(found, caches.flatten(1, 2)[:, written])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES["64"], *WIDE_SHAPES], ids=str)
def test_positions_and_slots_are_read_when_they_are_there(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a model's first layer: what writes them, a norm that lets others start before it waits, this."""
    copy_late = LateCopy(monkeypatch)
    case = Case(list(range(16)), shape, torch.device("cuda"))
    wanted = torch.stack([case.positions, case.slots])
    places = torch.empty_like(wanted)
    case.positions, case.slots = places.unbind(0)
    gain = torch.ones(shape[3]).to(case.x)

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        case.caches.zero_()
        return case.run(rms_norm(case.x, gain, EPSILON), None), case.caches.clone()

    places.copy_(wanted)
    expected = compute()
    for _ in range(5):
        places.zero_()
        case.caches.zero_()
        copy_late(wanted, places)
        query = case.run(rms_norm(case.x, gain, EPSILON), None)
        assert torch.equal(query, expected[0])
        assert torch.equal(case.caches, expected[1])
