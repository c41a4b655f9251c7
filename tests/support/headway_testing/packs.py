"""Quantised model folders and their dequantised twins, of the tiny random folders of other modules.

The twin has the values that compressed-tensors decompresses to, or that loops over blocks, groups and words
give; nothing here is the code that serves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headway_testing.checkpoints import random_mimo

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]  # [n, k] float32 -> (parts, [n, k] values)
FILE = "model.safetensors"
# The linear layers that published packs quantise; `fc`, `input_proj`, in_proj_a and in_proj_b they never do.
LINEARS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "in_proj_z", "out_proj",
)  # fmt: skip
HEADS = ("mtp.", "model.mtp_layers.")
# No multiples of 128, so that last blocks are ragged; multiples of 32.
RAGGED = {"hidden_size": 160, "intermediate_size": 224, "num_attention_heads": 6, "num_hidden_layers": 2}
# Multiples of 128 for groups of that many inputs.
EVEN = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_hidden_layers": 1}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map: the output that nibble i of a word holds
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


@dataclass(frozen=True)
class Format:
    """How a fixture is stored. quantize: a weight's parts, by their names behind the layer's, and its exact
    values. list_key: of config.json's list of layers that are not quantised. by_layer: a quantize of layers
    whose names have this part, in the place of the other. more: tensors that are beside each weight."""

    config: Mapping[str, Any]
    quantize: Quantize
    list_key: str | None = "modules_to_not_convert"
    dtype: torch.dtype = torch.bfloat16
    sizes: Mapping[str, int] = field(default_factory=lambda: RAGGED)
    by_layer: Mapping[str, Quantize] = field(default_factory=dict)
    is_legacy: bool = False


def write_packs(
    dense: Path,
    folder: Path,
    packed: Format,
    *,
    quantizes_head: bool = False,
    kept: Callable[[list[str]], list[str]] = lambda names: names,
) -> tuple[Path, Path]:
    """Returns (the quantised folder, its dequantised twin). dense: a folder of one file.

    kept: what config.json lists, of the layers that are not quantised.
    """
    config, found = json.loads((dense / "config.json").read_text()), load_file(dense / FILE)
    stored: Tensors = {}
    values: Tensors = {}
    plain: list[str] = []
    for name, tensor in found.items():
        layer, _, kind = name.rpartition(".")
        is_linear = kind == "weight" and layer.rpartition(".")[2] in LINEARS and "visual" not in name
        if not is_linear or (name.startswith(HEADS) and not quantizes_head):
            stored[name] = values[name] = tensor.to(packed.dtype)
            plain += [layer] if kind == "weight" and "norm" not in layer else []
            continue
        own = next((own for part, own in packed.by_layer.items() if part in layer), packed.quantize)
        parts, exact = own(tensor.float())
        stored |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
        values[name] = exact.to(packed.dtype).contiguous()
    dtype = str(packed.dtype).removeprefix("torch.")
    for part in (config, config.get("text_config", config)):
        part |= {"dtype": dtype}
        part.pop("torch_dtype", None)
    twin = _write(folder / "twin", config, values)
    quantization = dict(packed.config)
    if packed.list_key is not None:
        quantization[packed.list_key] = kept(sorted(set(plain)))
    if packed.is_legacy:
        pack = _write(folder / "pack", config, stored)
        (pack / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
        return pack, twin
    return _write(folder / "pack", config | {"quantization_config": quantization}, stored), twin


def mimo_packs(folder: Path, packed: Format, **changes: Any) -> tuple[Path, Path]:
    """Writes a MiMo with a head, which is quantised, too, unless `quantizes_head` is False."""
    quantizes_head = changes.pop("quantizes_head", True)
    dense = random_mimo(folder / "dense", **{**packed.sizes, **changes})
    return write_packs(dense, folder, packed, quantizes_head=quantizes_head)


def _write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / FILE)
    return folder


def fp8_blocks(
    scale_dtype: torch.dtype, *, block: tuple[int, int] = (128, 128), name: str = "weight_scale_inv"
) -> Quantize:
    """Quantises blocks. scale_dtype: uint8 stores exponents of 2, as float8_e8m0fnu does."""
    is_power = scale_dtype in (torch.uint8, torch.float8_e8m0fnu)

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        rows, columns = block
        grid = [[weight[i : i + rows, j : j + columns] for j in range(0, inputs, columns)] for i in range(0, outputs, rows)]  # fmt: skip
        largest = torch.tensor([[float(part.abs().max()) for part in line] for line in grid]) / 448
        exponents = largest.log2().ceil()
        scales = exponents.exp2() if is_power else largest.to(scale_dtype).float()
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        exact = torch.empty_like(weight)
        for i, line in enumerate(grid):
            for j, part in enumerate(line):
                place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                codes[place] = (part / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
                exact[place] = codes[place].float() * scales[i, j]
        stored = scales.to(scale_dtype)
        if is_power:
            stored = (exponents + 127).to(torch.uint8).view(scale_dtype)
        return {"weight": codes, name: stored}, exact

    return quantize


def fp8_rows(shape: str, *, name: str = "weight_scale", inputs_too: bool = False) -> Quantize:
    """Quantises rows. shape: of the scales: "[]", "[1]" or "[1, 1]" of a whole weight, "[n]" or "[n, 1]" of
    its outputs."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        largest = weight.abs().amax(1, keepdim=True) if "n" in shape else weight.abs().amax()[None, None]
        scales = largest / 448
        codes = (weight / scales).to(torch.float8_e4m3fn)
        shaped = {"[]": (), "[1]": (1,), "[1, 1]": (1, 1), "[n]": (-1,), "[n, 1]": (-1, 1)}[shape]
        parts = {"weight": codes, name: scales.reshape(shaped)}
        if inputs_too:
            parts |= {"input_scale": torch.tensor(0.25), "k_scale": torch.tensor(0.5)}
        return parts, codes.float() * scales

    return quantize


