"""Writes the folder of a trained head: config.json, the weights, and a card that says how good it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from headway.engine.loading.eagle3 import OFFSETS
from headway.engine.loading.files import WEIGHTS_FILE
from headway.engine.loading.trained_head import LM_HEAD
from headway.engine.models.trained_head import head_config
from headway.engine.training.head import Head, Target
from headway.engine.training.trainer import Scores, Settings


def write_head(folder: Path, target: Target, head: Head) -> None:
    """Writes config.json and the weights in bfloat16. The output layer consists of rows of the target's, and
    is left out for a target with a tied embedding. Raises OSError."""
    ids = head.draft_ids.cpu()
    tensors = {name: tensor.bfloat16().cpu() for name, tensor in head.state_dict().items()}
    if not target.spec.tied:
        tensors[LM_HEAD] = target.lm_head[head.draft_ids].bfloat16().cpu()
    tensors[OFFSETS] = ids - torch.arange(len(ids))
    file = folder / WEIGHTS_FILE
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from None
    file.chmod(0o644)  # safetensors lets only the owner read it
    content = {**head_config(target.spec, len(ids)), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def write_card(
    folder: Path,
    model: Path,
    settings: Settings,
    *,
    num_answers: int,
    num_steps: int,
    held_out: Scores,
    drafted: float,
    acceptance: Mapping[float, Sequence[float]],
) -> str:
    """Writes README.md and returns its text. drafted: the share of held-out tokens that can be drafted.
    acceptance: for each temperature, the shares of rounds whose first drafts were accepted."""
    rows = [
        f"| {temperature:g} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"
        for temperature, shares in sorted(acceptance.items())
    ]
    losses = ", ".join(f"{loss:.3f}" for loss in held_out.losses.tolist())
    agreement = ", ".join(f"{share:.3f}" for share in held_out.agreement.tolist())
    shown = ", ".join(f"{name} {value}" for name, value in asdict(settings).items())
    card = f"""# A draft head for {model.name}

One MTP layer, trained by `headway head train` on {num_answers:,} answers of the model itself, {num_steps:,} steps
({shown}). `headway serve {model.name} --drafter {folder.name}` drafts with it; no text changes.

Share of rounds whose first 1, 2, 3 drafts are kept, on prompts that were held out, by Headway's own rounds of three drafts:

| temperature | 1 | 2 | 3 |
|---|---|---|---|
{chr(10).join(rows)}

On held-out answers, by draft: cross entropy with the model's distribution {losses} nats; agreement with its most probable
token {agreement}. Of their tokens {drafted:.1%} are among those that the head can draft.
"""
    (folder / "README.md").write_text(card)
    return card
