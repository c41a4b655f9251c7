"""Reads what a config.json says about quantised weights: their format, and the layers that are not quantised.

Knows no tensors: the scales in the files tell which ones are quantised (loading/packs.py). Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec

from headway.engine.protocol.errors import ModelError

KEYS = ("quantization_config", "compression_config", "hf_quant_config.json")
Extent = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Block = tuple[Extent, Extent]
Layout = Literal["scaled", "packed", "gptq", "awq"]
Strategy = Literal["tensor", "channel", "block", "group"]
SERVED = (
    "fp8 (blocks, tensors or channels), compressed-tensors (float-quantized, int-quantized, pack-quantized), modelopt (FP8), "
    "gptq and awq (gemm)"
)
# The checkpoint to take instead of one that is not read, by its quant_method, format or algorithm.
INSTEAD = {
    "nvfp4": "an FP8 or a 4-bit integer checkpoint", "mxfp4": "an FP8 or a 4-bit integer checkpoint",
    "mxfp6": "an FP8 checkpoint", "mxfp8": "a checkpoint in FP8 blocks of 128 x 128",
    "mixed_precision": "an FP8 checkpoint", "marlin": "the GPTQ, AWQ or compressed-tensors checkpoint that it was made of",
    "machete": "the GPTQ, AWQ or compressed-tensors checkpoint that it was made of", "bitsandbytes": "an FP8, GPTQ or AWQ checkpoint",
    "gguf": "a folder of safetensors", "quanto": "an FP8, GPTQ or AWQ checkpoint", "quark": "an FP8 checkpoint",
}  # fmt: skip
COMPRESSED_FORMATS: Mapping[str, Layout] = {
    "float-quantized": "scaled", "int-quantized": "scaled", "naive-quantized": "scaled", "pack-quantized": "packed",
}  # fmt: skip
MODELOPT_STRATEGIES: Mapping[str | None, Strategy] = {
    "FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": "block", "FP8_BLOCK_SCALES": "block",
}  # fmt: skip
STRATEGIES: Mapping[str, Strategy] = {
    "tensor": "tensor", "channel": "channel", "block": "block", "group": "group"
}  # fmt: skip
MODELOPT_BLOCK = (128, 128)
REGULAR = ("fp8", "gptq", "awq")  # whose lists may hold regular expressions without "re:"
# A list may name the layer that an engine fuses of these.
FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz", "in_proj_b": "in_proj_ba", "in_proj_a": "in_proj_ba",
}  # fmt: skip
MAX_PATTERNS, MAX_PATTERN_CHARACTERS = 1_000, 500
# The regular expressions that can be written as shell patterns. Others are not tried, since some never end.
_PLAIN_REGEX = re.compile(r"(?:\.\*|\.|\\[.\-]|\\d(?![*+?{])|\[[\w-]+\](?![*+?{])|[\w\-/](?![*+?{]))*")
_PIECE = re.compile(r"\.\*|\\.|\[[\w-]+\]|.")
_PREFIXES = re.compile(r"^(?:(?:model|language_model)\.)+")
_SHELL = {".*": "*", ".": "?", r"\.": ".", r"\-": "-", r"\d": "[0-9]"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The way in which weights are stored, according to config.json.

    method: its name in config.json. layouts: how tensors may be stored. strategies: how many values may share
    a scale. blocks: the numbers of outputs and inputs that share one. group_sizes: the numbers of inputs of
    an output that share one. adds_one: whether GPTQ's zero points are stored less one. required: optional
    parts of the layout that every weight must have here. kept_names, kept_patterns: the layers that are not
    quantised; patterns are those of a shell. lists_all: whether every other layer that could be quantised is.
    has_cache_scheme: whether config.json asks for a quantised KV cache, too. dtype: the dtype of the expanded
    weights; None: config.json names none.
    """

    method: str
    layouts: frozenset[Layout]
    strategies: frozenset[Strategy] = frozenset()
    blocks: tuple[Block, ...] = ()
    group_sizes: tuple[int, ...] = ()
    adds_one: bool = False
    required: frozenset[str] = frozenset()
    kept_names: frozenset[str] = frozenset()
    kept_patterns: tuple[str, ...] = ()
    lists_all: bool = True
    has_cache_scheme: bool = False
    dtype: str | None = None

    def keeps(self, layer: str) -> bool:
        """Returns whether config.json says that this layer's weight is not quantised.

        A name stands for the layers of its parts and for all below them, whatever wrapper's name begins it:
        "mlp.gate" for "model.layers.0.mlp.gate".
        """
        head, _, last = layer.rpartition(".")
        names = {layer, f"{head}.{FUSED[last]}"} if last in FUSED else {layer}
        plain = {_PREFIXES.sub("", name) for name in names}
        runs = {run for name in plain for run in _runs(name.split("."))}
        return not self.kept_names.isdisjoint(runs) or any(
            fnmatchcase(name, pattern) for name in names | plain for pattern in self.kept_patterns
        )


