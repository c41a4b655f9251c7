"""An oracle by transformers of the same weights: Qwen2 as it is, MiMo's MTP layers made of its layers. It
computes whole sequences without a cache.

It is saved with `save_pretrained`, so that names and config.json are transformers' own.
"""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from headway_testing.checkpoints import TINY

OFFSET_NORMS = (Qwen3_5RMSNorm, Qwen3_5MoeRMSNorm, Qwen3NextRMSNorm)  # multiply by 1 + weight
HEAD_PREFIX = "model.mtp_layers."
INDEX_FILE = "model.safetensors.index.json"


class HeadOracle(Qwen2DecoderLayer):
    """An MTP layer, with MiMo-7B's parameter names."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config, layer_idx=0)
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(hidden, eps=epsilon)
        self.hidden_layernorm = Qwen2RMSNorm(hidden, eps=epsilon)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = Qwen2RMSNorm(hidden, eps=epsilon)


class Oracle:
    """A tiny Qwen2 with MTP layers. Weights are large, norm weights and biases random: nothing is hidden."""

    def __init__(
        self, *, dtype: torch.dtype, seed: int = 0, num_draft_layers: int = 1, **changes: object
    ) -> None:
        self.config = Qwen2Config(
            **{
                **TINY,
                "attn_implementation": "sdpa",
                **changes,
            }
        )
        self.model = Qwen2ForCausalLM(self.config).eval()
        self.mtp_layers = [HeadOracle(self.config).eval() for _ in range(num_draft_layers)]
        generator = torch.Generator().manual_seed(seed)
        for module in (self.model, *self.mtp_layers):
            randomise(module, generator)
            module.to(dtype)
            if dtype == torch.float64:
                _widen_norms(module)

    def save(self, folder: Path, *, with_head: bool, max_shard_size: str = "1GB") -> Path:
        """Writes a folder as MiMo ships it, or without the head and under Qwen2's name."""
        self.model.save_pretrained(folder, max_shard_size=max_shard_size)
        if with_head:
            config = json.loads((folder / "config.json").read_text())
            config |= {
                "architectures": ["MiMoForCausalLM"],
                "model_type": "mimo",
                "num_nextn_predict_layers": len(self.mtp_layers),
            }
            (folder / "config.json").write_text(json.dumps(config))
            self._save_head(folder)
        return folder

    def _save_head(self, folder: Path) -> None:
        """Writes the head to a shard of its own, as model.safetensors may be one file."""
        tensors = {
            f"{HEAD_PREFIX}{index}.{name}": tensor
            for index, layer in enumerate(self.mtp_layers)
            for name, tensor in layer.state_dict().items()
        }
        save_file(tensors, folder / "mtp.safetensors")
        if (folder / INDEX_FILE).exists():
            index = json.loads((folder / INDEX_FILE).read_text())
        else:
            (folder / "model.safetensors").rename(folder / "trunk.safetensors")
            index = {"weight_map": {"model.norm.weight": "trunk.safetensors"}}
        index["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
        (folder / INDEX_FILE).write_text(json.dumps(index))

    @torch.no_grad()
    def hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Takes token_ids [tokens] int64, returns [tokens, hidden]: the residual stream before the final
        norm."""
        seen = []
        handle = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
        self.model(token_ids[None], use_cache=False)
        handle.remove()
        return seen[0]

    @torch.no_grad()
    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Takes token_ids [tokens] int64, returns [tokens, vocab]."""
        return self.model(token_ids[None], use_cache=False).logits[0]

    @torch.no_grad()
    def carries(self, hidden: torch.Tensor, token_ids: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Returns z of slots layer + 1 .. layer + n for the pairs (hidden[i], token_ids[i]): [n, hidden], [n]
        -> [n, hidden]."""
        head = self.mtp_layers[layer]
        embedded = self.model.model.embed_tokens(token_ids)
        x = head.input_proj(
            torch.cat([head.hidden_layernorm(hidden), head.token_layernorm(embedded)], dim=-1)
        )
        positions = torch.arange(layer + 1, layer + 1 + len(token_ids))[None]
        rotary = self.model.model.rotary_emb(x[None], positions)
        mask = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).tril()[None, None]
        y = head(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return head.final_layernorm(y[0])

    @torch.no_grad()
    def draft_logits(self, carry: torch.Tensor) -> torch.Tensor:
        """Takes [n, hidden], returns [n, vocab]."""
        return self.model.lm_head(carry)

    def draft_chain(self, token_ids: torch.Tensor, depth: int) -> torch.Tensor:
        """Returns logits of the greedy drafts 1 .. depth that follow token_ids [tokens]: [depth, vocab].
        Layer k reads the carries of layer k - 1; the last layer goes on with its own newest carry."""
        hidden, tokens, found = self.hidden(token_ids)[:-1], token_ids[1:], []
        last = len(self.mtp_layers) - 1
        for step in range(depth):
            carries = self.carries(hidden, tokens, min(step, last))
            found.append(self.draft_logits(carries[-1:])[0])
            if step < last:
                hidden, tokens = carries, tokens[1:]
            else:
                hidden = torch.cat([hidden, carries[-1:]])
            tokens = torch.cat([tokens, found[-1].argmax()[None]])
        return torch.stack(found)


def bfloat16_logits(folder: str, token_ids: Sequence[int]) -> torch.Tensor:
    """Returns [vocab] float64: transformers' logits after these tokens, computed in bfloat16."""
    with torch.no_grad():
        logits: torch.Tensor = _bfloat16_trunk(folder)(torch.tensor([token_ids]), use_cache=False).logits
    return logits[0, -1].double()


@cache
def _bfloat16_trunk(folder: str) -> Qwen2ForCausalLM:
    """Loads the trunk of a checkpoint in one file, of MiMo's or Qwen2's kind with an lm_head of its own,
    without its MTP head."""
    content = json.loads((Path(folder) / "config.json").read_text())
    config = Qwen2Config(**{k: v for k, v in content.items() if k not in ("architectures", "model_type")})
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    tensors = load_file(Path(folder) / "model.safetensors")
    model.load_state_dict({k: v for k, v in tensors.items() if not k.startswith(HEAD_PREFIX)})
    return model


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Draws weights large enough for every part to matter; norms and biases far from one and zero."""
    offset = {id(part.weight) for part in module.modules() if isinstance(part, OFFSET_NORMS)}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in offset:  # multiplies by 1 + weight
                parameter.copy_(0.4 * noise)
            elif "norm" in name:
                parameter.copy_(1 + 0.4 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.5 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)


def _widen_norms(module: nn.Module) -> None:
    """Lets an oracle be exact to 1e-10: transformers' norms round to float32 whatever the dtype."""

    def forward(self: Qwen2RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    for part in module.modules():
        if isinstance(part, Qwen2RMSNorm):
            part.forward = types.MethodType(forward, part)
