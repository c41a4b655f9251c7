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
from headway_testing.checkpoints import mimo_config
from headway_testing.families import CLASSES, save, tiny_model
from headway_testing.marks import slow_but
from headway_testing.oracle import randomise
from headway_testing.paged import PagedSequences, load
from headway_testing.random_configs import random_config
from transformers import PreTrainedConfig

from headway.engine import ModelError, read_model_spec
from headway.engine.layers.rotary import inverse_frequencies
from headway.engine.models.config_keys import (
    FOREIGN_KEYS,
    HybridKeys,
    ResolvedConfig,
    WindowKeys,
    resolve_config,
)
from headway.engine.models.experts import num_experts_of
from headway.engine.models.families.gemma3 import GemmaKeys
from headway.engine.models.families.qwen3_5_moe import Qwen3_5MoeKeys
from headway.engine.models.families.qwen3_moe import Qwen3MoeKeys
from headway.engine.models.families.qwen3_next import Qwen3NextKeys
from headway.engine.models.registry import CONFIG_CLASSES, FAMILY_OF

# Of each architecture.
NUM_CONFIGS, MIN_ACCEPTED = 400, 120
NUM_MODELS, NUM_MODELS_LONG, NUM_TOKENS = 6, 24, 24
# Keys that transformers has under other attributes or not at all.
SHARED_KEYS = ("attention_chunk_size", "layer_types", "sliding_window")
OWN_KEYS = (
    "rope_parameters", "num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "full_attention_interval", "sliding_window_pattern",
)  # fmt: skip
TOLERANCE = 4e-5  # of the largest logit, or of 10, in float32
# What transformers' shared code reads of a configuration without a change to what a token gets.
INERT_KEYS = {
    "default_rope_type", "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan", "dtype",
    "gradient_checkpointing", "is_encoder_decoder", "is_heterogeneous", "model_type", "name_or_path", "number_of_conv_states",
    "output_attentions", "output_hidden_states", "return_dict", "sub_configs", "vision_aspect_ratio",
    "vision_feature_layer", "vision_feature_select_strategy",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(verbosity)


def resolved_by_both(
    folder: Path, content: dict[str, object]
) -> tuple[ResolvedConfig, PreTrainedConfig] | None:
    """None where it is refused. Fails where Headway reads what transformers refuses."""
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    try:
        read_model_spec(folder)
    except ModelError:
        return None
    ours = resolve_config(content, file, CONFIG_CLASSES)
    return ours, CLASSES[ours.architecture][0].from_pretrained(folder)


def values_of(ours: ResolvedConfig) -> dict[str, object]:
    """Under the names of transformers' attributes."""
    keys = ours.keys
    names = {field.encode_name: field.name for field in msgspec.structs.fields(keys)}
    own = {key: getattr(keys, name) for key, name in names.items() if key not in OWN_KEYS}
    own |= {"num_key_value_heads": ours.num_key_value_heads, "head_dim": ours.head_dim}
    for kind in set(ours.layer_types) & {"full_attention", "sliding_attention"}:
        own |= {f"{kind} rope_type": ours.rope_of(kind).rope_type, f"{kind} theta": ours.rope_of(kind).theta}
    if "num_local_experts" in own:  # another spelling of num_experts
        del own["num_local_experts"], own["num_experts"]
        count = num_experts_of(FAMILY_OF[ours.architecture].read(ours))
        own |= {"num_experts": count} if count > 0 else {}  # every layer may be dense
    if "mlp_only_layers" in own:
        own["mlp_only_layers"] = keys.mlp_only_layers or []
    if isinstance(keys, Qwen3_5MoeKeys) and not isinstance(keys, Qwen3NextKeys):
        del own["intermediate_size"]  # no layer is dense
    if isinstance(keys, WindowKeys | Qwen3MoeKeys):
        own |= {"sliding_window": ours.sliding_window}
    if isinstance(keys, WindowKeys | HybridKeys | GemmaKeys):
        own |= {"layer_types": list(ours.layer_types)}
    return own


def attributes_of(theirs: PreTrainedConfig, names: set[str]) -> dict[str, object]:
    own = {name: getattr(theirs, name, None) for name in names}
    head_dim = own["head_dim"]
    for kind in ("full_attention", "sliding_attention"):
        if f"{kind} theta" in names:
            rope = theirs.rope_parameters.get(kind) or theirs.rope_parameters
            own |= {f"{kind} rope_type": rope["rope_type"], f"{kind} theta": rope["rope_theta"]}
    own["head_dim"] = theirs.hidden_size // theirs.num_attention_heads if head_dim is None else head_dim
    return own


@pytest.mark.parametrize("architecture", slow_but(["Qwen3_5ForCausalLM", "Gemma3ForCausalLM"], CLASSES))
def test_what_is_accepted_of_random_configs_means_the_same_to_transformers(
    architecture: str, tmp_path: Path
) -> None:
    num_accepted = 0
    for seed in range(NUM_CONFIGS):
        content = random_config(seed, architecture, slips=True)
        both = resolved_by_both(tmp_path, content)
        if both is not None:
            ours, theirs = both
            values = values_of(ours)
            assert values == attributes_of(theirs, values.keys()), content
            num_accepted += 1
    assert num_accepted >= MIN_ACCEPTED


@pytest.mark.parametrize("architecture", CLASSES)
def test_what_is_left_out_has_the_default_of_the_config_class(architecture: str, tmp_path: Path) -> None:
    both = resolved_by_both(tmp_path, {"architectures": [architecture]})
    assert both is not None
    values = values_of(both[0])
    assert values == attributes_of(both[1], values.keys())


@pytest.mark.parametrize("architecture", CLASSES)
def test_every_key_of_the_config_class_is_known(architecture: str) -> None:
    """A release that adds one fails here."""
    shared = {field.name for field in fields(PreTrainedConfig)}
    theirs = {field.name for field in fields(CLASSES[architecture][0])} - shared
    ours = {field.encode_name for field in msgspec.structs.fields(FAMILY_OF[architecture].keys)}
    assert ours - theirs <= {
        "head_dim",
        "intermediate_size",
        "num_experts",
        "num_local_experts",
        *OWN_KEYS,
        *SHARED_KEYS,
    }
    assert theirs - ours == set()


@pytest.mark.parametrize("architecture", CLASSES)
def test_every_key_that_transformers_reads_is_known(architecture: str, tmp_path: Path) -> None:
    """Its shared code looks at keys that the config class does not have, such as is_causal."""
    seen: set[str] = set()
    config_class, model_class = CLASSES[architecture]

    class Watched(config_class):
        def __getattribute__(self, key: str) -> object:
            seen.add(key)
            return super().__getattribute__(key)

    folder = save(tiny_model(architecture), architecture, tmp_path)
    config = Watched.from_pretrained(folder)
    seen.clear()
    model = model_class.from_pretrained(folder, config=config)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), use_cache=True)
    keys = {k for k in seen if not k.startswith("_") and not callable(getattr(config_class, k, None))}
    known = {field.encode_name for field in msgspec.structs.fields(FAMILY_OF[architecture].keys)}
    known |= (
        FOREIGN_KEYS.keys()
        | INERT_KEYS
        | {"is_causal", "quantization_config"}
        | {"rope_theta", "partial_rotary_factor"}
    )
    assert keys - known == set()
    assert {"is_causal", "text_config", "hidden_size"} <= keys


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_MODELS),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(NUM_MODELS, NUM_MODELS_LONG)),
    ],
)
@pytest.mark.parametrize("architecture", CLASSES)
def test_an_accepted_config_gives_the_logits_of_transformers(
    architecture: str, seed: int, tmp_path: Path
) -> None:
    """Windows of 4 tokens, turned positions and tied heads change logits by far more than the tolerance."""
    contents = (random_config(1000 * seed + i, architecture, slips=False) for i in range(1000))
    both = next(both for content in contents if (both := resolved_by_both(tmp_path, content)) is not None)
    ours, theirs = both
    content = (tmp_path / "config.json").read_text()
    expected = CLASSES[architecture][1](theirs).float().eval()
    randomise(expected, torch.Generator().manual_seed(seed))
    expected.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    model = load(tmp_path, dtype="float32")
    turned = expected.model.rotary_emb
    for spec in model.spec.attentions:
        frequencies, factor = inverse_frequencies(spec.rope)
        kind = "full_attention" if spec.sliding_window is None else "sliding_attention"
        prefix = "" if hasattr(turned, "inv_freq") else f"{kind}_"
        assert torch.equal(frequencies, getattr(turned, f"{prefix}inv_freq"))
        assert factor == getattr(turned, f"{prefix}attention_scaling")
    sequences = PagedSequences(model, 1, NUM_TOKENS)
    tokens = torch.arange(NUM_TOKENS) * 7 % ours.keys.vocab_size
    with torch.no_grad():
        logits = model.logits(sequences.forward([(0, 0, NUM_TOKENS)], tokens))
        wanted = expected(tokens[None], use_cache=False).logits[0]
    difference, largest = (logits - wanted).abs().max().item(), wanted.abs().max().item()
    assert difference < TOLERANCE * max(largest, 10), content


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
        ({"layer_types": ["sliding_attention"] * 3}, ["'sliding_attention'", "give the sliding_window"]),
        ({"use_sliding_window": True, "sliding_window": 0}, ["sliding_window is 0", "positive integer"]),
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
        read_model_spec(tmp_path)
    assert [part for part in parts if part not in str(caught.value)] == []
