"""Resolves the values of a config.json as transformers 5 does: defaults of the config class, and several
spellings of one value.

Families read their numbers here. Values that transformers would refuse are refused, and so are those that
would make it compute something that no family here does; keys without effect are accepted. Imports no torch.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import msgspec

from headway.engine.models.quantization import KEYS, Quantization, read_quantization
from headway.engine.protocol.errors import ModelError

DEFAULT_ROPE_THETA = 10_000.0
MAX_ROPE_THETA = 1e30
# These limits are far above every known model, so that a typing error costs neither minutes nor memory.
SIZE_LIMITS = {
    "vocab_size": 1 << 28,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "linear_num_key_heads": 1 << 16,
    "linear_num_value_heads": 1 << 16,
    "linear_key_head_dim": 1 << 16,
    "linear_value_head_dim": 1 << 16,
    "linear_conv_kernel_dim": 1 << 10,
    "full_attention_interval": 10_000,
    "query_pre_attn_scalar": 1 << 20,
    "sliding_window": 1 << 40,
    "sliding_window_pattern": 10_000,
    "max_position_embeddings": 1 << 40,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
    "moe_intermediate_size": 1 << 24,
    "shared_expert_intermediate_size": 1 << 24,
    "decoder_sparse_step": 10_000,
}
WORDS = {
    int: "an integer",
    float: "a finite number with a decimal point",
    bool: "true or false",
    str: "a string",
}
DTYPES = {
    "float32": "float32", "float": "float32", "float64": "float64", "double": "float64", "bfloat16": "bfloat16",
    "float16": "float16", "half": "float16",
}  # fmt: skip
ATTENTION_TYPES = ("full_attention", "sliding_attention")
LEGACY_LAYER_TYPES = {"attention": "full_attention"}
# Keys by which transformers' shared code, not the family's, changes the computation or its sources, each with
# its effect unless it is null.
FOREIGN_KEYS = {
    "attribute_map": "gives keys other names",
    "configuration_files": "names other configuration files",
    "decoder": "holds the configuration of another model",
    "fusion_config": "fuses layers",
    "generator": "holds the configuration of another model",
    "kv_sharing_modes": "shares keys and values between layers",
    "per_layer_config": "configures layers one by one",
    "text_config": "holds the configuration of another model",
    "transformers_weights": "names other weight files",
}


class DecoderKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that every config class of a dense decoder has, with their types; defaults of transformers'
    LlamaConfig. A family derives its own from it, or from one of the classes below."""

    # The key of theta outside rope_parameters and its default, by layer type, where positions differ by it.
    thetas_by_type: ClassVar[Mapping[str, tuple[str, float]]] = {}
    default_theta: ClassVar[float] = DEFAULT_ROPE_THETA

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, object] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    initializer_range: float = 0.02
    attention_dropout: float | int | None = 0.0
    use_cache: bool = True

    @property
    def window(self) -> int | None:
        """Returns the number of tokens that layers of type "sliding_attention" attend to; None: there are no
        such layers."""
        return None

    def default_layer_types(self) -> list[str]:
        """Returns the type of every layer, where config.json has no layer_types."""
        return ["full_attention"] * self.num_hidden_layers


class WindowKeys(DecoderKeys, frozen=True, kw_only=True):
    """The keys of families that can give some layers a sliding window: by default the layers from
    max_window_layers on."""

    attention_dropout: float | int = 0.0
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def default_layer_types(self) -> list[str]:
        first = self.num_hidden_layers if self.window is None else self.max_window_layers
        layers = range(self.num_hidden_layers)
        return ["sliding_attention" if i >= first else "full_attention" for i in layers]


class HybridKeys(DecoderKeys, frozen=True, kw_only=True):
    """The keys of families some of whose layers are recurrent: every full_attention_interval-th layer has
    attention."""

    layer_types: list[str] | None = None
    full_attention_interval: int = 4

    def default_layer_types(self) -> list[str]:
        interval, layers = self.full_attention_interval, range(self.num_hidden_layers)
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """A kind of config.json. text_model_type: of the text_config that holds the keys of a model that also
    sees images; None: the keys are outermost."""

    model_type: str
    keys: type[DecoderKeys]
    text_model_type: str | None = None


