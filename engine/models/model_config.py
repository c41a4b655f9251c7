"""What a Hugging Face config.json says of a model's shape. Imports no torch: the API process reads it too.

What the families that are served would compute differently is refused here, by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from headway.engine.models.config_keys import CONFIG_CLASSES, Qwen2Keys, ResolvedConfig, resolve_config
from headway.engine.models.model_files import is_folder, read_json_object
from headway.engine.protocol.errors import ModelError

SUPPORTED_ARCHITECTURES = tuple(CONFIG_CLASSES)
SUPPORTED_ACTIVATIONS = ("silu", "swish")  # two names of one function
MIN_POSITIONS = 2


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that shape the model. num_layers: of the trunk, without MTP layers.

    num_mtp_layers: what config.json announces; whether the checkpoint ships them, its tensors say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_epsilon: float
    rope_theta: float
    tie_word_embeddings: bool
    num_mtp_layers: int


def read_model_config(path: str | Path) -> ModelConfig:
    """Reads `config.json` of a model folder. Raises ModelError."""
    folder = Path(path)
    file = folder / "config.json"
    content = read_json_object(file)
    if content is None and not is_folder(folder):
        raise ModelError(f"the model folder {folder} does not exist; give a folder in Hugging Face layout")
    if content is None:
        raise ModelError(f"{folder} has no config.json; give a folder in Hugging Face layout")
    resolved = resolve_config(content, file)
    _check_what_is_computed(resolved)
    keys = resolved.keys
    return ModelConfig(
        architecture=resolved.architecture,
        vocab_size=keys.vocab_size,
        hidden_size=keys.hidden_size,
        intermediate_size=keys.intermediate_size,
        num_layers=keys.num_hidden_layers,
        num_attention_heads=keys.num_attention_heads,
        num_kv_heads=resolved.num_key_value_heads,
        head_dim=resolved.head_dim,
        max_position_embeddings=keys.max_position_embeddings,
        rms_norm_epsilon=keys.rms_norm_eps,
        rope_theta=resolved.rope.theta,
        tie_word_embeddings=keys.tie_word_embeddings,
        num_mtp_layers=keys.num_nextn_predict_layers or 0,
    )


def _check_what_is_computed(resolved: ResolvedConfig) -> None:
    keys = resolved.keys
    _check_heads(resolved)
    _check_layers(resolved)
    if keys.hidden_act not in SUPPORTED_ACTIVATIONS:
        raise resolved.error(f"hidden_act is {keys.hidden_act!r}; supported is 'silu'")
    if resolved.rope.rope_type != "default":
        kind = resolved.rope.rope_type
        raise resolved.error(f"rope scaling {kind!r} is not supported; supported is 'default'")
    if not 0 <= keys.rms_norm_eps < math.inf:
        raise resolved.error(f"rms_norm_eps is {keys.rms_norm_eps}; it must be 0 or more")
    if keys.max_position_embeddings < MIN_POSITIONS:
        raise resolved.error(
            f"max_position_embeddings is {keys.max_position_embeddings}; it must be {MIN_POSITIONS} or more, "
            "for a token of the prompt and one that is generated"
        )
    pad = keys.pad_token_id
    if pad is not None and not -keys.vocab_size <= pad < keys.vocab_size:
        raise resolved.error(
            f"pad_token_id is {pad}; it must be below the vocab_size {keys.vocab_size}, or null"
        )
    if keys.num_nextn_predict_layers not in (None, 0, 1):
        raise resolved.error(
            f"num_nextn_predict_layers is {keys.num_nextn_predict_layers}; supported are 0 and 1"
        )


def _check_heads(resolved: ResolvedConfig) -> None:
    heads, kv_heads = resolved.keys.num_attention_heads, resolved.num_key_value_heads
    if heads % kv_heads != 0:
        raise resolved.error(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}, which is "
            f"{Qwen2Keys().num_key_value_heads} where it is left out; give a divisor, or null for as many"
        )
    if resolved.head_dim < 2 or resolved.head_dim % 2 != 0:
        raise resolved.error(f"head_dim is {resolved.head_dim}; rotary positions need an even one")


def _check_layers(resolved: ResolvedConfig) -> None:
    """layer_types alone decides: a window that no layer has is none."""
    others = [i for i, kind in enumerate(resolved.layer_types) if kind != "full_attention"]
    if not others:
        return
    kind = resolved.layer_types[others[0]]
    what = f"are of type {kind!r}"
    if kind == "sliding_attention":
        what = f"attend to a sliding window of {resolved.sliding_window} tokens"
    raise resolved.error(
        f"{len(others)} layers, from {others[0]} on, {what}, "
        "which is not supported; supported is full attention in every layer"
    )
