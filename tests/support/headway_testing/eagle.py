"""What transformers' layers compute of EAGLE-3 heads, saved in both published layouts: heads for tiny models,
and one that is always right."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from headway_testing.families import tiny_model
from headway_testing.oracle import randomise

Layout = Literal["original", "speculators"]
# Sizes differ from those of the tiny targets' layers, but for hidden_size and vocab_size.
TINY_HEAD = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}
STYLES = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}


class EagleOracle(nn.Module):
    """An EAGLE-3 head for a model of transformers', over whole sequences, without a cache.

    options: the keys norm_before_residual, norm_before_fc, fc_norm, norm_output that are true. The submodules
    have the names of the speculators layout.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        *,
        taps: tuple[int, ...] = (1, 2),
        style: str = "llama",
        draft_vocab: int = 100,
        options: tuple[str, ...] = (),
        owns_embedding: bool = False,
        mask_token: int | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        **changes: object,
    ) -> None:
        super().__init__()
        config_class, layer_class, rotary_class = STYLES[style]
        self.config = config_class(**{**TINY_HEAD, **changes, "attn_implementation": "sdpa"})
        self.target, self.taps, self.options, self.mask_token = [target], taps, options, mask_token
        hidden, epsilon = self.config.hidden_size, self.config.rms_norm_eps
        tapped = target.config.hidden_size
        self.rotary = rotary_class(self.config)
        self.fc = nn.Linear(len(taps) * tapped, hidden, bias=False)
        self.layers = nn.ModuleList(
            layer_class(self.config, layer_idx=index) for index in range(self.config.num_hidden_layers)
        )
        first = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first.self_attn, name)
            wide = nn.Linear(2 * hidden, old.out_features, bias=old.bias is not None)
            setattr(first.self_attn, name, wide)
        first.hidden_norm = LlamaRMSNorm(hidden, eps=epsilon)
        self.norm = LlamaRMSNorm(hidden, eps=epsilon)
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        if "norm_before_fc" in options:
            self.input_norm = LlamaRMSNorm(len(taps) * tapped, eps=epsilon)
        if "fc_norm" in options:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(tapped, eps=epsilon) for _ in taps)
        if owns_embedding:
            self.embed_tokens = nn.Embedding(self.config.vocab_size, hidden)
        if mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, len(taps) * tapped))
        generator = torch.Generator().manual_seed(seed)
        randomise(self, generator)
        ids = torch.randperm(self.config.vocab_size, generator=generator)[:draft_vocab].sort().values
        self.d2t = ids - torch.arange(draft_vocab)
        for module in (self, target):
            module.eval().to(dtype)
            widen_norms(module)

    @property
    def ids(self) -> torch.Tensor:
        """Returns [draft vocab] int64: the target's ids."""
        return torch.arange(len(self.d2t)) + self.d2t

    def save(self, folder: Path, layout: Layout) -> Path:
        """Writes config.json and the weights, in the dtype float32 or float64 that they have."""
        folder.mkdir(parents=True, exist_ok=True)
        keys = {**self.config.to_diff_dict(), "model_type": self.config.model_type}
        keys |= {key: self.config.to_dict()[key] for key in TINY_HEAD}
        for key in ("architectures", "transformers_version", "dtype", "_attn_implementation"):
            keys.pop(key, None)
        drafts = {"draft_vocab_size": len(self.d2t), **dict.fromkeys(self.options, True)}
        hidden = self.target[0].config.hidden_size
        if hidden != self.config.hidden_size:
            drafts["target_hidden_size"] = hidden
        if self.mask_token is not None:
            drafts["pard_token" if layout == "original" else "mask_token_id"] = self.mask_token
        if layout == "original":
            # SGLang counts the layers that the stream leaves.
            eagle = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps]}
            architecture = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Qwen3ForCausalLMEagle3"}
            content = {
                **keys, **drafts, "architectures": [architecture[self.config.model_type]],
                "eagle_config": {"use_aux_hidden_state": True, **eagle},
            }  # fmt: skip
        else:
            drafts.setdefault("norm_before_residual", False)
            content = {
                **drafts, "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3" if self.mask_token is None else "peagle",
                "eagle_aux_hidden_state_layer_ids": list(self.taps), "transformer_layer_config": keys,
            }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(content))
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if layout == "original":
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
            if self.mask_token is not None:  # speculators stores one axis more
                tensors["mask_hidden"] = tensors["mask_hidden"][0]
        is_drafted = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        tensors |= {"d2t": self.d2t, "t2d": is_drafted.index_fill(0, self.ids, True)}
        save_file(tensors, folder / "model.safetensors")
        return folder

    @torch.no_grad()
    def states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Takes [tokens] int64, returns [tokens, hidden]: the states of the target that the head reads."""
        target = self.target[0]
        found = target(token_ids[None], use_cache=False, output_hidden_states=True).hidden_states
        return self.fused([found[tap][0] for tap in self.taps])

    @torch.no_grad()
    def fused(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Takes [n, target's hidden] of each tap, returns [n, hidden]."""
        if "fc_norm" in self.options:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        fused = torch.cat(parts, dim=-1)
        return self.fc(self.input_norm(fused) if "norm_before_fc" in self.options else fused)

    @torch.no_grad()
    def carries(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Takes [n, hidden] and [n], the pairs of slots 1 .. n. Returns [n, hidden]."""
        first, count = self.layers[0], len(token_ids)
        embedding = getattr(self, "embed_tokens", self.target[0].get_input_embeddings())
        normed = first.hidden_norm(hidden)
        residual = normed if "norm_before_residual" in self.options else hidden
        x = torch.cat([first.input_layernorm(embedding(token_ids)), normed], dim=-1)[None]
        positions = torch.arange(1, count + 1)[None]
        rotary = self.rotary(x, positions)
        mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        y = residual[None] + first.self_attn(x, position_embeddings=rotary, attention_mask=mask)[0]
        y = y + first.mlp(first.post_attention_layernorm(y))
        for layer in self.layers[1:]:
            y = layer(y, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return self.norm(y[0]) if "norm_output" in self.options else y[0]

    @torch.no_grad()
    def logits(self, carry: torch.Tensor) -> torch.Tensor:
        """Takes [n, hidden], returns [n, draft vocab]."""
        return self.lm_head(carry if "norm_output" in self.options else self.norm(carry))

    def draft_logits(self, token_ids: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Returns the logits, [draft vocab], of the greedy drafts 1 .. depth that follow the tokens, [tokens]
        int64."""
        hidden, tokens, found = self.states(token_ids[:-1]), token_ids[1:], []
        if self.mask_token is not None:
            mask = self.fused([*self.mask_hidden.view(len(self.taps), 1, -1)])
            hidden = torch.cat([hidden, mask.expand(depth - 1, -1)])
            tokens = torch.cat([tokens, tokens.new_full((depth - 1,), self.mask_token)])
            return list(self.logits(self.carries(hidden, tokens)[-depth:]))
        for _ in range(depth):
            carry = self.carries(hidden, tokens)[-1:]
            found.append(self.logits(carry)[0])
            hidden = torch.cat([hidden, carry])
            tokens = torch.cat([tokens, self.ids[found[-1].argmax()][None]])
        return found

    def drafts(self, token_ids: torch.Tensor, depth: int) -> list[int]:
        """Returns the greedy drafts that follow the tokens, as the target's ids."""
        return [int(self.ids[logits.argmax()]) for logits in self.draft_logits(token_ids, depth)]


def widen_norms(module: nn.Module) -> None:
    """Lets an oracle in float64 keep its precision: transformers' norms round to float32 whatever the
    dtype."""

    def forward(self: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    for part in module.modules():
        if type(part).__name__ in ("LlamaRMSNorm", "Qwen3RMSNorm", "Qwen2RMSNorm"):
            part.forward = types.MethodType(forward, part)


def constructed_eagle(
    folder: Path,
    layout: Layout,
    *,
    taps: tuple[int, ...] = (1, 2),
    moved: float = 0.0,
    seed: int = 0,
    **changes: object,
) -> tuple[Path, Path]:
    """Returns (a Llama's folder, that of an EAGLE-3 head whose every draft of greedy texts is right).

    The text walks a cycle through 100 of 128 tokens, t -> P[t], the head's vocabulary; all other tokens lead
    there. Token t is the unit vector t, and the feed-forward of each layer of the target turns the vectors of
    a share `moved` of the tokens into each other's. The head reads the vector of t_{i-1} off the last tap,
    and its feed-forward turns the vector of t into that of P[t], from which its lm_head tells P[P[t]]: so
    each draft goes on where the one before it ended. By another tap it is wrong about the share.
    """
    size, num_drafted = 128, 100
    sizes = {"vocab_size": size, "hidden_size": size, "num_attention_heads": 8}
    target = tiny_model("LlamaForCausalLM", **{**sizes, "intermediate_size": size, **changes})
    head = EagleOracle(
        target, dtype=torch.float32, taps=taps, draft_vocab=num_drafted, intermediate_size=size, **sizes
    )
    generator = torch.Generator().manual_seed(seed)
    order = head.ids[torch.randperm(num_drafted, generator=generator)]
    successors = order[torch.arange(size) % num_drafted].index_copy_(0, order, order.roll(-1))
    unit = torch.eye(size)
    with torch.no_grad():
        for module in (target, head):
            for name, parameter in module.named_parameters():
                if "norm" in name:
                    parameter.fill_(1)
                elif name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
        target.model.embed_tokens.weight.copy_(unit)
        stands = torch.arange(size)  # the vector that each token has, after the layers so far
        for index, layer in enumerate(target.model.layers):
            if index == taps[-1]:
                others = torch.zeros(size, size * (len(taps) - 1))
                head.fc.weight.copy_(torch.cat([others, unit[stands]], dim=1))
            places = torch.randperm(size, generator=generator)[: round(moved * size)]
            turned = torch.arange(size).index_copy_(0, places, places.roll(1))
            _turn(layer.mlp, turned)
            stands = turned[stands]
        # Row P[t] has the vector that t has in the end.
        target.lm_head.weight.copy_(unit[successors].T @ unit[stands])
        _turn(head.layers[0].mlp, successors)
        head.lm_head.weight.copy_(unit[successors].T[head.ids])
    target.save_pretrained(folder / "model")
    return folder / "model", head.save(folder / "drafter", layout)


def _turn(mlp: nn.Module, turned: torch.Tensor) -> None:
    """Makes a feed-forward after a plain norm turn unit vector t into unit vector turned[t], [size] int64."""
    size = len(turned)
    unit, length = torch.eye(size), torch.tensor(float(size)).sqrt()  # of a normed unit vector's one number
    mlp.gate_proj.weight.copy_(unit)
    mlp.up_proj.weight.copy_(unit)
    mlp.down_proj.weight.copy_((unit[turned].T - unit) / (F.silu(length) * length))
