"""Converts a GGUF file of Llama's architecture to a folder in Hugging Face layout, in float32.

Weights are dequantized by the gguf library. For rotary embeddings llama.cpp pairs neighbouring rows of a
head, and Hugging Face the rows of its halves, so that the rows of q and k are reordered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.numpy import save_file

from headway.engine.chat_model.tokenizer_files import write_tokenizer
from headway.engine.protocol.errors import ModelError

WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm"}
OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KINDS = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
# In four bits a small model is unsure: at a temperature of 0.2 every second answer about the capital of
# France begins in French and does not end. Without a penalty the likeliest text repeats itself, too.
SAMPLING = {"do_sample": False, "temperature": 0.0, "repetition_penalty": 1.1}

Array = np.ndarray[Any, np.dtype[np.float32]]


def convert(gguf: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Writes config.json, generation_config.json, the tokenizer's files and model.safetensors into a new
    folder.

    The lm_head is tied to the embedding. progress: called with the fraction that is done. Raises ModelError
    for a GGUF of another kind.
    """
    reader = GGUFReader(gguf)
    metadata = Metadata(reader)
    for key, wanted in KINDS.items():
        if metadata[key] != wanted:
            raise ModelError(f"{gguf.name}: {key} is {metadata[key]!r}, supported is {wanted!r}")
    config = _config(metadata)
    folder.mkdir()
    _write(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", special | SAMPLING)
    write_tokenizer(metadata, folder)
    names = dict(_names(config["num_hidden_layers"]))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if stored.keys() != names.keys():
        odd = sorted(stored.keys() ^ names.keys())
        raise ModelError(f"{gguf.name}: tensors are missing or unknown: {', '.join(odd[:8])}")
    weights: dict[str, Array] = {}
    for done, (name, tensor) in enumerate(stored.items(), start=1):
        weights[names[name]] = _weight(tensor, config)
        progress(done / len(stored))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Metadata:
    """The keys and values of a GGUF. Raises ModelError for a key that it does not have."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise ModelError(f"the GGUF has no {key}; take one that llama.cpp's converter wrote")
        return field.contents()


def _config(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata["llama.rope.freq_base"]),
        "vocab_size": metadata["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def _shortest(value: float) -> float:
    """Returns the shortest number with the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Yields the name in the GGUF and the name in the checkpoint of every tensor."""
    for name, checkpoint_name in WHOLE.items():
        yield f"{name}.weight", f"model.{checkpoint_name}.weight"
    for layer in range(num_layers):
        for name, checkpoint_name in OF_A_LAYER.items():
            yield f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{checkpoint_name}.weight"


def _weight(tensor: ReaderTensor, config: dict[str, Any]) -> Array:
    weight: Array = dequantize(tensor.data, tensor.tensor_type)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    for name, key in heads.items():
        if f".{name}." in tensor.name:
            weight = _in_halves(weight, config[key])
    return np.ascontiguousarray(weight, dtype=np.float32)


def _in_halves(weight: Array, num_heads: int) -> Array:
    """weight: [num_heads * head_dim, hidden_size]. Rows 0 1 2 3 4 5 of a head become rows 0 2 4 1 3 5."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
