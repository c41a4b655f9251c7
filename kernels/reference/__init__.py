"""The PyTorch twins: they run on the CPU, and they are the oracle of the Triton kernels."""

from headway.kernels.reference.attention.paged_attention import paged_attention
from headway.kernels.reference.attention.prefill_attention import prefill_attention
from headway.kernels.reference.attention.varlen_attention import varlen_attention
from headway.kernels.reference.elementwise.gated_mul import gated_mul
from headway.kernels.reference.elementwise.gated_rms_norm import gated_rms_norm
from headway.kernels.reference.elementwise.rms_norm import add_rms_norm, embed_rms_norm, rms_norm
from headway.kernels.reference.elementwise.rope_append import rope_append
from headway.kernels.reference.elementwise.sigmoid_mul import sigmoid_mul
from headway.kernels.reference.linear.add_linear import add_linear
from headway.kernels.reference.linear.batch_invariant_linear import batch_invariant_linear
from headway.kernels.reference.linear.gated_linear import gated_linear
from headway.kernels.reference.linear.qkv_rope_append import qkv_rope_append
from headway.kernels.reference.linear.quantized_linear import quantized_linear
from headway.kernels.reference.linear.screened_linear import screened_linear
from headway.kernels.reference.linear.skinny_linear import skinny_linear
from headway.kernels.reference.recurrent.causal_convolution import convolve_chunks, convolve_windows
from headway.kernels.reference.recurrent.delta_chunks import delta_chunks
from headway.kernels.reference.recurrent.delta_windows import delta_windows
from headway.kernels.reference.recurrent.mamba import mamba_state_selective_copy
from headway.kernels.reference.sampling.mask_logits import mask_logits
from headway.kernels.reference.sampling.process_logits import count_tokens, process_logits
from headway.kernels.reference.sampling.sample import gumbel_noise, sample
from headway.kernels.reference.speculation.advance_draft_step import advance_draft_step
from headway.kernels.reference.speculation.begin_decode import begin_decode
from headway.kernels.reference.speculation.expand_drafter_inputs import expand_drafter_inputs
from headway.kernels.reference.speculation.extend_queries import extend_queries
from headway.kernels.reference.speculation.force_acceptance import force_acceptance
from headway.kernels.reference.speculation.open_drafts import open_drafts
from headway.kernels.reference.speculation.prepare import prepare_next_forward_pass
from headway.kernels.reference.speculation.prepare_drafter_inputs import prepare_drafter_inputs_padded
from headway.kernels.reference.speculation.prepare_next_tokens import prepare_next_tokens_padded
from headway.kernels.reference.speculation.prepare_verify_inputs import prepare_verify_inputs
from headway.kernels.reference.speculation.propose_ngram import propose_ngram
from headway.kernels.reference.speculation.relax_acceptance import relax_acceptance
from headway.kernels.reference.speculation.rewind import rewind_kv_cache
from headway.kernels.reference.speculation.store_pending_states import store_pending_states
from headway.kernels.reference.speculation.store_tokens import store_tokens
from headway.kernels.reference.speculation.verify import verify_speculative_tokens
from headway.kernels.reference.speculation.verify_and_rewind import verify_and_rewind
from headway.kernels.reference.transfer.copy_entries import copy_entries
from headway.kernels.reference.transfer.copy_results_to_host import copy_results_to_host
from headway.kernels.reference.transfer.stamp import stamp
from headway.kernels.reference.transfer.stream_read import stream_read

__all__ = [
    "add_linear",
    "add_rms_norm",
    "advance_draft_step",
    "batch_invariant_linear",
    "begin_decode",
    "convolve_chunks",
    "convolve_windows",
    "copy_entries",
    "copy_results_to_host",
    "count_tokens",
    "delta_chunks",
    "delta_windows",
    "embed_rms_norm",
    "expand_drafter_inputs",
    "extend_queries",
    "force_acceptance",
    "gated_linear",
    "gated_mul",
    "gated_rms_norm",
    "gumbel_noise",
    "mamba_state_selective_copy",
    "mask_logits",
    "open_drafts",
    "paged_attention",
    "prefill_attention",
    "prepare_drafter_inputs_padded",
    "prepare_next_forward_pass",
    "prepare_next_tokens_padded",
    "prepare_verify_inputs",
    "process_logits",
    "propose_ngram",
    "qkv_rope_append",
    "quantized_linear",
    "relax_acceptance",
    "rewind_kv_cache",
    "rms_norm",
    "rope_append",
    "sample",
    "screened_linear",
    "sigmoid_mul",
    "skinny_linear",
    "stamp",
    "store_pending_states",
    "store_tokens",
    "stream_read",
    "varlen_attention",
    "verify_and_rewind",
    "verify_speculative_tokens",
]