ConfigClasses = Mapping[str, ConfigClass]  # by architecture
# The keys of the outer level of a nested config.json that override those of text_config.
OUTER_KEYS = ("tie_word_embeddings", "dtype", "torch_dtype", *KEYS)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. parameters: the other keys of the object that config.json gives for them, such as a
    factor."""

    rope_type: str
    theta: float
    parameters: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Holds the values that transformers' config object would have as its attributes.

    file: named in errors. layer_types: of every layer, "full_attention" or another name of transformers'.
    sliding_window: tokens, None if no layer has one. ropes: by the type of a layer. dtype: the one that
    config.json names, None if it names none; the weights may have another.
    """

    file: Path
    architecture: str
    keys: DecoderKeys
    num_key_value_heads: int
    head_dim: int
    ropes: Mapping[str, Rope]
    sliding_window: int | None
    layer_types: tuple[str, ...]
    dtype: str | None
    quantization: Quantization | None

    def error(self, what: str) -> ModelError:
        """Returns the error for a family that computes something else."""
        return ModelError(f"{self.file}: {what}")

    def rope_of(self, layer_type: str) -> Rope:
        return self.ropes[layer_type]


def resolve_config(content: Mapping[str, object], file: Path, classes: ConfigClasses) -> ResolvedConfig:
    """Resolves a config.json. content: its JSON object. file: its name in errors. Raises ModelError."""
    reader = _Reader(content, file)
    architecture = reader.architecture(classes)
    kind = classes[architecture]
    reader.check_model_type(architecture, kind.model_type)
    if kind.text_model_type is not None:
        reader = reader.text_reader(kind.text_model_type)
        reader.check_model_type(architecture, kind.text_model_type)
    quantization = reader.quantization()
    reader.refuse_foreign_keys()
    keys = reader.keys(kind.keys)
    heads = keys.num_attention_heads
    layer_types = reader.layer_types(keys)
    return ResolvedConfig(
        file=file,
        architecture=architecture,
        keys=keys,
        num_key_value_heads=heads if keys.num_key_value_heads is None else keys.num_key_value_heads,
        head_dim=keys.hidden_size // heads if keys.head_dim is None else keys.head_dim,
        ropes=reader.ropes(keys, layer_types),
        sliding_window=keys.window,
        layer_types=tuple(LEGACY_LAYER_TYPES.get(kind, kind) for kind in layer_types),
        dtype=reader.dtype(),
        quantization=quantization,
    )