class _Arguments(msgspec.Struct):
    """The arguments by which compressed-tensors quantises the weights of a group of layers."""

    num_bits: int = 8
    strategy: str | None = None
    block_structure: Block | str | None = None
    group_size: int | None = None
    symmetric: bool = True
    actorder: str | bool | None = None

    @property
    def required(self) -> frozenset[str]:
        zeros = set() if self.symmetric else {"weight_zero_point"}
        return frozenset(zeros | ({"weight_g_idx"} if self.actorder in (True, "group") else set()))

    @property
    def block(self) -> Block | None:
        """Returns outputs and inputs of a block, which older packs write as "128x128". Raises
        msgspec.ValidationError."""
        if not isinstance(self.block_structure, str):
            return self.block_structure
        block: Block = msgspec.convert(self.block_structure.split("x"), Block, strict=False)
        return block

    @property
    def kind(self) -> str:
        size = self.group_size
        return self.strategy or ("tensor" if size is None else "channel" if size < 0 else "group")


class _Group(msgspec.Struct):
    format: str | None = None
    targets: list[str] = []
    weights: _Arguments | None = None


class _Sparsity(msgspec.Struct):
    format: str = "dense"


class _Keys(msgspec.Struct):
    """The keys of all formats."""

    quant_method: str
    # fp8
    fmt: str = "e4m3"
    weight_block_size: Block | None = None
    # compressed-tensors; GPTQ and AWQ have a format, too
    format: str | None = None
    config_groups: dict[str, _Group] = {}
    sparsity_config: _Sparsity | None = None
    transform_config: dict[str, object] | None = None
    kv_cache_scheme: object = None
    # modelopt
    quant_algo: str | None = None
    kv_cache_quant_algo: object = None
    # gptq and awq
    bits: int | None = 4
    group_size: int | None = 128
    desc_act: bool = False
    checkpoint_format: str | None = None
    is_marlin_format: bool | None = None
    dynamic: dict[str, object] | None = None
    version: str | None = None
    backend: str | None = None
    # the layers that are not quantised, by each format's key
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None

    @property
    def gptq_format(self) -> str:
        """Returns the format of GPTQ; the rarer one if its two keys differ."""
        named = {self.checkpoint_format or "gptq", self.format or "gptq"} - {"gptq"}
        return "marlin" if self.is_marlin_format else min(named, default="gptq")

    @property
    def awq_format(self) -> str:
        return "llm-awq" if self.backend == "llm-awq" else (self.version or self.format or "gemm").lower()

    @property
    def kept(self) -> tuple[str, ...]:
        lists = (self.modules_to_not_convert, self.ignored_layers, self.ignore, self.exclude_modules)
        # "-:pattern" of GPTQ excludes layers; the effect of other patterns shows in the files.
        left = [f"re:{key[2:]}" for key in self.dynamic or {} if key.startswith("-:")]
        return tuple(name for names in (*lists, left) for name in names or ())


