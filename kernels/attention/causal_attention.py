"""Causal attention of windows over their own keys: prompts of which nothing is in the cache yet.

On Hopper and data-centre Blackwell by cuDNN, which reads the projections' output where it is. It plans anew for
each number of rows and width of the window, about 40 ms of the host's time: callers keep to few.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.kernels.reference.attention.causal_attention import causal_attention as causal_attention_twin
from headway.kernels.runtime._device import has_fused_attention


def causal_attention(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim]
    key: torch.Tensor,  # [rows, window, kv_heads, head_dim]
    value: torch.Tensor,  # [rows, window, kv_heads, head_dim]
    scale: float,
) -> torch.Tensor:
    """[rows, window, q_heads, head_dim], contiguous: query w of a row sees keys 0 .. w of its row."""
    if not has_fused_attention(query.device, query.dtype, query.shape[3]):
        return causal_attention_twin(query, key, value, scale)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return causal_attention_twin(query, key, value, scale)
