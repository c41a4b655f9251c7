"""Random config.json contents: values spelled in every way that transformers takes, and slips of the pen."""

from __future__ import annotations

import random

WINDOWS = ("full_attention", "attention", "sliding_attention", "linear_attention", "dense")
# Values that some key of some file was seen with, or that a hand might write.
SLIPS = (None, True, False, 0, 1, -1, 3, 4096.0, 1e12, 0.5, "silu", "64", "", [], [1, "x"], ["full_attention"], {},
         {"rope_type": "default"}, float("nan"), float("inf"), 10**30)  # fmt: skip
MODEL_TYPES = {
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama",
    "MiMoForCausalLM": "mimo", "Qwen3_5ForCausalLM": "qwen3_5_text", "MistralForCausalLM": "mistral",
    "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text", "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text", "Qwen3NextForCausalLM": "qwen3_next", "MixtralForCausalLM": "mixtral",
}  # fmt: skip
SLIPPING = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_parameters",
    "rope_scaling", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "pad_token_id",
    "bos_token_id", "eos_token_id", "initializer_range", "attention_dropout", "use_cache", "is_causal",
    "per_layer_config", "partial_rotary_factor", "attention_bias", "mlp_bias", "num_nextn_predict_layers",
    "hidden_activation", "sliding_window_pattern", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "use_bidirectional_attention", "rope_local_base_freq", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip


def random_config(seed: int, architecture: str, *, slips: bool) -> dict[str, object]:
    """Returns a tiny model's config. slips: one key in three configurations has a value that may be none of
    its own."""
    rng = random.Random(seed)
    num_layers, heads = rng.randint(1, 3), rng.choice([1, 2, 4, 6])
    config: dict[str, object] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": rng.randint(40, 90),
        "hidden_size": rng.choice([16, 24, 48]),
        "intermediate_size": rng.choice([8, 20, 32]),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "max_position_embeddings": rng.choice([64, 100, 4096]),
        "num_key_value_heads": rng.choice([1, heads, None]),
    }
    optional: dict[str, object] = {
        "head_dim": rng.choice([2, 8, 10]),
        "hidden_act": rng.choice(["silu", "swish", "gelu_pytorch_tanh", "gelu"]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 0.0, 0.01]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_theta": rng.choice([_theta(rng), 10000, 1_000_000]),
        "rope_scaling": _rope(rng, num_layers),
        "rope_parameters": _rope(rng, num_layers),
        "partial_rotary_factor": rng.choice([0.5, 1.0]),
        "use_sliding_window": rng.random() < 0.4,
        "sliding_window": rng.choice([4, 16, None]),
        "max_window_layers": rng.randint(0, num_layers + 1),
        "layer_types": [rng.choice(WINDOWS[: rng.choice([1, 2, 2, 2, 5])]) for _ in range(num_layers)],
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "attention_dropout": rng.choice([0, 0.1]),
        "pad_token_id": rng.choice([None, 0, 39, -1]),
        "eos_token_id": rng.choice([None, 1, [1, 2]]),
        "torch_dtype": rng.choice(["float32", "bfloat16"]),
        "dtype": rng.choice(["float32", None]),
        "num_nextn_predict_layers": 0,
        "use_mrope": False,
    }
    config |= {key: value for key, value in optional.items() if rng.random() < 0.35}
    # Llama has no windows, others have them in all layers or in none: most would be refused.
    same_layers = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM")
    if architecture in same_layers and rng.random() < 0.9:
        refused = (
            ("sliding_window", "layer_types") if architecture == "LlamaForCausalLM" else ("layer_types",)
        )
        config = {key: v for key, v in config.items() if key not in refused}
    if rng.random() < 0.1:  # the default of num_key_value_heads is 32, not the number of heads
        config |= {"num_attention_heads": rng.choice([32, 64, 8]), "hidden_size": 128, "head_dim": 4}
        del config["num_key_value_heads"]
    if architecture in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"):
        config |= _delta_net(rng, num_layers)
    if architecture in ("Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"):
        config |= _experts(rng, num_layers)
    if architecture == "MixtralForCausalLM":
        config |= {"num_local_experts": rng.randint(2, 5), "num_experts_per_tok": rng.choice([1, 2, 2, 3])}
    if architecture.startswith("Gemma"):
        config = _gemma(rng, config, has_two_ropes=architecture == "Gemma3ForCausalLM")
    if "layer_types" in config and rng.random() < 0.1:
        config["layer_types"] = ["full_attention"] * (num_layers + 1)
    if slips and rng.random() < 1 / 3:
        config[rng.choice(SLIPPING)] = rng.choice(SLIPS)
    return config