def read_quantization(
    content: Mapping[str, object], error: Callable[[str], ModelError]
) -> Quantization | None:
    """Returns the quantisation; None if no weights are quantised. Raises `error` for a format that is not
    read.

    content: that of config.json, with the object of another file under the file's name.
    """
    for name in KEYS:
        found = content.get(name)
        if found is None:
            continue
        try:
            keys = msgspec.convert(found, _Keys)
            for group in keys.config_groups.values():
                _ = group.weights and group.weights.block
        except msgspec.ValidationError as fault:
            raise error(f"{name} cannot be read ({fault}); fetch the file again") from None
        if (
            keys.quant_method == "modelopt"
            and keys.quant_algo is None
            and keys.kv_cache_quant_algo is not None
        ):
            return None  # only the KV cache
        patterns = [kept for kept in keys.kept if kept.startswith("re:") or "*" in kept]
        if len(patterns) > MAX_PATTERNS or max(map(len, patterns), default=0) > MAX_PATTERN_CHARACTERS:
            raise error(
                f"{name} has {len(patterns):,} patterns of layers, of up to {max(map(len, patterns)):,} characters; the "
                f"limits are {MAX_PATTERNS:,} and {MAX_PATTERN_CHARACTERS}; fetch the file again"
            )
        refusal = _refusal(keys)
        if refusal is not None:
            shown = refusal[:MAX_PATTERN_CHARACTERS]
            raise error(f"the weights are quantized ({name}: {shown}), which is not read; {_remedy(shown)}")
        return _quantization(keys)
    return None


def _refusal(keys: _Keys) -> str | None:
    """Returns a description of what is not supported; None if all is."""
    match keys.quant_method:
        case "fp8":
            return None if keys.fmt in ("e4m3", "float8_e4m3fn") else f"fp8 of the kind {keys.fmt}"
        case "compressed-tensors":
            sparsity = keys.sparsity_config
            if sparsity is not None and sparsity.format != "dense":
                return f"compressed-tensors, {sparsity.format}"
            if (keys.transform_config or {}).get("config_groups"):
                return "compressed-tensors, transforms of weights"
            groups = list(keys.config_groups.values()) or [_Group()]
            return next((fault for group in groups if (fault := _group_refusal(keys, group))), None)
        case "modelopt":
            return None if keys.quant_algo in MODELOPT_STRATEGIES else f"modelopt, {keys.quant_algo}"
        case "gptq":
            is_served = keys.gptq_format in ("gptq", "gptq_v2") and keys.bits in (4, 8)
            return None if is_served else f"gptq, {keys.gptq_format} with {keys.bits} bits"
        case "awq":
            is_served = keys.awq_format == "gemm" and keys.bits == 4
            return None if is_served else f"awq, {keys.awq_format} with {keys.bits} bits"
    return keys.quant_method


def _group_refusal(keys: _Keys, group: _Group) -> str | None:
    arguments, form = group.weights or _Arguments(), _form(keys, group)
    widths = (4, 8) if form == "pack-quantized" else (8,)
    if form not in COMPRESSED_FORMATS or arguments.num_bits not in widths:
        return f"compressed-tensors, {form} with {arguments.num_bits} bits"
    if arguments.kind not in STRATEGIES:
        return f"compressed-tensors, scales of a {arguments.kind}"
    return None


def _remedy(refusal: str) -> str:
    instead = next((text for name, text in INSTEAD.items() if name in refusal.lower()), None)
    other = "" if instead is None else f"{instead}, or "
    return f"served are {SERVED}. Take {other}the model's unquantized checkpoint"


