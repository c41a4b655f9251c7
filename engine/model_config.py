"""What a Hugging Face config.json says of a model's shape. Imports no torch: the API process reads it too.

Knows the keys of the families that are served; what they would compute differently is refused here, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.engine.errors import ModelError

SUPPORTED_ARCHITECTURES = ("Qwen2ForCausalLM", "MiMoForCausalLM")


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
    if not folder.is_dir():
        raise ModelError(f"the model folder {folder} does not exist; give a folder in Hugging Face layout")
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; give a folder in Hugging Face layout") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not valid JSON ({error}); fetch the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, it must be a JSON object")
    return _Keys(file, content).parse()


class _Keys:
    """The content of one config.json, with errors that name the file and the key."""

    def __init__(self, file: Path, content: Mapping[str, object]) -> None:
        self._file = file
        self._content = content

    def parse(self) -> ModelConfig:
        architecture = self._architecture()
        self._refuse_what_is_not_computed()
        hidden_size, heads = self._size("hidden_size"), self._size("num_attention_heads")
        num_layers, kv_heads = self._size("num_hidden_layers"), self._size("num_key_value_heads", heads)
        head_dim = self._size("head_dim", hidden_size // heads)
        if heads % kv_heads != 0:
            raise self._error(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2 != 0:
            raise self._error(f"head_dim is {head_dim}; rotary positions need an even one")
        return ModelConfig(
            architecture=architecture,
            vocab_size=self._size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._size("intermediate_size"),
            num_layers=num_layers,
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=self._size("max_position_embeddings"),
            rms_norm_epsilon=self._number("rms_norm_eps", self._content.get("rms_norm_eps")),
            rope_theta=self._rope_theta(num_layers),
            tie_word_embeddings=self._content.get("tie_word_embeddings") is True,
            num_mtp_layers=self._num_mtp_layers(),
        )

    def _architecture(self) -> str:
        names = self._content.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if name not in SUPPORTED_ARCHITECTURES:
            supported = " and ".join(SUPPORTED_ARCHITECTURES)
            raise self._error(f"the architecture is {name or 'not named'}; supported are {supported}")
        return str(name)

    def _refuse_what_is_not_computed(self) -> None:
        if (activation := self._content.get("hidden_act", "silu")) != "silu":
            raise self._error(f"hidden_act is {activation!r}; supported is 'silu'")
        quantization = self._content.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise self._error(
                f"the weights are quantized ({method}); take the model's unquantized checkpoint"
            )

    def _rope_theta(self, num_layers: int) -> float:
        parameters = self._content.get("rope_parameters") or {}
        if not isinstance(parameters, dict):
            raise self._error(f"rope_parameters is {parameters!r}, it must be an object")
        for scaling in (parameters, self._content.get("rope_scaling")):
            kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
            if kind not in (None, "default"):
                raise self._error(f"rope scaling {kind!r} is not supported; supported is 'default'")
        self._refuse_sliding_window(num_layers)
        return self._number("rope_theta", self._content.get("rope_theta", parameters.get("rope_theta")))

    def _refuse_sliding_window(self, num_layers: int) -> None:
        """The first `max_window_layers` layers see everything even where sliding windows are switched on."""
        window = self._content.get("sliding_window")
        full_layers = self._content.get("max_window_layers", 0)
        is_on = self._content.get("use_sliding_window") is True and window is not None
        if is_on and isinstance(full_layers, int) and full_layers < num_layers:
            raise self._error(
                f"layers from {full_layers} on attend to a sliding window of {window} tokens, "
                "which is not supported; supported is full attention in every layer"
            )

    def _num_mtp_layers(self) -> int:
        count = self._content.get("num_nextn_predict_layers") or 0
        if count not in (0, 1):
            raise self._error(f"num_nextn_predict_layers is {count}; supported are 0 and 1")
        return int(count == 1)

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._content.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, value, "a positive integer")
        return value

    def _number(self, key: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def _wrong(self, key: str, value: object, wanted: str) -> ModelError:
        return self._error(f"{key} is {'missing' if value is None else repr(value)}; it must be {wanted}")

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self._file}: {what}")