def _delta_net(rng: random.Random, num_layers: int) -> dict[str, object]:
    """Returns the keys of layers without attention, and mostly one with it."""
    heads = rng.choice([1, 2, 3])
    kinds = [rng.choice(("linear_attention", "full_attention")) for _ in range(num_layers)]
    if rng.random() < 0.9:
        kinds[rng.randrange(num_layers)] = "full_attention"
    by_interval = {"full_attention_interval": rng.choice([1, 2, 4])}
    return {
        "head_dim": rng.choice([8, 16, 24, 32]),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * rng.choice([1, 2, 3]) + (rng.random() < 0.1),
        "linear_key_head_dim": rng.choice([4, 6, 16]),
        "linear_value_head_dim": rng.choice([4, 10, 16]),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4]),
        **({"layer_types": kinds} if rng.random() < 0.7 else by_interval),
    }


def _experts(rng: random.Random, num_layers: int) -> dict[str, object]:
    """Returns the keys of Qwen's experts. transformers reads sparse_step and mlp_only_layers for two
    families."""
    size = rng.choice([4, 12, 16])
    optional: dict[str, object] = {
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.choice([1, 1, 2]),
        "mlp_only_layers": rng.choice([None, [], [rng.randrange(num_layers)]]),
        "router_aux_loss_coef": 0.01,
    }
    return {
        "num_experts": rng.randint(2, 9),
        "num_experts_per_tok": rng.choice([1, 2, 2, 2, 3]),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size if rng.random() < 0.9 else size + 1,
    } | {key: value for key, value in optional.items() if rng.random() < 0.5}


def _gemma(rng: random.Random, config: dict[str, object], *, has_two_ropes: bool) -> dict[str, object]:
    """Returns the keys of Gemma 2 and 3, for the latter mostly with positions of each type of layer."""
    own: dict[str, object] = {
        "hidden_activation": rng.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu", "gelu"]),
        "query_pre_attn_scalar": rng.choice([64, 100, 256]),
        "sliding_window_pattern": rng.choice([1, 2, 3]),
        "attn_logit_softcapping": rng.choice([None, None, None, 2.0]),
        "final_logit_softcapping": rng.choice([None, 5.0]),
        "use_bidirectional_attention": rng.choice([None, False, False, False, True]),
    }
    config = config | {key: value for key, value in own.items() if rng.random() < 0.5}
    if rng.random() < 0.9:  # null is refused
        config |= {"num_key_value_heads": 1, "sliding_window": rng.choice([1, 4, 16, 100])}
    if not has_two_ropes:
        return config
    ropes = {kind: _rope(rng, 0) for kind in ("full_attention", "sliding_attention") if rng.random() < 0.9}
    changes: dict[str, object] = {
        "rope_parameters": ropes if rng.random() < 0.9 else None,
        "rope_local_base_freq": _theta(rng),
        "rope_scaling": rng.choice([None, None, {"rope_type": "linear", "factor": 8.0}, _rope(rng, 0)]),
    }
    changes = {key: value for key, value in changes.items() if rng.random() < 0.7}
    return {key: v for key, v in config.items() if not key.startswith("rope_s")} | changes


def _theta(rng: random.Random) -> float:
    return float(10 ** rng.uniform(1, 8))


def _rope(rng: random.Random, num_layers: int) -> object:
    kinds: tuple[object, ...] = (
        None,
        {},
        {"rope_theta": _theta(rng)},
        {"rope_theta": _theta(rng), "rope_type": "default"},
        {"type": "default"},
        {"type": "linear", "rope_type": "default", "factor": 4.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 4,
            "truncate": False,
        },
        {"rope_type": "yarn", "factor": 4, "mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": None},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 2},
        {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": None},
        {"rope_theta": None},
        {"full_attention": {"rope_theta": _theta(rng)}},
        {"full_attention": {"rope_theta": _theta(rng)}, "rope_type": "default", "rope_theta": _theta(rng)},
        {"sliding_attention": None, "rope_theta": _theta(rng)},
    )
    return rng.choice(kinds[: rng.choice([6, 7, 15, len(kinds)])])
