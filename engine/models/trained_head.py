"""Reads the config.json of a head that `headway head train` has made for a model that ships none: one MTP
layer in a folder of its own. Imports no torch.

The layer is shaped like one of the model's own, and drafts over some of the model's tokens.
"""

from __future__ import annotations

from pathlib import Path

from headway.engine.models.model_files import read_json_object
from headway.engine.models.spec import AttentionSpec, DenseSpec, ModelSpec, MtpSpec
from headway.engine.protocol.errors import ModelError

ARCHITECTURE = "HeadwayMtpHead"


def model_layer(target: ModelSpec) -> int:
    """Returns the index of the target's layer that its head is shaped like: the last one without experts that
    attends to all tokens, or else to a window. Raises ModelError for a target without any."""
    found: dict[bool, int] = {}
    for index, layer in enumerate(target.layers):
        if isinstance(layer.mixer, AttentionSpec) and isinstance(layer.feed_forward, DenseSpec):
            found[layer.mixer.sliding_window is None] = index
    if not found:
        raise ModelError(
            f"no layer of {target.architecture} has attention and a feed-forward without experts, as a trained head has; "
            "draft by an EAGLE-3 head, a draft model or n-grams"
        )
    return found[max(found)]


def head_config(target: ModelSpec, draft_vocab_size: int) -> dict[str, object]:
    """Returns the content of the config.json of a head for the target, as `read_trained_head` reads it."""
    return {
        "architectures": [ARCHITECTURE],
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "target_layer": model_layer(target),
        "tie_word_embeddings": target.tied,
    }


def read_trained_head(folder: Path, target: ModelSpec) -> MtpSpec:
    """Reads config.json. Raises ModelError for a head that does not fit the target."""
    file = folder / "config.json"
    content = read_json_object(file) or {}
    size = content.get("draft_vocab_size")
    if type(size) is not int or not 1 <= size <= target.vocab_size:
        raise ModelError(
            f"{file}: draft_vocab_size is {size!r}; it must be a number of the model's {target.vocab_size:,} tokens"
        )
    for name, wanted in head_config(target, size).items():
        if content.get(name) != wanted:
            raise ModelError(
                f"{file}: {name} is {content.get(name)!r}, for this model it must be {wanted!r}; give a head that was trained for it"
            )
    return MtpSpec(1, target.layers[model_layer(target)], draft_vocab_size=size)
