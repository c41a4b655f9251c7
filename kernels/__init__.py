"""The operations on tensors: each is one file, with a PyTorch twin in `reference`.

CUDA tensors are computed by Triton, CPU tensors by the twin. The kernels know tensors only, no requests or
models.

A decode round launches `verify_and_rewind` on the GPU; it and the separate operations
`verify_speculative_tokens`, `prepare_next_forward_pass` and `rewind_kv_cache` are built from the same Triton
device functions. The engine launches none of `prepare_drafter_inputs_padded`, `prepare_next_tokens_padded`,
`advance_draft_step`, `expand_drafter_inputs` and `extend_queries`, which serve drafters of other layouts.
"""

from headway.kernels.attention._cpu_attention import cpu_attention, cpu_rope_append, has_cpu_attention
from headway.kernels.attention.api import attention
from headway.kernels.attention.dispatch import (
    WIDE_CACHE_SIZE,
    PaddedForm,
    is_split_kv,
    max_prompt_rows,
    padded_form,
    split_kv_config,
    split_kv_keys,
    split_kv_partials,
    splits_keys,
)
from headway.kernels.attention.paged_attention import paged_attention
from headway.kernels.attention.prefill_attention import prefill_attention
from headway.kernels.attention.varlen_attention import varlen_attention
from headway.kernels.elementwise.gated_mul import gated_mul
from headway.kernels.elementwise.gated_rms_norm import gated_rms_norm
from headway.kernels.elementwise.rms_norm import add_rms_norm, embed_rms_norm, rms_norm
from headway.kernels.elementwise.rope_append import rope_append
from headway.kernels.elementwise.sigmoid_mul import sigmoid_mul
from headway.kernels.experts._cpu_experts import integer_cpu_expert_weights
from headway.kernels.experts._packed_expert import pack_expert
from headway.kernels.experts.api import expert_results, tokens_of_each_kernel
from headway.kernels.experts.choose_experts import choose_experts
from headway.kernels.experts.expert_linear import expert_linear
from headway.kernels.experts.sum_experts import sum_experts
from headway.kernels.linear._cpu_linear import can_be_packed, least_packed_rows, pack_weight
from headway.kernels.linear._integer_cpu_linear import (
    can_be_integers,
    has_integer_products,
    integer_cpu_bytes,
    integer_cpu_weight,
)
from headway.kernels.linear._ordered_linear import keep_sums_whole, library_is_ordered
from headway.kernels.linear._quantized_weight import expanded_weight, quantized_weight, reads_codes
from headway.kernels.linear._skinny_core import reserve_workspace
from headway.kernels.linear.api import (
    adds_residual,
    defers_norm,
    fuses_qkv,
    has_order,
    linear,
    most_gated_rows,
    rows_of_each_kernel,
)
from headway.kernels.linear.dispatch import (
    FEW_ROWS,
    MAX_HIDDEN_OF_FEW_LAUNCHES,
    MIN_ADDED_ROWS,
    most_screened_rows,
)
from headway.kernels.linear.qkv_rope_append import qkv_rope_append
from headway.kernels.recurrent.causal_convolution import convolve_chunks, convolve_windows
from headway.kernels.recurrent.delta_chunks import delta_chunks
from headway.kernels.recurrent.delta_windows import delta_windows
from headway.kernels.recurrent.mamba import mamba_state_selective_copy
from headway.kernels.reference.experts._expanded_expert import expanded_expert
from headway.kernels.runtime._device import has_float8_products, memory_bandwidth
from headway.kernels.runtime._precompile import compile_in_workers, log_compilations
from headway.kernels.sampling.mask_logits import mask_logits
from headway.kernels.sampling.process_logits import count_tokens, process_logits
from headway.kernels.sampling.sample import gumbel_noise, sample
from headway.kernels.speculation.advance_draft_step import advance_draft_step
from headway.kernels.speculation.begin_decode import begin_decode
from headway.kernels.speculation.expand_drafter_inputs import expand_drafter_inputs
from headway.kernels.speculation.extend_queries import extend_queries
from headway.kernels.speculation.force_acceptance import force_acceptance
from headway.kernels.speculation.open_drafts import open_drafts
from headway.kernels.speculation.prepare import prepare_next_forward_pass
from headway.kernels.speculation.prepare_drafter_inputs import prepare_drafter_inputs_padded
from headway.kernels.speculation.prepare_next_tokens import prepare_next_tokens_padded
from headway.kernels.speculation.prepare_verify_inputs import prepare_verify_inputs
from headway.kernels.speculation.propose_ngram import propose_ngram
from headway.kernels.speculation.relax_acceptance import relax_acceptance
from headway.kernels.speculation.rewind import rewind_kv_cache
from headway.kernels.speculation.store_pending_states import store_pending_states
from headway.kernels.speculation.store_tokens import store_tokens
from headway.kernels.speculation.verify import verify_speculative_tokens
from headway.kernels.speculation.verify_and_rewind import verify_and_rewind
from headway.kernels.transfer.copy_entries import copy_entries
from headway.kernels.transfer.copy_results_to_host import copy_results_to_host
from headway.kernels.transfer.gather_ranks import gather_ranks
from headway.kernels.transfer.stamp import stamp
from headway.kernels.transfer.stream_read import stream_read
from headway.kernels.types._deferred_norm import DeferredNorm
from headway.kernels.types._delta_rule import DeltaRule, DeltaState, TokenSpans
from headway.kernels.types._epilogue import Activation, Epilogue, GateActivation, NextNorm
from headway.kernels.types._experts import (
    ExpertChoice,
    ExpertMatrix,
    ExpertRule,
    ExpertWeights,
    IntegerCpuExperts,
)
from headway.kernels.types._head_norms import HeadNorms
from headway.kernels.types._int4_packing import pack_nibbles
from headway.kernels.types._predictions import Predictions
from headway.kernels.types._processor_state import LogitsProcessorState
from headway.kernels.types._query_batch import QueryBatch
from headway.kernels.types._rank_memory import RankMemory
from headway.kernels.types._row_state import DraftWindow, RoundWindow, RowState
from headway.kernels.types._score_rule import ScoreRule
from headway.kernels.types._weights import (
    DenseWeight,
    Float8Weight,
    Int4ScreenedWeight,
    IntegerCpuWeight,
    PackedCpuWeight,
    QuantizedWeight,
    Weight,
)

