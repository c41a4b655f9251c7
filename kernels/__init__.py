"""The operations on the accelerator: each is one file, with a PyTorch twin in `reference`.

CUDA tensors take Triton, CPU tensors the twin. Knows tensors only: no requests, no models.
"""

from headway.kernels._adjustments import Adjustments
from headway.kernels._aside import compile_aside
from headway.kernels._dense import most_dense_rows
from headway.kernels._device import has_float8_products, has_fused_attention
from headway.kernels._late_norm import LateNorm
from headway.kernels._nibbles import pack_nibbles
from headway.kernels._row_state import DraftWindow, RoundWindow, RowState
from headway.kernels._skinny import FEW_ROWS, reserve_workspace
from headway.kernels._streamed import adds_on_the_way, is_streamed
from headway.kernels.add_linear import add_linear
from headway.kernels.adjust_logits import adjust_logits, count_tokens
from headway.kernels.advance import advance
from headway.kernels.causal_attention import causal_attention
from headway.kernels.commit_round import commit_round
from headway.kernels.deliver import deliver
from headway.kernels.fixed_linear import fixed_linear
from headway.kernels.float8_linear import float8_linear
from headway.kernels.force_acceptance import force_acceptance
from headway.kernels.gated_linear import gated_linear
from headway.kernels.keep_states import keep_states
from headway.kernels.kv_append import kv_append
from headway.kernels.mamba import mamba_state_selective_copy
from headway.kernels.open_drafts import open_drafts
from headway.kernels.open_round import open_round
from headway.kernels.paged_attention import paged_attention
from headway.kernels.prefill_attention import prefill_attention
from headway.kernels.prepare import prepare_next_forward_pass
from headway.kernels.qkv_rope_append import qkv_rope_append
from headway.kernels.quantized_linear import quantized_linear
from headway.kernels.rewind import rewind_kv_cache
from headway.kernels.rms_norm import add_rms_norm, embed_rms_norm, rms_norm
from headway.kernels.rope import rope
from headway.kernels.rope_append import rope_append
from headway.kernels.sample import gumbel_noise, sample
from headway.kernels.screened_linear import screened_linear
from headway.kernels.silu_mul import silu_mul
from headway.kernels.skinny_linear import skinny_linear
from headway.kernels.stamp import stamp
from headway.kernels.start_rows import start_rows
from headway.kernels.stream_read import stream_read
from headway.kernels.varlen_attention import varlen_attention
from headway.kernels.verify import verify_speculative_tokens

__all__ = [
    "FEW_ROWS",
    "Adjustments",
    "DraftWindow",
    "LateNorm",
    "RoundWindow",
    "RowState",
    "add_linear",
    "add_rms_norm",
    "adds_on_the_way",
    "adjust_logits",
    "advance",
    "causal_attention",
    "commit_round",
    "compile_aside",
    "count_tokens",
    "deliver",
    "embed_rms_norm",
    "fixed_linear",
    "float8_linear",
    "force_acceptance",
    "gated_linear",
    "gumbel_noise",
    "has_float8_products",
    "has_fused_attention",
    "is_streamed",
    "keep_states",
    "kv_append",
    "mamba_state_selective_copy",
    "most_dense_rows",
    "open_drafts",
    "open_round",
    "pack_nibbles",
    "paged_attention",
    "prefill_attention",
    "prepare_next_forward_pass",
    "qkv_rope_append",
    "quantized_linear",
    "reserve_workspace",
    "rewind_kv_cache",
    "rms_norm",
    "rope",
    "rope_append",
    "sample",
    "screened_linear",
    "silu_mul",
    "skinny_linear",
    "stamp",
    "start_rows",
    "stream_read",
    "varlen_attention",
    "verify_speculative_tokens",
]
