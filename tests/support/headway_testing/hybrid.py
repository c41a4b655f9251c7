"""An oracle of a tiny Qwen3.5, with or without experts, or Qwen3-Next. transformers has no class for the MTP
head, which is made of its layers.

It is saved as the published checkpoints are: as the text part of a model that sees images, or alone. It
computes whole sequences without a cache.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from headway_testing.checkpoints import TINY, random_cycle
from headway_testing.families import CLASSES, OWN
from headway_testing.oracle import OFFSET_NORMS, randomise

# Sizes as the published ones have them, in four layers, for kernels on a GPU.
REAL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
EXPERTS = REAL | {
    "architecture": "Qwen3_5MoeForCausalLM",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "num_position_embeddings": 16,
}  # fmt: skip


LAYERS = {
    "Qwen3_5ForCausalLM": (Qwen3_5DecoderLayer, Qwen3_5RMSNorm),
    "Qwen3_5MoeForCausalLM": (Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm),
    "Qwen3NextForCausalLM": (Qwen3NextDecoderLayer, Qwen3NextRMSNorm),
}
SEEING = {
    "Qwen3_5ForCausalLM": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "Qwen3_5MoeForCausalLM": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}


class MtpOracle(nn.Module):
    """The MTP head, with the parameter names of the checkpoints."""

    def __init__(self, config: PreTrainedConfig, architecture: str) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        layer, norm = LAYERS[architecture]
        of_layer = copy.deepcopy(config)
        of_layer.layer_types = ["full_attention"]
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = norm(hidden, eps=epsilon)
        self.pre_fc_norm_hidden = norm(hidden, eps=epsilon)
        self.norm = norm(hidden, eps=epsilon)
        self.layers = nn.ModuleList([layer(of_layer, layer_idx=0)])


class HybridOracle:
    """Has random weights in float32, and the methods of `Oracle`."""

    def __init__(self, *, seed: int = 0, architecture: str = "Qwen3_5ForCausalLM", **changes: object) -> None:
        own, (config_class, model_class) = OWN[architecture], CLASSES[architecture]
        self.architecture = architecture
        self.config = config_class(
            **{**TINY, **own, "attn_implementation": "sdpa", "mtp_num_hidden_layers": 1, **changes}
        )
        self.model = model_class(self.config).eval()
        self.head = MtpOracle(self.config, architecture).eval()
        generator = torch.Generator().manual_seed(seed)
        for module in (self.model, self.head):
            randomise(module, generator)

    def save(self, folder: Path, *, with_head: bool = True, sees_images: bool = False) -> Path:
        """Writes one file of weights."""
        model = self.model
        if sees_images:
            vision = VISION | {"out_hidden_size": self.config.hidden_size}
            tied = self.config.tie_word_embeddings
            config_class, model_class = SEEING[self.architecture]
            config = config_class(
                text_config=self.config.to_dict(), vision_config=vision, tie_word_embeddings=tied
            )
            model = model_class(config)
            model.model.language_model.load_state_dict(self.model.model.state_dict())
            model.lm_head.load_state_dict(self.model.lm_head.state_dict())
        model.save_pretrained(folder)
        if with_head:
            change_tensors(folder, {f"mtp.{name}": tensor for name, tensor in self.head.state_dict().items()})
        return folder

    @torch.no_grad()
    def hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [tokens] int64. Returns [tokens, hidden]: after the final norm, which is what the head
        reads."""
        return self.model.model(token_ids[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Takes token_ids [tokens] int64, returns [tokens, vocab]."""
        return self.model(token_ids[None], use_cache=False).logits[0]

    @torch.no_grad()
    def carries(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns z of slots 1 .. n for the pairs (hidden[i], token_ids[i]): [n, hidden], [n] -> [n,
        hidden]."""
        head, embedded = self.head, self.model.model.embed_tokens(token_ids)
        x = head.fc(
            torch.cat([head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)], dim=-1)
        )
        positions = torch.arange(1, 1 + len(token_ids))[None]
        rotary = self.model.model.rotary_emb(x[None], positions)
        mask = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).tril()[None, None]
        y = head.layers[0](x[None], position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        return head.norm(y[0])

    @torch.no_grad()
    def draft_logits(self, carry: torch.Tensor) -> torch.Tensor:
        """Takes [n, hidden], returns [n, vocab]."""
        return self.model.lm_head(carry)

    def draft_chain(self, token_ids: torch.Tensor, depth: int) -> torch.Tensor:
        """Returns logits of the greedy drafts 1 .. depth that follow token_ids [tokens]: [depth, vocab]."""
        hidden, tokens, found = self.hidden(token_ids)[:-1], token_ids[1:], []
        for _ in range(depth):
            carries = self.carries(hidden, tokens)
            found.append(self.draft_logits(carries[-1:])[0])
            hidden = torch.cat([hidden, carries[-1:]])
            tokens = torch.cat([tokens, found[-1].argmax()[None]])
        return torch.stack(found)


def change_tensors(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    """Adds tensors to a folder's one file of weights, or replaces them."""
    rewrite(folder, lambda tensors: tensors | changes)


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors with those of each expert in the place of packed ones."""
    found = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True)
        elif kind == "down_proj" and tensor.dim() == 3:
            halves = iter([("down_proj", tensor)])
        else:
            found[name] = tensor
            continue
        for part, own in halves:
            found |= {f"{layer}.{index}.{part}.weight": expert for index, expert in enumerate(own)}
    return found


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors with those of all experts of a layer in one, as the bf16 checkpoints of Qwen3.6
    have them: gates, then up, of each."""
    found, parts = {}, defaultdict(dict)
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            found[name] = tensor
        else:
            parts[match[1]][int(match[2]), match[3]] = tensor
    for layer, own in parts.items():
        count = 1 + max(index for index, _ in own)
        gate, up, down = (
            torch.stack([own[index, f"{part}_proj"] for index in range(count)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{layer}.gate_up_proj": torch.cat([gate, up], dim=1), f"{layer}.down_proj": down}
    return found


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Changes the tensors of a folder's one file of weights."""
    file = folder / "model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(file)).items()}, file, {"format": "pt"})
    return folder


def constructed_hybrid(path: Path, *, noise: float = 0.0, seed: int = 0, **changes: object) -> Path:
    """Writes a Qwen3.5 folder whose greedy text walks a random cycle through the vocabulary: see
    `constructed_mimo`. With noise 0 every draft at every depth is right. Noise scales the random output
    projections of trunk and head alike."""
    oracle = HybridOracle(seed=seed, **{"vocab_size": 128, "hidden_size": 64} | changes)
    with torch.no_grad():
        for module in (oracle.model, oracle.head):
            for name, parameter in module.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                    parameter.mul_(noise)
            for part in module.modules():
                if isinstance(part, OFFSET_NORMS):
                    part.weight.zero_()
        embedding = nn.functional.normalize(oracle.model.model.embed_tokens.weight, dim=-1)
        oracle.model.model.embed_tokens.weight.copy_(embedding)
        successors = random_cycle(len(embedding), seed)
        oracle.model.lm_head.weight.copy_(torch.zeros_like(embedding).index_copy_(0, successors, embedding))
        hidden = embedding.shape[1]
        oracle.head.fc.weight.copy_(torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1))
    return oracle.save(path)


def text_config_of(folder: Path) -> dict[str, object]:
    """Returns the keys of the text part of a folder's config.json."""
    content = json.loads((folder / "config.json").read_text())
    return content.get("text_config", content)