__all__ = [
    "FEW_ROWS",
    "MAX_HIDDEN_OF_FEW_LAUNCHES",
    "MIN_ADDED_ROWS",
    "WIDE_CACHE_SIZE",
    "Activation",
    "DeferredNorm",
    "DeltaRule",
    "DeltaState",
    "DenseWeight",
    "DraftWindow",
    "Epilogue",
    "ExpertChoice",
    "ExpertMatrix",
    "ExpertRule",
    "ExpertWeights",
    "Float8Weight",
    "GateActivation",
    "HeadNorms",
    "Int4ScreenedWeight",
    "IntegerCpuExperts",
    "IntegerCpuWeight",
    "LogitsProcessorState",
    "NextNorm",
    "PackedCpuWeight",
    "PaddedForm",
    "Predictions",
    "QuantizedWeight",
    "QueryBatch",
    "RankMemory",
    "RoundWindow",
    "RowState",
    "ScoreRule",
    "TokenSpans",
    "Weight",
    "add_rms_norm",
    "adds_residual",
    "advance_draft_step",
    "attention",
    "begin_decode",
    "can_be_integers",
    "can_be_packed",
    "choose_experts",
    "compile_in_workers",
    "convolve_chunks",
    "convolve_windows",
    "copy_entries",
    "copy_results_to_host",
    "count_tokens",
    "cpu_attention",
    "cpu_rope_append",
    "defers_norm",
    "delta_chunks",
    "delta_windows",
    "embed_rms_norm",
    "expand_drafter_inputs",
    "expanded_expert",
    "expanded_weight",
    "expert_linear",
    "expert_results",
    "extend_queries",
    "force_acceptance",
    "fuses_qkv",
    "gated_mul",
    "gated_rms_norm",
    "gather_ranks",
    "gumbel_noise",
    "has_cpu_attention",
    "has_float8_products",
    "has_integer_products",
    "has_order",
    "integer_cpu_bytes",
    "integer_cpu_expert_weights",
    "integer_cpu_weight",
    "is_split_kv",
    "keep_sums_whole",
    "least_packed_rows",
    "library_is_ordered",
    "linear",
    "log_compilations",
    "mamba_state_selective_copy",
    "mask_logits",
    "max_prompt_rows",
    "memory_bandwidth",
    "most_gated_rows",
    "most_screened_rows",
    "open_drafts",
    "pack_expert",
    "pack_nibbles",
    "pack_weight",
    "padded_form",
    "paged_attention",
    "prefill_attention",
    "prepare_drafter_inputs_padded",
    "prepare_next_forward_pass",
    "prepare_next_tokens_padded",
    "prepare_verify_inputs",
    "process_logits",
    "propose_ngram",
    "qkv_rope_append",
    "quantized_weight",
    "reads_codes",
    "relax_acceptance",
    "reserve_workspace",
    "rewind_kv_cache",
    "rms_norm",
    "rope_append",
    "rows_of_each_kernel",
    "sample",
    "sigmoid_mul",
    "split_kv_config",
    "split_kv_keys",
    "split_kv_partials",
    "splits_keys",
    "stamp",
    "store_pending_states",
    "store_tokens",
    "stream_read",
    "sum_experts",
    "tokens_of_each_kernel",
    "varlen_attention",
    "verify_and_rewind",
    "verify_speculative_tokens",
]
