"""A tiny model of each family, saved by transformers with random weights, norms and biases, and its
logits."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from headway_testing.checkpoints import TINY
from headway_testing.oracle import randomise
from headway_testing.paged import PagedSequences, load

CLASSES = {
    "Qwen2ForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    # transformers has no class for MiMo; without its MTP head it is a Qwen2.
    "MiMoForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3_5ForCausalLM": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "MistralForCausalLM": (MistralConfig, MistralForCausalLM),
    "Gemma2ForCausalLM": (Gemma2Config, Gemma2ForCausalLM),
    "Gemma3ForCausalLM": (Gemma3TextConfig, Gemma3ForCausalLM),
    "Qwen3MoeForCausalLM": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "Qwen3_5MoeForCausalLM": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "Qwen3NextForCausalLM": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "MixtralForCausalLM": (MixtralConfig, MixtralForCausalLM),
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SHARED_EXPERT = {"shared_expert_intermediate_size": 24}
# Keys that a family's config has besides, or in the place of TINY's.
OWN = {
    "Qwen3_5ForCausalLM": DELTA_NET,
    "Qwen3MoeForCausalLM": EXPERTS,
    "Qwen3_5MoeForCausalLM": DELTA_NET | EXPERTS | SHARED_EXPERT,
    # transformers leaves out the MTP head, which checkpoints of this family have by default.
    "Qwen3NextForCausalLM": DELTA_NET | EXPERTS | SHARED_EXPERT | {"mtp_num_hidden_layers": 0},
    "MixtralForCausalLM": {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
    "MistralForCausalLM": {"sliding_window": 20},
    # Caps so low that scores and logits of random models reach them.
    "Gemma2ForCausalLM": {
        "tie_word_embeddings": True,
        "sliding_window": 20,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 6.0,
        "attn_implementation": "eager",
    },
    "Gemma3ForCausalLM": {
        "tie_word_embeddings": True,
        "sliding_window": 20,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
# rope_type and what it needs, as config.json gives it.
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn with its own factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
        "beta_fast": 8,
        "beta_slow": 2,
        "truncate": False,
    },
}
# Changes that each family of dense models is tested with.
COMMON_VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {},
    "ungrouped": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
}
TOLERANCE = 2e-4  # of logits of about 10, which sums in another order change by 1e-5 of that
# Spans of 75 tokens: one prefill, chunks, single tokens after a prompt, windows after a prompt.
CUTS = ([75], [32, 32, 11], [1, 15, 16, 43], [70, 1, 1, 1, 1, 1], [60, 4, 4, 4, 3])


def tiny_model(architecture: str, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Returns transformers' model with random weights in float32. Its config writes to the dicts that it is
    given."""
    config_class, model_class = CLASSES[architecture]
    keys = {**TINY, "attn_implementation": "sdpa", **OWN.get(architecture, {}), **changes}
    config = config_class(**deepcopy(keys))
    model = model_class(config).eval()
    randomise(model, torch.Generator().manual_seed(seed))
    return model


def save(model: PreTrainedModel, architecture: str, folder: Path) -> Path:
    model.save_pretrained(folder)
    if architecture == "MiMoForCausalLM":
        content = json.loads((folder / "config.json").read_text())
        content |= {"architectures": [architecture], "model_type": "mimo"}
        (folder / "config.json").write_text(json.dumps(content))
    return folder


def assert_logits_of_transformers(theirs: PreTrainedModel, folder: Path) -> None:
    """Compares logits over every cut of one sequence into chunks, single tokens and windows."""
    model = load(folder, dtype="float32")
    tokens = torch.randint(0, 151, (75,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = theirs(tokens[None], use_cache=False).logits[0]
    for widths in CUTS:
        sequences, first, parts = PagedSequences(model, 1, len(tokens)), 0, []
        for width in widths:
            parts.append(sequences.forward([(0, first, width)], tokens[first : first + width]))
            first += width
        difference = (model.logits(torch.cat(parts)) - wanted).abs().max().item()
        assert difference < TOLERANCE, (widths, difference)
