"""The demo model for training and evaluation: MiMo's blocks and its MTP layer over whole sequences.

Module names are those of MiMo-7B's checkpoint, so that `state_dict()` is the checkpoint. Serving does not use
this file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

DraftMask = BlockMask | Tensor  # a Tensor is [1, 1, tokens, step * tokens] bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of the model, under the keys of config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    def as_mimo(self) -> dict[str, object]:
        """Returns the content of config.json, with the keys of MiMo-7B's."""
        return {
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "mimo",
            "num_nextn_predict_layers": 1,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_mrope": False,
            "use_sliding_window": False,
            **asdict(self),
        }


class RMSNorm(nn.Module):
    """RMSNorm with a weight per channel, computed in float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden] -> the same
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with biases on q, k and v, and half-split rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size)
        self.k_proj = nn.Linear(config.hidden_size, kv_size)
        self.v_proj = nn.Linear(config.hidden_size, kv_size)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.head_dim = config.head_dim

    def heads(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, [batch, heads, tokens, head_dim] each; q and k are rotated."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, rope), rotate(k, rope), v

    def output(
        self, attended: Tensor
    ) -> Tensor:  # [batch, heads, tokens, head_dim] -> [batch, tokens, hidden]
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """The gated SiLU feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config)
        self.dropout = dropout

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:  # [batch, tokens, hidden]
        q, k, v = self.self_attn.heads(self.input_layernorm(x), rope)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.finish(x, attended)

    def step(self, x: Tensor, position: int, rope: tuple[Tensor, Tensor], cache: Tensor) -> Tensor:
        """Computes one token per row, [batch, 1, hidden], and appends to the cache, [2, batch, kv_heads,
        tokens, head_dim] (k, v)."""
        q, k, v = self.self_attn.heads(self.input_layernorm(x), rope)
        cache[:, :, :, position] = torch.stack([k, v])[:, :, :, 0]
        keys, values = cache[:, :, :, : position + 1]
        return self.finish(x, F.scaled_dot_product_attention(q, keys, values, enable_gqa=True))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Computes the rest of the block after attention."""
        x = x + F.dropout(self.self_attn.output(attended), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class MTPLayer(Block):
    """The multi-token-prediction (MTP) layer: a block over pairs (preceding hidden state, token)."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__(config, dropout)
        self.token_layernorm = RMSNorm(config)
        self.hidden_layernorm = RMSNorm(config)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.final_layernorm = RMSNorm(config)

    def pair(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Returns the inputs of the block. In MiMo the hidden state precedes the token's embedding."""
        x: Tensor = self.input_proj(
            torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], -1)
        )
        return x


