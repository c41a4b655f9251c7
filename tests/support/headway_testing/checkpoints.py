"""Model folders for tests: tiny random ones, and one whose MTP head is right as often as is asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

# Sizes of no special kind: grouped heads, a head_dim that is not hidden / heads, no powers of two.
TINY = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def mimo_config(**changes: object) -> dict[str, object]:
    """Returns the content of config.json: TINY with the keys of MiMo-7B."""
    return {
        **TINY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        **changes,
    }


def qwen2_config(**changes: object) -> dict[str, object]:
    mtp = {"num_nextn_predict_layers": 0}
    return mimo_config(architectures=["Qwen2ForCausalLM"], model_type="qwen2", **mtp | changes)


def tensor_shapes(config: dict[str, object], *, with_draft_head: bool) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of a checkpoint, as Hugging Face's Qwen2 and MiMo-7B have them."""
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    vocab, hidden = sizes["vocab_size"], sizes["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(sizes["num_hidden_layers"]):
        shapes |= _block_shapes(f"model.layers.{index}.", sizes)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(sizes["num_nextn_predict_layers"] if with_draft_head else 0):
        prefix = f"model.mtp_layers.{index}."
        shapes |= _block_shapes(prefix, sizes)
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("token", "hidden", "final")}
        shapes[f"{prefix}input_proj.weight"] = (hidden, 2 * hidden)
    return shapes


def _block_shapes(prefix: str, sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, kv = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for name, size in (("q", query), ("k", kv), ("v", kv)):
        shapes[f"self_attn.{name}_proj.weight"] = (size, hidden)
        shapes[f"self_attn.{name}_proj.bias"] = (size,)
    return {prefix + name: shape for name, shape in shapes.items()}


def random_tensors(
    config: dict[str, object], *, with_draft_head: bool, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Draws weights large enough for every part to matter; norm weights and biases are far from one and
    zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config, with_draft_head=with_draft_head).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1 + 0.4 * noise
        elif name.endswith(".bias"):
            tensors[name] = 0.5 * noise
        elif "embed_tokens" in name:
            tensors[name] = noise
        else:
            tensors[name] = 1.5 * noise / math.sqrt(shape[-1])
    return tensors


def write_folder(
    path: Path, config: dict[str, object], tensors: dict[str, torch.Tensor], *, num_shards: int = 1
) -> Path:
    """Writes one file, or shards with an index; the tensors are distributed over the shards in turn."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    places = {name: i % num_shards for i, name in enumerate(tensors)}
    for shard, file in enumerate(names):
        save_file({name: t for name, t in tensors.items() if places[name] == shard}, path / file)
    weight_map = {name: names[place] for name, place in places.items()}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def random_mimo(path: Path, *, seed: int = 0, **changes: object) -> Path:
    """Writes a tiny random MiMo folder with its MTP head; drafts are nearly never right."""
    config = mimo_config(**changes)
    return write_folder(path, config, random_tensors(config, with_draft_head=True, seed=seed))


def random_qwen2(path: Path, *, seed: int = 0, **changes: object) -> Path:
    config = qwen2_config(**changes)
    return write_folder(path, config, random_tensors(config, with_draft_head=False, seed=seed))


def constructed_mimo(path: Path, *, noise: float = 0.0, seed: int = 0, **changes: object) -> Path:
    """A MiMo folder whose greedy text walks a random cycle through the vocabulary, t -> P[t].

    With noise 0 no block adds anything, trunk and head both read P[t] off the embedding of t, and every
    draft at every depth is right. Noise scales random output projections, in trunk and head alike, so that
    the text depends on the context and the head is right less often: about 0.97 with noise 0.05, 0.8 with
    0.08, 0.6 with 0.1, 0.3 with 0.15, 0.15 with 0.2 (first draft, greedy, random text).
    """
    config = mimo_config(**{"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128} | changes)
    tensors = random_tensors(config, with_draft_head=True, seed=seed)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = torch.ones_like(tensor)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = noise * tensor
    embedding = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=-1)
    tensors["model.embed_tokens.weight"] = embedding
    successors = random_cycle(len(embedding), seed)
    tensors["lm_head.weight"] = torch.zeros_like(embedding).index_copy_(0, successors, embedding)
    hidden = embedding.shape[1]
    for name in tensors:
        if name.endswith(".input_proj.weight"):
            tensors[name] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    return write_folder(path, config, tensors)


def random_cycle(vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Returns [vocab] int64: the token that follows each token in the text of `constructed_mimo` without
    noise."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(order).index_copy_(0, order, order.roll(-1))


def walk(start: int, length: int, vocab_size: int = 128) -> list[int]:
    """Returns the text of `constructed_mimo` without noise, from the token `start` on."""
    successors, tokens = random_cycle(vocab_size).tolist(), [start]
    while len(tokens) < length:
        tokens.append(successors[tokens[-1]])
    return tokens
