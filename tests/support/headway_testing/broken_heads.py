"""Breaks the MTP head of a checkpoint of MiMo or Qwen3.5: one function for each kind of fault that a
conversion or a loader makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Head:
    """A checkpoint's tensors with the names of its head. block: the prefix of the head's decoder layer.
    other_block: that of a layer of the decoder with the same tensors."""

    tensors: Tensors
    prefix: str
    block: str
    input: str
    other_block: str

    @property
    def own(self) -> Tensors:
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith(self.prefix)}


def head_of(tensors: Tensors) -> Head:
    """Returns the head of a checkpoint in MiMo's or in Qwen3.5's names."""
    mimo = "model.mtp_layers.0."
    if any(name.startswith(mimo) for name in tensors):
        return Head(tensors, mimo, mimo, mimo + "input_proj.weight", "model.layers.0.")
    first = next(
        name for name in sorted(tensors) if name.endswith("self_attn.q_proj.weight") and "mtp" not in name
    )
    return Head(
        tensors, "mtp.", "mtp.layers.0.", "mtp.fc.weight", first.removesuffix("self_attn.q_proj.weight")
    )


def _missing(head: Head, generator: torch.Generator) -> Tensors:
    return {name: tensor for name, tensor in head.tensors.items() if name not in head.own}


def _zero(head: Head, generator: torch.Generator) -> Tensors:
    return head.tensors | {name: torch.zeros_like(tensor) for name, tensor in head.own.items()}


def _shuffled(head: Head, generator: torch.Generator) -> Tensors:
    weight = head.tensors[head.input]
    return head.tensors | {head.input: weight[torch.randperm(len(weight), generator=generator)]}


def _swapped(head: Head, generator: torch.Generator) -> Tensors:
    first, second = head.tensors[head.input].chunk(2, dim=1)
    return head.tensors | {head.input: torch.cat([second, first], dim=1)}


def _offset(by: float) -> Callable[[Head, torch.Generator], Tensors]:
    def change(head: Head, generator: torch.Generator) -> Tensors:
        return head.tensors | {name: tensor + by for name, tensor in head.own.items() if "norm" in name}

    return change


def _wrong_layer(head: Head, generator: torch.Generator) -> Tensors:
    """The head's block is a layer of the decoder."""
    other = {
        name.replace(head.other_block, head.block): tensor.clone()
        for name, tensor in head.tensors.items()
        if name.startswith(head.other_block)
    }
    assert other.keys() <= head.own.keys(), "the layers differ"
    return head.tensors | other


def _noisy(head: Head, generator: torch.Generator) -> Tensors:
    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return tensor + 0.5 * tensor.float().square().mean().sqrt().to(tensor.dtype) * noise

    return head.tensors | {name: noisy(tensor) for name, tensor in head.own.items()}


def _scaled(head: Head, generator: torch.Generator) -> Tensors:
    return head.tensors | {name: 10 * tensor for name, tensor in head.own.items()}


# By kind; norms lack their offset, or have it twice, where a family's (1 + w) is taken for w, or w for (1 +
# w).
FAULTS: dict[str, Callable[[Head, torch.Generator], Tensors]] = {
    "missing": _missing,
    "zero": _zero,
    "shuffled": _shuffled,
    "swapped": _swapped,
    "without_offset": _offset(-1.0),
    "doubled_offset": _offset(1.0),
    "wrong_layer": _wrong_layer,
    "noisy": _noisy,
    "scaled": _scaled,
}


def broken(source: Path, target: Path, kind: str, *, seed: int = 0) -> Path:
    """Copies a checkpoint of one file, with its head broken in this way."""
    target.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    head = head_of(load_file(source / "model.safetensors"))
    tensors = FAULTS[kind](head, torch.Generator().manual_seed(seed))
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    assert config.get("num_nextn_predict_layers", config.get("mtp_num_hidden_layers")) == 1
    return target
