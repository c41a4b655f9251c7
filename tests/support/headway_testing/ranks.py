"""Ranks of one model as threads of the test's process, or as processes, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier
from typing import NamedTuple, TypeVar

import torch

from headway.engine.layers.group import Group
from headway.engine.loading.checkpoint import load_model
from headway.engine.models.registry import read_model_spec
from headway.engine.parallel.group import ProcessGroup
from headway.engine.speculation.select import announced_head
from headway_testing.checkpoints import random_mimo
from headway_testing.families import OWN, save, tiny_model
from headway_testing.hybrid import LAYERS, HybridOracle
from headway_testing.paged import PagedSequences

Result = TypeVar("Result")
SECONDS = 60.0  # after which a rank that is left alone fails
# What four ranks can share; two of them have the same head of keys. Each has 16 outputs of a layer or more,
# for torch sums fewer in another order.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 152,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_OTHER_SIZES = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def shareable_folder(folder: Path, architecture: str, **changes: int) -> Path:
    """Saves a random model of that family, with an MTP head where the family has one."""
    own = OWN.get(architecture, {})
    sizes = SIZES | {name: size for name, size in _OTHER_SIZES.items() if name in own} | changes
    if architecture == "MiMoForCausalLM":
        return random_mimo(folder, **sizes)
    if architecture in LAYERS:
        return HybridOracle(architecture=architecture, **sizes).save(folder)
    return save(tiny_model(architecture, **sizes), architecture, folder)


class ThreadGroup:
    """A rank that is a thread. num_gathers: counts its calls."""

    def __init__(self, rank: int, parts: list[torch.Tensor], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier = parts, barrier
        self.num_gathers = 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.num_gathers += 1
        self._parts[self.rank] = x
        self._barrier.wait(SECONDS)
        whole = torch.cat(self._parts, dim=1)
        self._barrier.wait(SECONDS)
        return whole

    def largest(self, number: int) -> int:
        return int(self.gather(torch.tensor([[number]])).amax())


def run_ranks(size: int, run: Callable[[Group], Result]) -> list[Result]:
    """Returns the result of each rank."""
    parts, barrier = [torch.empty(0)] * size, Barrier(size)
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, ThreadGroup(rank, parts, barrier)) for rank in range(size)]
        return [future.result() for future in futures]


class Computed(NamedTuple):
    """Hidden states and logits of two prompts and of a window after each, what the first layer keeps of each
    head, and, where there is a head, a draft's carries and logits."""

    hidden: torch.Tensor
    logits: torch.Tensor
    kept: torch.Tensor  # [heads, ...]: keys, or recurrent states
    carries: torch.Tensor | None
    draft_logits: torch.Tensor | None


def computed(folder: Path, group: Group) -> Computed:
    """Loads the rank's share of a model with 152 tokens and runs it."""
    make_draft = announced_head(read_model_spec(folder))
    models = load_model(
        folder, device=torch.device("cpu"), dtype="float32", make_draft=make_draft, progress=lambda _: None, group=group
    )  # fmt: skip
    model, head = models.target, models.draft
    with torch.inference_mode():
        sequences = PagedSequences(models, 2, 64)
        tokens = torch.randint(0, 152, (51,), generator=torch.Generator().manual_seed(3))
        first = sequences.forward([(0, 0, 30), (1, 0, 13)], tokens[:43])
        second = sequences.forward([(0, 30, 4), (1, 13, 4)], tokens[43:])
        if isinstance(group, ThreadGroup):
            assert group.num_gathers == 2 * 4 * len(model.layers)
        hidden = torch.cat([first, second])
        state = sequences.pool.layer(0)
        kept = state["keys"].transpose(0, 2) if "keys" in state else state["states"].transpose(0, 1)
        logits = model.logits(hidden)
        if head is None:
            return Computed(hidden, logits, kept, None, None)
        carries = sequences.draft([(0, 1, 29), (1, 1, 12)], tokens[:41], first[:41])
        return Computed(hidden, logits, kept, carries, head.logits(carries))


def assert_shared_alike(alone: Computed, ranks: list[Computed]) -> None:
    """Asserts that every rank has the results of a model that is computed alone, and its share of what is
    kept, which several ranks in turn have alike where there are fewer heads than ranks."""
    copies = max(1, len(ranks) // len(alone.kept))
    for rank in ranks:
        whole = rank._replace(kept=torch.cat([each.kept for each in ranks[::copies]]))
        for name, found, wanted in zip(Computed._fields, whole, alone, strict=True):
            assert found is wanted is None or torch.equal(found, wanted), name


def computed_by_processes(folder: Path, meeting: Path, size: int) -> list[Computed]:
    """Returns what each of the ranks computes. meeting: an empty folder."""
    with ProcessPoolExecutor(size, mp_context=get_context("spawn")) as processes:
        futures = [processes.submit(_as_process, folder, meeting, rank, size) for rank in range(size)]
        return [Computed(*future.result()) for future in futures]


def _as_process(folder: Path, meeting: Path, rank: int, size: int) -> tuple[torch.Tensor | None, ...]:
    torch.set_num_threads(1)
    group = ProcessGroup(rank, size)
    group.connect(meeting, torch.device("cpu"))
    return tuple(computed(folder, group))
