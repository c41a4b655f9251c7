"""A family that is not served, added by a file of its own and a line in the registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headway_testing.families import assert_logits_of_transformers, tiny_model

from headway.engine.models import registry
from headway.engine.models.config_keys import DecoderKeys, ResolvedConfig
from headway.engine.models.family import Family, attention_spec, decoder_names, decoder_spec, dense_spec
from headway.engine.models.spec import LayerSpec, ModelSpec


class MadeUpKeys(DecoderKeys, frozen=True, kw_only=True):
    local_tokens: int

    @property
    def window(self) -> int:
        return self.local_tokens

    def default_layer_types(self) -> list[str]:
        return [("sliding_attention", "full_attention")[i % 2] for i in range(self.num_hidden_layers)]


def read(resolved: ResolvedConfig) -> ModelSpec:
    def layer(kind: str) -> LayerSpec:
        return LayerSpec(attention_spec(resolved, kind, has_qkv_bias=True), dense_spec(resolved))

    return decoder_spec(resolved, layer)


FAMILY = Family(("MadeUpForCausalLM",), "made_up", MadeUpKeys, read, decoder_names)


def test_a_made_up_family_with_a_window_is_a_file_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [name] = FAMILY.architectures
    monkeypatch.setitem(registry.FAMILY_OF, name, FAMILY)
    monkeypatch.setitem(registry.CONFIG_CLASSES, name, FAMILY.config_class)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    theirs = tiny_model("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=9, layer_types=kinds)
    theirs.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content |= {"architectures": [name], "model_type": "made_up", "local_tokens": 9, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert_logits_of_transformers(theirs, tmp_path)
