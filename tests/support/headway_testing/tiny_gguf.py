"""A tiny Llama as a GGUF file, as llama.cpp's converter and quantizer write it, and its twin in
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from headway_testing.families import tiny_model
from headway_testing.tiny_tokenizers import TEXT

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL, NORMAL = 3, 1
Q4_1, Q8_0, F32 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def tokenizer() -> dict[str, Any]:
    """Returns vocab and merges of a byte-level BPE whose merges join digits, too, which the pre-tokenizer
    must prevent."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([*TEXT, "1234 1234 1234"], trainer)
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    return model


def write(file: Path, **changes: object) -> PreTrainedModel:
    """Returns a model with the very weights of the file. changes: of its metadata; None leaves a key out."""
    bpe = tokenizer()
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    model = tiny_model("LlamaForCausalLM", **SIZES, vocab_size=len(tokens), tie_word_embeddings=True)
    config = model.config
    values: dict[str, object] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": 1e4,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in bpe["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    } | changes  # fmt: skip
    architecture = str(values.pop("general.architecture", "llama"))
    writer = GGUFWriter(file, architecture)
    for key, value in values.items():
        _add(writer, key, value)
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(_add_weight(writer, name, parameter.detach().numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        assert value is None, (key, value)


def _add_weight(writer: GGUFWriter, name: str, weight: np.ndarray, config: Any) -> np.ndarray:
    """Returns the weight as it is once it was quantized."""
    prefix, _, own = name.removeprefix("model.").removesuffix(".weight").rpartition("layers.")
    layer, _, own = own.partition(".") if prefix or own[:1].isdigit() else ("", "", own)
    stored = f"blk.{layer}.{NAMES[own]}.weight" if layer else f"{NAMES[own]}.weight"
    kind = F32 if weight.ndim == 1 else Q8_0 if own == "embed_tokens" else Q4_1
    quantized = quantize(weight, kind)
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    writer.add_tensor(stored, _paired(quantized, heads[own]) if own in heads else quantized, raw_dtype=kind)
    return np.array(dequantize(quantized, kind))


def _paired(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleaves the halves of a head, as llama.cpp does: row i of the first half, row i of the second, then
    row i + 1."""
    size = len(rows) // num_heads
    order = [
        head * size + half * size // 2 + i
        for head in range(num_heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]