def compressed(
    form: str, *, scale_dtype: torch.dtype = torch.bfloat16, reorders: bool = False, **arguments: Any
) -> Format:
    """Returns a format that the compressed-tensors package packs and unpacks. reorders: inputs are quantised
    in an order of their own, and weight_g_idx has the group of each."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
        place = order.argsort()
        ordered = weight[:, order] if reorders else weight
        scales, zeros = _parameters(ordered, args)
        state = {"weight": ordered, "weight_scale": scales.to(scale_dtype)}
        if zeros is not None:
            state["weight_zero_point"] = zeros
        parts = compressor.compress(state, scheme)
        exact = compressor.decompress(parts, scheme)["weight"].float()
        if reorders:
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

            codes = unpack_from_int32(parts["weight_packed"], args.num_bits, weight.shape)
            parts["weight_packed"] = pack_to_int32(codes[:, place], args.num_bits)
            parts["weight_g_idx"] = (place // args.group_size).to(torch.int32)
            exact = exact[:, place]
        return parts, exact

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "input_activations": None}
    config = {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip
    is_wide = (arguments.get("group_size") or 0) > 32
    return Format(config, quantize, "ignore", sizes=EVEN if is_wide else RAGGED)


def _parameters(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (scales, zero points) for the strategy of compressed-tensors' arguments."""
    outputs, inputs = weight.shape
    match args.strategy:
        case "tensor":
            parts = weight.reshape(1, -1)
        case "channel":
            parts = weight[:, None]
        case "group":
            parts = weight.unflatten(1, (-1, args.group_size))
        case "block":
            rows, columns = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
            parts = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    top = 448.0 if args.type == "float" else float((1 << (args.num_bits - 1)) - 1)
    if args.symmetric:
        return torch.maximum(-low, high) / top, None
    scales = (high - low) / ((1 << args.num_bits) - 1)
    bottom = -(1 << (args.num_bits - 1))
    return scales, (bottom - low / scales).round().clamp(bottom, -bottom - 1).to(torch.int8)


def gptq(
    *,
    bits: int = 4,
    group_size: int = 32,
    version: int = 1,
    reorders: bool = False,
    is_symmetric: bool = False,
    **config: Any,
) -> Format:
    """Returns the format that `pack` of GPTQModel and AutoGPTQ writes, word by word. reorders: desc_act."""
    quantize = gptq_quantize(bits, group_size, version=version, reorders=reorders, is_symmetric=is_symmetric)
    content = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": reorders, "sym": is_symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2", "lm_head": False, **config,
    }  # fmt: skip
    return Format(content, quantize, list_key=None, dtype=torch.float16)


