"""config.json as transformers 5 reads it, or refused: whatever is accepted means the same to both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from headway_testing.checkpoints import mimo_config, qwen2_config, random_tensors, write_folder
from headway_testing.paged import PagedSequences, load
from headway_testing.random_configs import random_config
from transformers import PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from headway.engine import ModelError, read_model_config
from headway.engine.models.config_keys import FOREIGN_KEYS, Qwen2Keys, ResolvedConfig, resolve_config

NUM_CONFIGS, MIN_ACCEPTED = 1000, 400
NUM_MODELS, NUM_TOKENS = 72, 24
TOLERANCE = 2e-4  # of logits of about 10, in float32
# What transformers' shared code reads of a configuration without a change to what a token gets.
INERT_KEYS = {
    "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan", "dtype",
    "gradient_checkpointing", "is_encoder_decoder", "is_heterogeneous", "model_type", "name_or_path",
    "output_attentions", "output_hidden_states", "return_dict", "sub_configs", "vision_aspect_ratio",
    "vision_feature_layer", "vision_feature_select_strategy",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(verbosity)


def resolved_by_both(folder: Path, content: dict[str, object]) -> tuple[ResolvedConfig, Qwen2Config] | None:
    """None where it is refused. Fails where Headway reads what transformers refuses."""
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    try:
        read_model_config(folder)
    except ModelError:
        return None
    return resolve_config(content, file), Qwen2Config.from_pretrained(folder)


def values_of(ours: ResolvedConfig) -> dict[str, object]:
    """Under the names of transformers' attributes."""
    own = msgspec.structs.asdict(ours.keys)
    del own["rope_parameters"], own["num_nextn_predict_layers"]
    return own | {
        "num_key_value_heads": ours.num_key_value_heads,
        "head_dim": ours.head_dim,
        "rope_type": ours.rope.rope_type,
        "rope_theta": ours.rope.theta,
        "sliding_window": ours.sliding_window,
        "layer_types": list(ours.layer_types),
    }


def attributes_of(theirs: Qwen2Config) -> dict[str, object]:
    names = [field.name for field in msgspec.structs.fields(Qwen2Keys)]
    own = {name: getattr(theirs, name, None) for name in names}
    del own["rope_parameters"], own["num_nextn_predict_layers"]
    head_dim = own["head_dim"]
    return own | {
        "head_dim": theirs.hidden_size // theirs.num_attention_heads if head_dim is None else head_dim,
        "rope_type": theirs.rope_parameters["rope_type"],
        "rope_theta": theirs.rope_parameters["rope_theta"],
    }


def test_what_is_accepted_of_random_configs_means_the_same_to_transformers(tmp_path: Path) -> None:
    num_accepted = 0
    for seed in range(NUM_CONFIGS):
        content = random_config(seed, slips=True)
        both = resolved_by_both(tmp_path, content)
        if both is not None:
            ours, theirs = both
            assert values_of(ours) == attributes_of(theirs), content
            num_accepted += 1
    assert num_accepted >= MIN_ACCEPTED


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "MiMoForCausalLM"])
def test_what_is_left_out_has_the_default_of_the_config_class(architecture: str, tmp_path: Path) -> None:
    both = resolved_by_both(tmp_path, {"architectures": [architecture]})
    assert both is not None
    assert values_of(both[0]) == attributes_of(both[1])


def test_every_key_of_the_config_class_is_known() -> None:
    """A release that adds one fails here."""
    shared = {field.name for field in fields(PreTrainedConfig)}
    theirs = {field.name for field in fields(Qwen2Config)} - shared
    ours = {field.name for field in msgspec.structs.fields(Qwen2Keys)}
    assert ours - theirs == {"head_dim", "num_nextn_predict_layers"}
    assert theirs - ours == set()


def test_every_key_that_transformers_reads_is_known(tmp_path: Path) -> None:
    """Its shared code looks at keys that the config class does not have, such as is_causal."""
    seen: set[str] = set()

    class Watched(Qwen2Config):
        def __getattribute__(self, key: str) -> object:
            seen.add(key)
            return super().__getattribute__(key)

    folder = write_folder(tmp_path, qwen2_config(), random_tensors(qwen2_config(), with_mtp=False))
    config = Watched.from_pretrained(folder)
    seen.clear()
    model = Qwen2ForCausalLM.from_pretrained(folder, config=config)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), use_cache=True)
    keys = {k for k in seen if not k.startswith("_") and not callable(getattr(Qwen2Config, k, None))}
    known = {field.name for field in msgspec.structs.fields(Qwen2Keys)}
    known |= FOREIGN_KEYS.keys() | INERT_KEYS | {"is_causal", "quantization_config"}
    assert keys - known == set()
    assert {"is_causal", "text_config", "hidden_size"} <= keys


@pytest.mark.parametrize("seed", range(NUM_MODELS))
def test_an_accepted_config_gives_the_logits_of_transformers(seed: int, tmp_path: Path) -> None:
    """Windows of 4 tokens, turned positions and tied heads change logits by far more than the tolerance."""
    contents = (random_config(1000 * seed + i, slips=False) for i in range(1000))
    both = next(both for content in contents if (both := resolved_by_both(tmp_path, content)) is not None)
    ours, theirs = both
    sizes = values_of(ours) | {"tie_word_embeddings": theirs.tie_word_embeddings}
    content = json.loads((tmp_path / "config.json").read_text())
    write_folder(tmp_path, content, random_tensors(sizes, with_mtp=False, seed=seed))
    model = load(tmp_path, dtype="float32")
    sequences = PagedSequences(model, 1, NUM_TOKENS)
    tokens = torch.arange(NUM_TOKENS) * 7 % ours.keys.vocab_size
    expected = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model.logits(sequences.forward([(0, 0, NUM_TOKENS)], tokens))
        difference = (logits - expected(tokens[None], use_cache=False).logits[0]).abs().max().item()
    assert difference < TOLERANCE, content


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"is_causal": False}, ["is_causal"]),
        ({"per_layer_config": {"0": {"rms_norm_eps": 1.0}}}, ["per_layer_config", "layers one by one"]),
        ({"text_config": {"hidden_size": 4}}, ["text_config"]),
        ({"attribute_map": {"hidden_size": "intermediate_size"}}, ["attribute_map"]),
        ({"transformers_weights": "x.safetensors"}, ["transformers_weights", "x.safetensors"]),
        ({"model_type": "qwen3"}, ["model_type", "'qwen3'", "'mimo'"]),
        ({"layer_types": ["full_attention"] * 2}, ["layer_types names 2 layers", "num_hidden_layers 3"]),
        ({"layer_types": ["linear_attention"] * 3}, ["'linear_attention'"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers is 1000000000", "10,000"]),
        ({"hidden_size": 4096.0}, ["hidden_size is 4096.0", "positive integer"]),
        ({"max_position_embeddings": 1e12}, ["max_position_embeddings is 1000000000000.0", "positive integer"]),
        ({"max_position_embeddings": 1}, ["max_position_embeddings is 1", "2 or more"]),
        ({"vocab_size": 10**40}, ["vocab_size is 1000", "268,435,456"]),
        ({"rope_theta": float("nan")}, ["rope_theta is nan"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["differs by layer (full_attention)"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings is 'false'", "true or false"]),
        ({"torch_dtype": "int8"}, ["torch_dtype is 'int8'", "bfloat16"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_would_be_computed_differently_is_refused_by_name(
    changes: dict[str, object], parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(mimo_config(**changes)))
    with pytest.raises(ModelError) as caught:
        read_model_config(tmp_path)
    assert [part for part in parts if part not in str(caught.value)] == []
