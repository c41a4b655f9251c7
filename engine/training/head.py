"""The head that is trained: an MTP layer made of the decoder layer that transformers has for the family.

Knows no files and no optimizer. Slots, pairs and carries are those of `speculation.mtp`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from headway.engine.layers.soft_cap import soft_capped
from headway.engine.models.spec import AttentionSpec, ModelSpec
from headway.engine.models.trained_head import model_layer

UNROLLED = 3  # successive drafts that are trained
INITIAL_STD = 0.02


class TargetView(NamedTuple):
    """The results of the target for n tokens of each row. rotary: cosines and sines of all positions."""

    token_ids: torch.Tensor  # [rows, n] int64
    hidden: torch.Tensor  # [rows, n, hidden]: after the final norm
    rotary: tuple[torch.Tensor, torch.Tensor]  # [rows or 1, n, rotary] each


class Target:
    """The target model, in transformers' implementation. It is not trained."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        self.spec, self._base = spec, model.get_submodule(model.base_model_prefix)
        self._lm_head = model.get_submodule("lm_head")
        self.lm_head = self._lm_head.get_parameter("weight").detach()  # [vocab, hidden]
        self.embedding = self._base.get_submodule("embed_tokens").get_parameter("weight").detach()
        self.layer = self._base.get_submodule(f"layers.{model_layer(spec)}")
        self.norm = self._base.get_submodule("norm")

    @torch.no_grad()
    def view(
        self,
        token_ids: torch.Tensor,  # [rows, n] int64, padded after a row's text
    ) -> TargetView:
        """Runs the model on the tokens."""
        rotary: list[tuple[torch.Tensor, torch.Tensor]] = []

        def note(layer: nn.Module, args: object, kwargs: dict[str, object]) -> None:
            found = kwargs["position_embeddings"]
            assert isinstance(found, tuple), "transformers' decoder layers get cosines and sines"
            rotary.append(found)

        handle = self.layer.register_forward_pre_hook(note, with_kwargs=True)
        try:
            hidden = self._base(input_ids=token_ids, use_cache=False).last_hidden_state
        finally:
            handle.remove()
        return TargetView(token_ids, hidden, rotary.pop())

    @torch.no_grad()
    def logits(
        self,
        hidden: torch.Tensor,  # [n, hidden], after the final norm
    ) -> torch.Tensor:
        """Returns [n, vocab] float32."""
        return soft_capped(self._lm_head(hidden), self.spec.logit_soft_cap).float()


class Head(nn.Module):
    """Predicts the token after a pair of the hidden state before a token and that token. Its parameters are
    in float32; the target's embedding and output layer are not among them.

    draft_ids: [draft vocab] int64.
    """

    def __init__(self, target: Target, draft_ids: torch.Tensor, *, seed: int) -> None:
        super().__init__()
        spec = target.spec
        self._embedding, self._scale = target.embedding, spec.embedding_scale
        self._soft_cap, self.draft_ids = spec.logit_soft_cap, draft_ids
        self._lm_head = target.lm_head[draft_ids]
        mixer = spec.layers[model_layer(spec)].mixer
        self._window = mixer.sliding_window if isinstance(mixer, AttentionSpec) else None
        self.hidden_norm, self.token_norm, self.norm = (deepcopy(target.norm).float() for _ in range(3))
        for norm in (self.hidden_norm, self.token_norm):
            nn.init.constant_(norm.get_parameter("weight"), 0.0 if spec.norm.unit_offset else 1.0)
        self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        # It begins as the target's own layer, which reads the hidden state and a little of the token.
        generator = torch.Generator().manual_seed(seed)
        of_token = torch.randn(spec.hidden_size, spec.hidden_size, generator=generator) * INITIAL_STD
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([of_token, torch.eye(spec.hidden_size)], 1))
        self.layers = nn.ModuleList([deepcopy(target.layer).float()])
        self.requires_grad_()

    def unrolled(self, view: TargetView, num_steps: int = UNROLLED) -> list[torch.Tensor]:
        """Returns the carries of each step, [rows, n - 1, hidden], at slots 1 .. n - 1.

        Step s reads the carries of the step before. As in serving, it attends to the true pairs up to s slots
        before its own, and to the pairs of the steps between in the slots after these. Slots up to s have no
        such pair, so that their carries mean nothing.
        """
        count = view.token_ids.shape[1]
        tokens = self.token_norm(functional.embedding(view.token_ids[:, 1:], self._embedding) * self._scale)
        carry, cache, found = view.hidden[:, :-1], DynamicCache(), []
        rotary = (view.rotary[0][:, 1:], view.rotary[1][:, 1:])
        positions = torch.arange(1, count, device=carry.device)[None]
        for step in range(num_steps):
            if step > 0:
                carry = torch.cat([view.hidden[:, :1].to(carry.dtype), carry[:, :-1]], 1)
            x = self.fc(torch.cat([tokens.to(carry.dtype), self.hidden_norm(carry)], -1))
            x = self.layers[0](
                x, attention_mask=_mask(count - 1, step, self._window, x), position_ids=positions,
                past_key_values=cache, use_cache=True, position_embeddings=rotary,
            )  # fmt: skip
            carry = self.norm(x)
            found.append(carry)
        return found

    def logits(
        self,
        carry: torch.Tensor,  # [n, hidden]
    ) -> torch.Tensor:
        """Returns [n, draft vocab] float32."""
        return soft_capped(functional.linear(carry, self._lm_head.to(carry.dtype)), self._soft_cap).float()


def _mask(count: int, step: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Returns [1, 1, count, (step + 1) * count] of like's dtype: 0 where a slot attends to a key, else -inf.
    The keys are those of step 0, then those of step 1, and so on up to the step. window: the number of last
    slots that a slot attends to, itself included; None for all.

    Three slots at step 1: . . . | 1 . .    before the bar the true pairs of the slots before it, after it
                           1 . . | . 1 .    the slot's own. At step 2 a third block has a slot's own, and the
                           1 1 . | . . 1    second that of the slot before it.
    """
    slots = torch.arange(count, device=like.device)
    ahead = slots[:, None] - slots
    seen = torch.cat([ahead >= step, *(ahead == step - own for own in range(1, step + 1))], 1)
    if window is not None:
        seen &= (ahead < window).repeat(1, step + 1)
    mask = like.new_zeros(count, count * (step + 1)).masked_fill_(~seen, -torch.inf)
    return mask[None, None]