def gptq_quantize(
    bits: int, group_size: int, *, version: int = 1, reorders: bool = False, is_symmetric: bool = False
) -> Quantize:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        size = inputs if group_size < 0 else group_size
        groups = torch.arange(inputs) // size
        if reorders:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(6))]
        codes, scales, zeros = _integers(weight, groups, bits, is_symmetric=is_symmetric)
        exact = (codes - zeros[:, groups]).float() * scales.float()[:, groups]
        parts = {
            "qweight": pack_words(codes.T, bits).contiguous(),
            "qzeros": pack_words((zeros - int(version == 1)) & ((1 << bits) - 1), bits).T,
            "scales": scales.T,
            "g_idx": groups.to(torch.int32),
        }
        return parts, exact

    return quantize


def _integers(
    weight: torch.Tensor, groups: torch.Tensor, bits: int, *, is_symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (codes [n, k], scales [n, groups] float16, zero points [n, groups])."""
    top, scales, zeros = (1 << bits) - 1, [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / top).half()
        scales.append(scale)
        middle = torch.full_like(low, (top + 1) / 2)
        zeros.append(middle if is_symmetric else (-low / scale.float()).round().clamp(0, top))
    scale_grid, zero_grid = torch.stack(scales, 1), torch.stack(zeros, 1).int()
    steps = (weight / scale_grid.float()[:, groups]).round().int()
    return (steps + zero_grid[:, groups]).clamp(0, top), scale_grid, zero_grid


def pack_words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs along the first dimension: [n, m] -> [n bits / 32, m] int32, the last word filled with zeros."""
    per_word = 32 // bits
    filled = torch.nn.functional.pad(codes.long(), (0, 0, 0, -len(codes) % per_word))
    words = torch.zeros(len(filled) // per_word, codes.shape[1], dtype=torch.int64)
    for place in range(per_word):
        words |= filled[(order or range(per_word))[place] :: per_word] << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def awq(*, group_size: int = 32, **config: Any) -> Format:
    """Returns the format that AutoAWQ's WQLinear_GEMM packs."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = weight.shape[1] if group_size < 0 else group_size
        groups = torch.arange(weight.shape[1]) // size
        codes, scales, zeros = _integers(weight, groups, 4)
        exact = (codes - zeros[:, groups]).float() * scales.float()[:, groups]
        parts = {
            "qweight": pack_words(codes, 4, AWQ_ORDER).T,
            "qzeros": pack_words(zeros, 4, AWQ_ORDER).T,
            "scales": scales.T,
        }
        return parts, exact

    content = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True, **config,
    }  # fmt: skip
    return Format(content, quantize, dtype=torch.float16, sizes=RAGGED if group_size in (32, -1) else EVEN)


def modelopt(algorithm: str, quantize: Quantize, *, is_legacy: bool = False) -> Format:
    content = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"} | (
        {"producer": {"name": "modelopt"}} if is_legacy else {"quant_method": "modelopt"}
    )
    return Format(content, quantize, "exclude_modules" if is_legacy else "ignore", is_legacy=is_legacy)


def formats() -> dict[str, Callable[[], Format]]:
    """Returns every format that is read."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    blocks = FP8 | {"weight_block_size": [128, 128]}
    static = FP8 | {"activation_scheme": "static"}
    int4, int8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
    e4m3 = {"num_bits": 8, "type": "float"}
    float_, int_, pack = "float-quantized", "int-quantized", "pack-quantized"
    dynamic = {
        r"+:.*mlp\.up_proj": {"bits": 8, "group_size": 16},
        r"-:.*layers\.0\.self_attn\.v_proj": {},
        "-:.*lm_head": {},
    }
    return {
        "fp8 blocks, f32 scales": lambda: Format(blocks, fp8_blocks(f32)),
        "fp8 blocks, bf16 scales": lambda: Format(blocks, fp8_blocks(bf16)),
        "fp8 blocks, f16 scales": lambda: Format(blocks, fp8_blocks(f16)),
        "fp8 blocks, uint8 scales": lambda: Format(blocks, fp8_blocks(torch.uint8)),
        "fp8 blocks, e8m0 scales": lambda: Format(
            blocks | {"scale_fmt": "ue8m0"}, fp8_blocks(torch.float8_e8m0fnu)
        ),
        "fp8 blocks, float16": lambda: Format(blocks, fp8_blocks(f32), dtype=f16),
        "fp8 blocks, float32": lambda: Format(blocks, fp8_blocks(f32), dtype=f32),
        "fp8 tensors": lambda: Format(static, fp8_rows("[]", inputs_too=True)),
        "fp8 tensors [1]": lambda: Format(static, fp8_rows("[1]", name="weight_scale_inv")),
        "fp8 channels": lambda: Format(FP8, fp8_rows("[n, 1]")),
        "ct float tensor": lambda: compressed(float_, scale_dtype=f32, strategy="tensor", **e4m3),
        "ct float channel": lambda: compressed(float_, strategy="channel", **e4m3),
        "ct float block": lambda: compressed(
            float_, scale_dtype=f32, strategy="block", block_structure=[128, 128], **e4m3
        ),
        "ct int8 channel": lambda: compressed(int_, scale_dtype=f32, strategy="channel", **int8),
        "ct int8 channel, zeros": lambda: compressed(int_, strategy="channel", symmetric=False, **int8),
        "ct int4 g32": lambda: compressed(pack, strategy="group", group_size=32, **int4),
        "ct int4 g32, zeros": lambda: compressed(
            pack, strategy="group", group_size=32, symmetric=False, **int4
        ),
        "ct int4 g32, f32": lambda: compressed(
            pack, scale_dtype=f32, strategy="group", group_size=32, symmetric=False, **int4
        ),
        "ct int4 g32, order": lambda: compressed(
            pack, strategy="group", group_size=32, reorders=True, **int4
        ),
        "ct int4 g64": lambda: compressed(pack, strategy="group", group_size=64, **int4),
        "ct int4 g128, zeros": lambda: compressed(
            pack, strategy="group", group_size=128, symmetric=False, **int4
        ),
        "ct int4 channel": lambda: compressed(pack, strategy="channel", **int4),
        "ct int8 g32": lambda: compressed(pack, strategy="group", group_size=32, **int8),
        "ct int8 channel, packed, zeros": lambda: compressed(
            pack, strategy="channel", symmetric=False, **int8
        ),
        "modelopt fp8": lambda: modelopt("FP8", fp8_rows("[]", inputs_too=True)),
        "modelopt fp8, legacy": lambda: modelopt("FP8", fp8_rows("[]", inputs_too=True), is_legacy=True),
        "modelopt fp8 channels": lambda: modelopt("FP8_PER_CHANNEL_PER_TOKEN", fp8_rows("[n]")),
        "modelopt fp8 blocks": lambda: modelopt("FP8_PB_WO", fp8_blocks(f32, name="weight_scale")),
        "gptq": gptq,
        "gptq symmetric": lambda: gptq(is_symmetric=True),
        "gptq v2": lambda: gptq(version=2),
        "gptq desc_act": lambda: gptq(reorders=True),
        "gptq v2 desc_act": lambda: gptq(version=2, reorders=True),
        "gptq g128, ragged": lambda: gptq(group_size=128),
        "gptq channel": lambda: gptq(group_size=-1),
        "gptq 8 bits": lambda: gptq(bits=8),
        "gptq dynamic": lambda: _dynamic_gptq(dynamic),
        "awq": awq,
        "awq g128": lambda: awq(group_size=128),
        "awq channel": lambda: awq(group_size=-1),
    }


def _dynamic_gptq(dynamic: Mapping[str, Any]) -> Format:
    """Returns GPTQ with 8 bits for up projections, which leaves first value projections as they are."""
    packed = gptq(dynamic=dynamic)

    def plain(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return {"weight": weight.half()}, weight

    own = {"up_proj": gptq_quantize(8, 16), "layers.0.self_attn.v_proj": plain}
    return Format(packed.config, packed.quantize, None, torch.float16, by_layer=own)
