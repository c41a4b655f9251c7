"""Lists the supported families, and reads a model folder's config.json as one of them."""

from __future__ import annotations

from pathlib import Path

from headway.engine.models.config_keys import ConfigClass, resolve_config
from headway.engine.models.families import (
    gemma2,
    gemma3,
    llama,
    mimo,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from headway.engine.models.family import Family
from headway.engine.models.model_files import is_folder, read_json_object
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.errors import ModelError

FAMILIES: tuple[Family, ...] = (
    qwen2.FAMILY, qwen3.FAMILY, llama.FAMILY, mimo.FAMILY, qwen3_5.FAMILY, qwen3_5.TEXT_FAMILY,
    mistral.FAMILY, gemma2.FAMILY, gemma3.FAMILY, gemma3.VISION_FAMILY, qwen3_moe.FAMILY,
    qwen3_5_moe.FAMILY, qwen3_5_moe.TEXT_FAMILY, qwen3_next.FAMILY, mixtral.FAMILY,
)  # fmt: skip
FAMILY_OF: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
LEGACY_QUANTIZATION = "hf_quant_config.json"
CONFIG_CLASSES: dict[str, ConfigClass] = {name: family.config_class for name, family in FAMILY_OF.items()}


def read_model_spec(path: str | Path) -> ModelSpec:
    """Reads `config.json` of a model folder. Raises ModelError for faults and for features that are not
    computed."""
    folder = Path(path)
    file = folder / "config.json"
    content = read_json_object(file)
    if content is None and not is_folder(folder):
        raise ModelError(f"the model folder {folder} does not exist; give a folder in Hugging Face layout")
    if content is None:
        raise ModelError(f"{folder} has no config.json; give a folder in Hugging Face layout")
    resolved = resolve_config(_with_legacy_quantization(folder, content), file, CONFIG_CLASSES)
    return FAMILY_OF[resolved.architecture].read(resolved)


def _with_legacy_quantization(folder: Path, content: dict[str, object]) -> dict[str, object]:
    """Adds the quantisation that older versions of ModelOpt describe in a file of its own."""
    legacy = read_json_object(folder / LEGACY_QUANTIZATION)
    if legacy is None:
        return content
    found = legacy.get("quantization")
    return content | {
        LEGACY_QUANTIZATION: {"quant_method": "modelopt", **found} if isinstance(found, dict) else found
    }