def _quantization(keys: _Keys) -> Quantization:
    """Returns the quantisation. keys: those of a format that is read."""
    layouts, strategies, blocks, sizes = _scales_of(keys)
    names, patterns = _lists(keys)
    targets = {target for group in keys.config_groups.values() for target in group.targets}
    return Quantization(
        keys.quant_method,
        layouts=layouts,
        strategies=strategies,
        blocks=tuple(dict.fromkeys(block for block in blocks if block is not None)),
        group_sizes=tuple(dict.fromkeys(size for size in sizes if size is not None and size > 0)),
        adds_one=keys.gptq_format == "gptq",
        required=_required(keys),
        kept_names=names,
        kept_patterns=tuple(pattern for pattern in patterns if pattern is not None),
        lists_all=None not in patterns and targets <= {"Linear"},
        has_cache_scheme=keys.kv_cache_scheme is not None or keys.kv_cache_quant_algo is not None,
    )


def _scales_of(
    keys: _Keys,
) -> tuple[frozenset[Layout], frozenset[Strategy], list[Block | None], list[int | None]]:
    """Returns (layouts, strategies, blocks, group sizes)."""
    match keys.quant_method:
        case "compressed-tensors":
            groups = list(keys.config_groups.values()) or [_Group()]
            weights = [group.weights for group in groups if group.weights is not None]
            return (
                frozenset(COMPRESSED_FORMATS[_form(keys, group)] for group in groups),
                frozenset(STRATEGIES[arguments.kind] for arguments in weights),
                [arguments.block for arguments in weights],
                [arguments.group_size for arguments in weights],
            )
        case "modelopt":
            strategy = MODELOPT_STRATEGIES[keys.quant_algo]
            block = MODELOPT_BLOCK if strategy == "block" else None
            return frozenset({"scaled"}), frozenset({strategy}), [block], []
        case "fp8":
            block = keys.weight_block_size
            return (
                frozenset({"scaled"}),
                frozenset({"tensor", "channel"} if block is None else {"block"}),
                [block],
                [],
            )
    own = [value for value in (keys.dynamic or {}).values() if isinstance(value, dict)]
    stated = [
        keys.group_size or 0,
        *(size for value in own if isinstance(size := value.get("group_size"), int)),
    ]
    kinds: set[Strategy] = {"channel" if size < 0 else "group" for size in stated}
    return frozenset({"awq" if keys.quant_method == "awq" else "gptq"}), frozenset(kinds), [], [*stated]


def _required(keys: _Keys) -> frozenset[str]:
    if keys.quant_method == "gptq":
        return frozenset({"g_idx"} if keys.desc_act else ())
    parts = [group.weights.required for group in keys.config_groups.values() if group.weights is not None]
    return frozenset.intersection(*parts) if parts else frozenset()


def _form(keys: _Keys, group: _Group) -> str:
    return group.format or keys.format or "no format"


def _lists(keys: _Keys) -> tuple[frozenset[str], list[str | None]]:
    """Returns (names, shell patterns). A pattern is None if no shell pattern is equivalent."""
    patterns: list[str | None] = []
    for name in keys.kept:
        if name.startswith("re:"):
            patterns.append(_shell_pattern(name[3:]))
        elif "*" in name:
            patterns += [name, _PREFIXES.sub("", name)]
        if ".*" in name and keys.quant_method in REGULAR:
            patterns.append(_shell_pattern(name.removeprefix("re:")))
    names = (
        _PREFIXES.sub("", name.rstrip("."))
        for name in keys.kept
        if "*" not in name and not name.startswith("re:")
    )
    return frozenset(names), patterns


def _shell_pattern(expression: str) -> str | None:
    """Returns the pattern of a regular expression that matches the beginning of a name."""
    body = expression.removeprefix("^")
    is_whole = body.endswith("$")
    body = body.removesuffix("$")
    if _PLAIN_REGEX.fullmatch(body) is None:
        return None
    pieces = [_SHELL.get(piece, piece) for piece in _PIECE.findall(body)]
    return "".join(pieces) + ("" if is_whole else "*")


def _runs(parts: list[str]) -> Iterator[str]:
    """Yields all runs of parts: "a", "a.b" and "b" of ["a", "b"]."""
    for first in range(len(parts)):
        for last in range(first, len(parts)):
            yield ".".join(parts[first : last + 1])