class Trunk(nn.Module):
    """The module that the checkpoint calls `model`: embedding, blocks, norm and the MTP layer."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, dropout) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)
        self.mtp_layers = nn.ModuleList([MTPLayer(config, dropout)])


class DemoModel(nn.Module):
    """Target and drafter, both over whole sequences."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.dropout = dropout
        self.model = Trunk(config, dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            _initialise(name, parameter)

    def embed(self, ids: Tensor) -> Tensor:  # [batch, tokens] -> [batch, tokens, hidden]
        return F.dropout(self.model.embed_tokens(ids), self.dropout, self.training)

    def hidden(self, ids: Tensor) -> Tensor:
        """Returns the target's hidden state before its final norm, which is the input of the MTP layer."""
        x = self.embed(ids)
        rope = rope_table(self.config, 0, ids.shape[1], ids.device)
        for layer in self.model.layers:
            x = layer(x, rope)
        return x  # [batch, tokens, hidden]

    def step(self, ids: Tensor, position: int, caches: Tensor) -> Tensor:
        """Returns `hidden` for one token per row, [batch, hidden]. ids: [batch]; caches: as in
        empty_caches."""
        x = self.embed(ids[:, None])
        rope = rope_table(self.config, position, 1, ids.device)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            assert isinstance(layer, Block)
            x = layer.step(x, position, rope, cache)
        return x[:, 0]

    def empty_caches(self, rows: int, tokens: int) -> Tensor:
        """Returns KV caches, [layers, 2, rows, kv_heads, tokens, head_dim]."""
        c, like = self.config, self.lm_head.weight
        shape = (c.num_hidden_layers, 2, rows, c.num_key_value_heads, tokens, c.head_dim)
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the target's logits, [..., vocab], from its hidden state before the final norm, [...,
        hidden]."""
        out: Tensor = self.lm_head(self.model.norm(hidden))
        return out

    def draft_states(self, hidden: Tensor, ids: Tensor, masks: list[DraftMask]) -> list[Tensor]:
        """Returns the normed state z of each of `depth` draft steps from every position; the logits are
        `lm_head(z)`.

        hidden  [batch, tokens, hidden]         h_0 .. h_{T-1}, before the final norm
        ids     [batch, tokens + depth]         t_0 .. t_{T+depth-1}
        masks   depth of them, from draft_masks
        result  depth of [batch, tokens, hidden]

        Base n (0-based) is MTP slot i = n + 1. Step 1 runs the pair (h_{i-1}, t_i) at slot i and predicts
        t_{i+1}. Step s > 1 runs the pair (z of step s-1, t_{i+s-1}) at slot i+s-1 and predicts t_{i+s}; it
        sees the true pairs at slots <= i and this base's own steps 2..s, as a server drafting from slot i
        would. The tokens are the true ones: a step counts only where the drafts before it were accepted.
        """
        layer = self.model.mtp_layers[0]
        assert isinstance(layer, MTPLayer)
        tokens = hidden.shape[1]
        carried, states = hidden, []
        keys, values = [], []
        for step, mask in enumerate(masks, start=1):
            x = layer.pair(carried, self.embed(ids[:, step : step + tokens]))
            rope = rope_table(self.config, step, tokens, ids.device)
            q, k, v = layer.self_attn.heads(layer.input_layernorm(x), rope)
            keys.append(k)
            values.append(v)
            attended = attend_drafting(q, torch.cat(keys, 2), torch.cat(values, 2), mask)
            carried = layer.final_layernorm(layer.finish(x, attended))
            states.append(carried)
        return states


def _initialise(name: str, parameter: nn.Parameter) -> None:
    if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
        nn.init.zeros_(parameter)
    elif parameter.dim() > 1:
        nn.init.normal_(parameter, std=0.02)


def rope_table(config: ModelConfig, start: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin for positions start .. start + tokens - 1, [tokens, head_dim / 2] float32 each."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    positions = torch.arange(start, start + tokens, device=device, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_theta**-half)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Returns x after RoPE, which rotates channel c with channel c + head_dim / 2."""
    cos, sin = rope
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attend_drafting(q: Tensor, k: Tensor, v: Tensor, mask: DraftMask) -> Tensor:
    """Returns the attention of one draft step under its mask. q: [batch, heads, tokens, head_dim]; k, v:
    [batch, kv_heads, step * tokens, head_dim]."""
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def draft_masks(tokens: int, depth: int, device: torch.device, *, is_sparse: bool) -> list[DraftMask]:
    """Returns the mask of each draft step: causal over the first `tokens` keys, the same index in later
    groups.

    With 3 tokens, step 2 sees      key      0 1 2 | 3 4 5
                                    query 0  x . . | x . .
                                    query 1  x x . | . x .
                                    query 2  x x x | . . x
    The sparse kind, for long sequences, needs CUDA and torch.compile.
    """

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where(key < tokens, key <= query, key % tokens == query)

    make = create_block_mask if is_sparse else create_mask
    return [make(visible, None, None, tokens, step * tokens, device) for step in range(1, depth + 1)]


def save_checkpoint(model: DemoModel, folder: Path) -> None:
    """Writes model.safetensors in bfloat16 and config.json."""
    tensors = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.as_mimo(), indent=2, sort_keys=True) + "\n")


def load_checkpoint(folder: Path) -> DemoModel:
    """Returns the model of a folder, in float32 and evaluation mode."""
    numbers = json.loads((folder / "config.json").read_text())
    names = ModelConfig.__slots__
    model = DemoModel(ModelConfig(**{name: numbers[name] for name in names}))
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval()
