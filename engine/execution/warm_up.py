"""Compiles kernels, tries the largest steps and captures graphs before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from headway.engine.execution.device_rows import DeviceRows
from headway.engine.execution.graph_sizes import TakenMemory, extrapolated_bytes, sampled_keys
from headway.engine.execution.graphs import GraphCache
from headway.engine.execution.launcher import StepLauncher
from headway.engine.execution.prompt_ends import PromptEnds
from headway.engine.execution.step import StepOutcome, forward_half
from headway.engine.execution.step_key import StepKey
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.experts import compile_experts
from headway.engine.layers.linear import compile_linears
from headway.engine.protocol.errors import ConfigError
from headway.engine.sampling.sampler import SCORED_AT_ONCE, score_tokens
from headway.engine.scheduling.plan import PrefillChunk
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.state.memory import available_bytes, bytes_taken_by, is_out_of_memory
from headway.kernels import FEW_ROWS, MIN_ADDED_ROWS, compile_in_workers, most_gated_rows, reserve_workspace

WARM_UP_TOKENS = 1024
# The kernels for few rows change above 8, 16 and FEW_ROWS rows.
SOME_ROWS = 16

StepGraphs = GraphCache[StepKey, StepOutcome]

logger = logging.getLogger(__name__)


class WarmUp:
    """Runs steps whose rows are all padding. It has no mutable state of its own."""

    def __init__(
        self,
        launcher: StepLauncher,
        prompt_ends: PromptEnds,
        table: DeviceRows,
        policy: PrefillPolicy,
        *,
        max_depth: int,
    ) -> None:
        self._launcher = launcher
        self._prompt_ends = prompt_ends
        self._table = table
        self.policy = policy
        self._max_depth = max_depth
        self._group = launcher.context.model.group

    def capture(self, keys: Sequence[StepKey], graphs: StepGraphs, progress: Callable[[float], None]) -> None:
        """Captures these steps and reserves memory for what is launched kernel by kernel. Raises
        ConfigError."""
        max_depth = max(key.depth for key in keys)
        with self._refusing_shortage(max_depth):
            reserve_workspace(self._table.device)  # a rehearsal would give its memory back
            with self._first_rank_first():
                self._compile(keys, graphs, progress)
            _, for_prompts = bytes_taken_by(self.run_prompts)
            graphs.capture_all(keys, progress, prepare=self._pack)
            _, for_round = bytes_taken_by(lambda: self._try_largest_round(max_depth))
            if self._group.largest(for_prompts - available_bytes(self._table.device)) > 0:
                self.run_prompts()  # graphs may have left too little memory for it
            graphs.memory.reserve(max(for_prompts, for_round))

    def measured_bytes(
        self, keys: Sequence[StepKey], graphs: StepGraphs, progress: Callable[[float], None]
    ) -> int:
        """Compiles the kernels of these steps and captures some of them. Returns the bytes that the largest
        steps take, and those of the graphs of all keys. Raises ConfigError."""
        device, max_depth = self._table.device, max(key.depth for key in keys)
        with self._refusing_shortage(max_depth):
            reserve_workspace(device)
            with self._first_rank_first():
                self._compile(keys, graphs, progress)
            _, of_steps = bytes_taken_by(lambda: self._try_largest_steps(max_depth))
            taken = TakenMemory.now(device)
            some = sampled_keys(keys)
            for done, key in enumerate(some, start=1):
                self._pack(key)
                graphs.capture(key)
                graphs.run(key)  # CUDA allocates some of a graph's memory at its first replay
                progress(done / len(some))
            torch.cuda.synchronize(device)
            by_torch, by_cuda = TakenMemory.now(device).since(taken)
        model = self._launcher.context.model
        of_token = model.spec.hidden_size * model.dtype.itemsize
        return of_steps + extrapolated_bytes(keys, some, by_torch, by_cuda, prompt_token_bytes=of_token)

    @contextmanager
    def _first_rank_first(self) -> Iterator[None]:
        """Lets the first of several ranks run the block before the others, which then find its kernels in the
        cache."""
        if self._group.rank > 0:
            self._group.largest(0)
        yield
        if self._group.rank == 0:
            self._group.largest(0)

    @contextmanager
    def _refusing_shortage(self, max_depth: int) -> Iterator[None]:
        """Turns a lack of memory within the block into a ConfigError."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"rounds of {len(self._table)} requests and {max_depth} drafts do not fit into the memory that weights and KV cache "
                "leave free; set --max-running, --depth or --kv-cache-memory to less"
            ) from error

    def run_prompts(self) -> None:
        """Computes prompts whose row has no blocks, so that they are written nowhere. It compiles their
        kernels, and tries the largest step. Raises ConfigError."""
        for step in self._prompt_steps():
            step()

    def _prompt_steps(self) -> Iterator[Callable[[], object]]:
        """Yields functions that launch prompts and what follows them. Inputs are copied to the device before
        each launch, so that the launch itself can be captured."""
        most, launcher = self.policy.most_tokens, self._launcher
        model = launcher.context.model
        for lengths in self._tried_lengths(most):
            yield self._pass_of(lengths)
        # These passes cover too few numbers of rows for products whose kernel depends on that number.
        linears = [linear for layer in model.layers for linear in layer.linears()]
        experts, drafts = model.experts(), launcher.context.drafter.model
        if drafts is not None:
            # Its lm_head is used in rounds only, with one row for each of theirs.
            linears += (linear for linear in drafts.linears() if linear.shape != drafts.lm_head_shape)
            experts += drafts.experts()
        yield lambda: compile_linears(linears, most)
        yield lambda: compile_experts(experts, most)
        yield lambda: launcher.context.drafter.catch_up(self._table.numbers)
        yield launcher.context.pool.warm_up
        # Any number of prompt tokens may be scored, which may be more than rounds have.
        for num_scored in (SOME_ROWS, FEW_ROWS, SCORED_AT_ONCE):
            yield partial(_score_zeros, model, num_scored)
        yield lambda: self._prompt_ends.warm_up(1, launcher.masks.all)

    def _tried_lengths(self, most: int) -> list[list[int]]:
        """Returns the lengths of the prompts of each pass. most: the most tokens of a pass."""
        context = self._launcher.context
        model, drafts = context.model, context.drafter.model
        linears = (*model.linears(), *(() if drafts is None else drafts.linears()))
        gates = {linear.shape for linear in linears if linear.is_gate}
        gated = {most_gated_rows(most, gate, model.dtype, self._table.device) for gate in gates}
        passes = [
            self._lengths_of(size) for size in sorted(({min(WARM_UP_TOKENS, most), most} | gated) - {0})
        ]
        if self._max_depth == 0:
            # Prompts without a graph may have one token too few for products with a fused residual addition.
            passes.append(self._lengths_of(min(MIN_ADDED_ROWS - 1, most)))
        return passes

    def _pass_of(self, lengths: Sequence[int]) -> Callable[[], object]:
        """Returns a function that launches a pass of prompts of these lengths. It raises ConfigError where
        the memory does not suffice."""
        chunks = [PrefillChunk(0, 0, 0, (0,) * n, hidden_block_id=None, is_last=True) for n in lengths]
        tokens = self._launcher.tokens_of(chunks)

        def launch() -> None:
            try:
                self._launcher.launch_tokens(tokens)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise ConfigError(
                    f"a step with {sum(lengths):,} prompt tokens does not fit into the memory that weights and KV cache "
                    "leave free; set --prefill-chunk, or --kv-cache-memory, to less"
                ) from error

        return launch

    def _lengths_of(self, num_tokens: int) -> list[int]:
        """Returns the lengths of the fewest prompts that have this number of tokens, each within a row's
        block table."""
        most = self._table.numbers.granted_block_ids.shape[1] * self._launcher.context.pool.block_size
        whole, rest = divmod(num_tokens, most)
        return [most] * whole + ([rest] if rest else [])

    def _compile(
        self, keys: Sequence[StepKey], graphs: StepGraphs, progress: Callable[[float], None]
    ) -> None:
        """Compiles the kernels of all steps in worker processes, after a rehearsal that records what each
        launch needs, unless the smallest round finds all its kernels in Triton's cache.

        It only saves time: a kernel that it misses is compiled at its launch.
        """
        started, precompiler, memory = time.monotonic(), None, graphs.memory
        max_depth = max(key.depth for key in keys)
        smallest = StepKey(min(key.num_rows for key in keys if key.num_rows), max_depth)
        try:
            free = available_bytes(torch.device("cpu"))
            compiling = compile_in_workers(lambda: progress(0.0), memory_bytes=free // 2)
            with memory.rehearsal(), compiling as precompiler:
                graphs.capture(smallest)
                if precompiler.has_missing:
                    graphs.capture_all(keys, lambda done: progress(0.0), prepare=self._pack)
                    for step in self._prompt_steps():
                        memory.rehearse(step)
                        progress(0.0)
                    memory.rehearse(lambda: self._try_largest_round(max_depth))
        except Exception:
            logger.warning(
                "the rehearsal failed: further kernels are compiled one after the other", exc_info=True
            )
        if precompiler is not None and precompiler.has_missing:
            logger.info(
                "compiled %d kernels by %d processes in %.1f s",
                precompiler.num_compiled,
                precompiler.num_workers,
                time.monotonic() - started,
            )

    def _pack(self, key: StepKey) -> None:
        """Packs one chunk of row 0, which is padding and has no blocks, as the prompts of the key."""
        if key.num_prompt_tokens:
            token_ids = (0,) * key.num_prompt_tokens
            self._launcher.pack([PrefillChunk(0, 0, 0, token_ids, hidden_block_id=None, is_last=False)], key)

    def _try_largest_steps(self, max_depth: int) -> None:
        self.run_prompts()
        self._try_largest_round(max_depth)

    def _try_largest_round(self, depth: int) -> None:
        """Runs the largest round with adjusted, masked and scored logits, and the start of many requests, to
        see that there is enough memory."""
        num_rows, launcher = len(self._table), self._launcher
        key = StepKey(num_rows, depth, is_adjusted=True, keeps_logits=True, is_masked=True)
        rows, _ = launcher.operands(key)
        # The drafts are not copied to the host, since no slot of the ring was taken for them.
        half = forward_half(launcher.context, rows, depth, None, keeps_logits=True)
        outcome = launcher.finish(key, half).round
        assert outcome is not None, "the step has a round"
        outcome.score(torch.arange(num_rows, device=self._table.device))
        del outcome
        self._prompt_ends.warm_up(min(num_rows, SCORED_AT_ONCE), self._launcher.masks.all)


def _score_zeros(model: CausalLM, num_tokens: int) -> None:
    states = model.no_states(num_tokens)
    score_tokens(model.logits(states), torch.zeros(num_tokens, dtype=torch.int64, device=model.device))