class _Reader:
    """The content of one config.json, with errors that name the file and the key."""

    def __init__(self, content: Mapping[str, object], file: Path) -> None:
        self._content = content
        self._file = file

    def architecture(self, classes: ConfigClasses) -> str:
        """Returns the first of those that config.json names."""
        names = self._content.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if not isinstance(name, str) or name not in classes:
            supported = ", ".join(classes)
            said = "not named" if name is None else name if isinstance(name, str) else repr(name)
            raise self.error(f"the architecture is {said}; supported are {supported}")
        return name

    def check_model_type(self, architecture: str, wanted: str) -> None:
        """transformers picks the family by model_type, vLLM by architectures: both must name the same."""
        model_type = self._content.get("model_type")
        if model_type not in (None, wanted):
            raise self.error(
                f"model_type is {_shown(model_type)}; the architecture {architecture} is of {wanted!r}"
            )

    def text_reader(self, model_type: str) -> _Reader:
        """Returns a reader of text_config, with what the outer level says of the whole model."""
        text = self._content.get("text_config")
        if not isinstance(text, dict):
            raise self.error(
                f"text_config is {_shown(text)}; it must be an object with the keys of {model_type!r}"
            )
        outer = {key: self._content[key] for key in OUTER_KEYS if self._content.get(key) is not None}
        return _Reader({**text, **outer}, self._file)

    def refuse_foreign_keys(self) -> None:
        for key, what in FOREIGN_KEYS.items():
            if self._content.get(key) is not None:
                raise self.error(
                    f"{key} is {_shown(self._content[key])}, which {what}; this is not supported"
                )
        if not self._content.get("is_causal", True):
            raise self.error(
                "is_causal is false; supported are models whose tokens attend to earlier ones only"
            )

    def quantization(self) -> Quantization | None:
        found = read_quantization(self._content, self.error)
        return None if found is None else replace(found, dtype=self.dtype())

    def keys(self, kind: type[DecoderKeys]) -> DecoderKeys:
        """Converts each key by itself, so that an error can name it."""
        values: dict[str, object] = {}
        for field in msgspec.structs.fields(kind):
            name = field.encode_name  # a field may have the key of another family
            if name not in self._content:
                continue
            value = self._content[name]
            limit = SIZE_LIMITS.get(name)
            wanted = WORDS.get(field.type, f"of type {field.type}")
            wanted = wanted if limit is None else f"a positive integer up to {limit:,}"
            try:
                values[name] = msgspec.convert(value, field.type)
            except msgspec.ValidationError:
                raise self._wrong(name, value, wanted) from None
            # A window may have any size where no layer has one, which all keys together tell.
            is_in_range = (
                limit is None
                or value is None
                or name == "sliding_window"
                or (isinstance(value, int) and 1 <= value <= limit)
            )
            is_finite = not isinstance(value, float) or math.isfinite(value)
            is_strict = field.type not in (float, float | None) or not isinstance(value, int)
            if not (is_in_range and is_finite and is_strict):
                raise self._wrong(name, value, wanted)
        keys = msgspec.convert(values, kind)
        most = SIZE_LIMITS["sliding_window"]
        if keys.window is not None and not 1 <= keys.window <= most:
            raise self._wrong("sliding_window", keys.window, f"a positive integer up to {most:,}")
        return keys

    def layer_types(self, keys: DecoderKeys) -> list[str]:
        """Returns the name that config.json gives to the type of every layer, or the family's default."""
        named = getattr(keys, "layer_types", None)
        if named is not None and len(named) != keys.num_hidden_layers:
            raise self.error(
                f"layer_types names {len(named)} layers, num_hidden_layers {keys.num_hidden_layers}"
            )
        return keys.default_layer_types() if named is None else named

    def ropes(self, keys: DecoderKeys, layer_types: list[str]) -> dict[str, Rope]:
        """Returns the positions of every type of layer with attention. rope_scaling, where it says anything,
        takes the place of rope_parameters."""
        if keys.thetas_by_type:
            return self._ropes_by_type(keys)
        scaling = self._content.get("rope_scaling")
        name, found = (
            ("rope_scaling", scaling) if scaling else ("rope_parameters", keys.rope_parameters or {})
        )
        found = self._object(name, found)
        nested = [key for key, value in found.items() if key in layer_types or isinstance(value, dict)]
        if nested:
            raise self.error(
                f"{name} differs by layer ({', '.join(nested)}); supported is one for all layers"
            )
        return dict.fromkeys(ATTENTION_TYPES, self._rope(name, found, "rope_theta", keys.default_theta))

    def _ropes_by_type(self, keys: DecoderKeys) -> dict[str, Rope]:
        """rope_parameters has an object for each type; rope_scaling is of the layers with full attention and
        goes before it."""
        found, scaling = keys.rope_parameters, self._content.get("rope_scaling")
        if found is None:
            found = {"full_attention": {"rope_type": "default"}}
        others = sorted(found.keys() - keys.thetas_by_type.keys())
        if others or (scaling is not None and not found.get("full_attention")):
            raise self.error(
                f"rope_parameters is {_shown(found)}; supported is an object for each of {', '.join(keys.thetas_by_type)}"
            )
        ropes = {}
        for kind, (theta_key, default_theta) in keys.thetas_by_type.items():
            name = f"{kind} of rope_parameters"
            own = self._object(name, found.get(kind) or {})
            if kind == "full_attention" and scaling is not None:
                own = own | self._object("rope_scaling", scaling)
            if not own.get("truncate", True):
                raise self.error(f"{name} has truncate, which transformers does not read there; leave it out")
            ropes[kind] = self._rope(name, own, theta_key, default_theta)
        return ropes

    def _object(self, name: str, value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise self.error(f"{name} is {_shown(value)}, it must be an object")
        return value

    def _rope(self, name: str, found: dict[str, object], theta_key: str, default_theta: float) -> Rope:
        """Returns the positions of one object. Its own theta overrides the one outside."""
        theta = found.get("rope_theta", self._content.get(theta_key, default_theta))
        if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta <= MAX_ROPE_THETA:
            raise self._wrong(theta_key, theta, f"a positive number up to {MAX_ROPE_THETA:g}")
        rope_type = found.get("rope_type", found.get("type", "default"))
        if not isinstance(rope_type, str):
            raise self.error(f"rope_type of {name} is {_shown(rope_type)}, it must be a string")
        others = {key: v for key, v in found.items() if key not in ("rope_theta", "rope_type", "type")}
        partial = self._content.get("partial_rotary_factor")
        if partial is not None:
            others.setdefault("partial_rotary_factor", partial)
        length = self._content.get("original_max_position_embeddings")
        if (
            rope_type != "default"
            and length is not None
            and length != others.get("original_max_position_embeddings")
        ):
            raise self.error(
                f"original_max_position_embeddings is {_shown(length)} outside {name}; give it inside alone"
            )
        return Rope(rope_type, float(theta), others)

    def dtype(self) -> str | None:
        """Returns the dtype that config.json names. The newer spelling overrides the older one."""
        for key in ("dtype", "torch_dtype"):
            value = self._content.get(key)
            if value is not None:
                if not isinstance(value, str) or value not in DTYPES:
                    raise self._wrong(key, value, f"one of {', '.join(DTYPES)}")
                return DTYPES[value]
        return None

    def _wrong(self, key: str, value: object, wanted: str) -> ModelError:
        said = "null, as if it were missing" if value is None else _shown(value)
        return self.error(f"{key} is {said}; it must be {wanted}")

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self._file}: {what}")


def _shown(value: object) -> str:
    return reprlib.repr(value)
