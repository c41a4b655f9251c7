"""Text that the model writes from corpus prompts, from which the later stages learn."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from demo_model.corpus import Corpus
from demo_model.model import DemoModel

PROMPT_TOKENS = 128
NEW_TOKENS = 214
MAX_LEAD = 64  # the most first tokens at temperature 1, which lead away from memorised text
SAMPLED_TEMPERATURE = 0.8  # of sampled texts after these tokens; others are greedy


def own_text(
    model: DemoModel, corpus: Corpus, rows: int, sampled_share: float, rng: np.random.Generator
) -> Tensor:
    """Returns text by a bfloat16 copy of the model, [rows, PROMPT_TOKENS + NEW_TOKENS] int64."""
    leads = rng.integers(0, MAX_LEAD + 1, (rows, 1))
    after = np.where(rng.random((rows, 1)) < sampled_share, SAMPLED_TEMPERATURE, 0.0)
    temperatures = np.where(np.arange(NEW_TOKENS) < leads, 1.0, after).astype(np.float32)
    prompts = corpus.prompts(rows, PROMPT_TOKENS, rng)
    writer = copy.deepcopy(model).eval().bfloat16()
    device = model.lm_head.weight.device
    return write_on(writer, torch.from_numpy(prompts).to(device), torch.from_numpy(temperatures).to(device))


@torch.no_grad()
def write_on(model: DemoModel, prompts: Tensor, temperatures: Tensor) -> Tensor:
    """Returns the prompts and the model's continuations, [rows, prompt + new] int64. prompts: [rows, prompt]
    int64. temperatures: [rows, new] float32, one per new token; 0 is greedy."""
    rows, start = prompts.shape
    ids = F.pad(prompts, (0, temperatures.shape[1]))
    caches = model.empty_caches(rows, ids.shape[1])
    for position in range(1, ids.shape[1]):
        hidden = model.step(ids[:, position - 1], position - 1, caches)
        if position >= start:
            logits = model.logits(hidden).float()
            noise = -torch.empty_like(logits).exponential_().log()
            ids[:, position] = (logits + temperatures[:, position - start, None] * noise).argmax(-1)
    return ids
