"""An oracle, made of transformers' layers, of heads as `headway head train` writes them."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from headway_testing.oracle import randomise

# The layer of each tiny model that a head is shaped like; rotary embeddings may have a name of its kind.
LAYERS = {
    "LlamaForCausalLM": 2,
    "Qwen3ForCausalLM": 2,
    "Qwen3_5ForCausalLM": 1,
    "Gemma3ForCausalLM": 2,
    "MistralForCausalLM": 2,
}


class TrainedHeadOracle(nn.Module):
    """A head of random weights for a tiny model, over whole sequences, without a cache. The submodules have
    the names of the folder."""

    def __init__(self, target: PreTrainedModel, *, draft_vocab: int = 100, seed: int = 0) -> None:
        super().__init__()
        self.target, base, self.architecture = [target], target.base_model, type(target).__name__
        hidden, generator = target.config.hidden_size, torch.Generator().manual_seed(seed)
        self.hidden_norm, self.token_norm, self.norm = (deepcopy(base.norm) for _ in range(3))
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([deepcopy(base.layers[LAYERS[self.architecture]])])
        randomise(self, generator)
        self.ids = torch.randperm(target.config.vocab_size, generator=generator)[:draft_vocab].sort().values

    def save(self, folder: Path) -> Path:
        """Writes config.json and the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.target[0].config
        content = {
            "architectures": ["HeadwayMtpHead"], "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
            "draft_vocab_size": len(self.ids), "target_layer": LAYERS[self.architecture],
            "tie_word_embeddings": config.tie_word_embeddings,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(content))
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if not config.tie_word_embeddings:
            tensors["lm_head.weight"] = self._lm_head().clone()
        tensors["d2t"] = self.ids - torch.arange(len(self.ids))
        save_file(tensors, folder / "model.safetensors")
        return folder

    @torch.no_grad()
    def draft_logits(self, token_ids: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Returns the logits, [draft vocab], of the greedy drafts 1 .. depth that follow the tokens, [tokens]
        int64."""
        base = self.target[0].base_model
        hidden = base(token_ids[None, :-1], use_cache=False).last_hidden_state[0]
        tokens, found = token_ids[1:], []
        for _ in range(depth):
            x = torch.cat([self.token_norm(base.embed_tokens(tokens)), self.hidden_norm(hidden)], dim=-1)
            count = len(tokens)
            positions = torch.arange(1, count + 1)[None]
            kind = ("full_attention",) if self.architecture == "Gemma3ForCausalLM" else ()
            # Qwen3.5 has positions of time, height and width, which are the same in texts.
            axes = positions.expand(3, 1, -1) if self.architecture == "Qwen3_5ForCausalLM" else positions
            mask = torch.ones(count, count, dtype=torch.bool).tril()
            if self.architecture == "MistralForCausalLM":
                mask = mask.triu(1 - base.config.sliding_window)
            y = self.layers[0](
                self.fc(x)[None], attention_mask=mask[None, None], position_ids=positions,
                position_embeddings=base.rotary_emb(x[None], axes, *kind),
            )  # fmt: skip
            carry = self.norm(y[0])[-1:]
            found.append((carry @ self._lm_head().T)[0])
            hidden = torch.cat([hidden, carry])
            tokens = torch.cat([tokens, self.ids[found[-1].argmax()][None]])
        return found

    def drafts(self, token_ids: torch.Tensor, depth: int) -> list[int]:
        """Returns the greedy drafts that follow the tokens, as the target's ids."""
        return [int(self.ids[logits.argmax()]) for logits in self.draft_logits(token_ids, depth)]

    def _lm_head(self) -> torch.Tensor:
        return self.target[0].get_output_embeddings().weight[self.ids]
