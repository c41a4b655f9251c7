"""Describes a model and its device before memory is taken for either."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.model_pair import DraftModel, ModelPair
from headway.engine.models.spec import AttentionSpec, ModelSpec
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.kernels import (
    has_float8_products,
    is_split_kv,
    split_kv_config,
    split_kv_keys,
    split_kv_partials,
)

# Sampling holds the logits twice at once: the adjusted ones, and those that are sorted or scored.
_LOGITS_COPIES = 2
_GRAPHS_BYTES_A_LAYER = 8 << 20


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The properties of a device that defaults depend on.

    device: with its index if it is a GPU. capability: CUDA's compute capability, "-" if there is none or it
    is unknown. num_multiprocessors: 0 for a CPU. num_threads: the number that torch uses by default on a CPU,
    the cores or OMP_NUM_THREADS.
    """

    device: torch.device
    has_float8: bool = False
    capability: str = "-"
    num_multiprocessors: int = 0
    num_threads: int = 1

    @classmethod
    def of(cls, device: torch.device) -> DeviceFacts:
        """Reads the facts from the device."""
        if device.type == "cpu":
            return cls(device, num_threads=torch.get_num_threads())
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        return cls(device, has_float8_products(device), capability, properties.multi_processor_count)


# torch's switch for its symmetric memory: ranks may share GPUs, which is for tests alone.
_OVERLAPPING_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def wanted_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Returns the rank's device of the kind that --device names, with its index. Raises ConfigError."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "--device is cuda, but torch sees no CUDA device; use --device cpu or check the driver"
        )
    if has_cuda and config.device != "cpu":
        is_alone = config.tensor_parallel_size == 1
        return torch.device(
            "cuda", torch.cuda.current_device() if is_alone else rank % torch.cuda.device_count()
        )
    return torch.device("cpu")


def ranks_of_device(config: EngineConfig, device: torch.device) -> int:
    """Returns the number of ranks that share the memory of a device. Raises ConfigError if there are too few
    GPUs."""
    size = config.tensor_parallel_size
    if device.type == "cpu" or size == 1:
        return size
    count = torch.cuda.device_count()
    if size > count and os.environ.get(_OVERLAPPING_VARIABLE) != "1":
        raise ConfigError(
            f"--tensor-parallel-size is {size}, which needs a GPU for each rank; {count} "
            f"{'is' if count == 1 else 'are'} visible to this process; set it to {count} or less, or see to CUDA_VISIBLE_DEVICES"
        )
    return -(-size // count)


@dataclass(frozen=True, slots=True)
class Outline:
    """The facts by which defaults and checks are decided.

    models: the models without memory. available: the bytes of the device that the weights leave; without
    counts_weights all bytes, because the size of the weights is not known yet. expanded_bytes: the size of
    expanded copies of quantised weights.
    """

    models: ModelPair
    facts: DeviceFacts
    available: int
    counts_weights: bool = True
    expanded_bytes: int = 0

    @property
    def model(self) -> CausalLM:
        """Returns the target."""
        return self.models.target

    @property
    def draft(self) -> DraftModel | None:
        return self.models.draft

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Returns the device on which the model is to run."""
        return self.facts.device

    @property
    def has_draft_head(self) -> bool:
        return self.draft is not None

    @property
    def prompt_token_bytes(self) -> int:
        """Returns the bytes of activations that a prompt token holds at once."""
        # These are the residual stream, its norm, the result of attention, and two intermediate sums.
        of_stream = 5 * self.spec.hidden_size
        return (of_stream + self.model.work().activations) * self.dtype.itemsize

    def round_row_bytes(self, depth: int) -> int:
        """Returns the bytes of a row's logits in a round of this depth, as the model computes them and in
        float32."""
        return (depth + 1) * self.spec.vocab_size * (self.dtype.itemsize + torch.float32.itemsize)

    def estimated_steps_bytes(
        self, *, num_rows: int, depth: int, most_prompt_tokens: int, max_model_len: int
    ) -> int:
        """Returns an estimate of the GPU memory of the largest steps and all graphs, before they are tried.
        most_prompt_tokens: the most prompt tokens of a pass."""
        for_prompts = most_prompt_tokens * self.prompt_token_bytes
        for_round = _LOGITS_COPIES * num_rows * self.round_row_bytes(depth)
        # Graphs have a memory pool of their own.
        scratch = 2 * self.attention_scratch_bytes(num_rows, depth + 1, max_model_len)
        return max(for_prompts, for_round) + scratch + len(self.model.layers) * _GRAPHS_BYTES_A_LAYER

    def attention_scratch_bytes(self, num_rows: int, window: int, max_model_len: int) -> int:
        """Returns the most bytes of the partial results of a layer's attention in a round."""
        return max(
            (self._scratch_bytes(a, num_rows, window, max_model_len) for a in set(self.spec.attentions)),
            default=0,
        )

    def _scratch_bytes(self, kind: AttentionSpec, num_rows: int, window: int, max_model_len: int) -> int:
        if not is_split_kv(window, kind.gqa_group_size, None):
            return 0
        size = self.dtype.itemsize
        config = split_kv_config(
            num_rows,
            window,
            (kind.num_heads, kind.num_kv_heads),
            kind.head_dim,
            size,
            max_keys=split_kv_keys(max_model_len, window, kind.sliding_window, kind.head_dim, size),
            num_multiprocessors=max(self.facts.num_multiprocessors, 1),
        )
        numbers = split_kv_partials(config, window, kind.num_heads) * (kind.head_dim + 2)
        return numbers * torch.float32.itemsize

    @classmethod
    def of_loaded(cls, models: ModelPair, facts: DeviceFacts, available: int) -> Outline:
        """Describes models whose weights are loaded."""
        expanded_bytes = sum(linear.expanded_bytes for linear in models.linears())
        return cls(models.outline(), facts, available, expanded_bytes=expanded_bytes)
