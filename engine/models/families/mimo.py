"""MiMo-7B: the decoder of Qwen2 and MTP layers, one in the published model, whose projection takes the hidden
state before the embedding."""

from __future__ import annotations

from dataclasses import replace

from headway.engine.models.config_keys import ResolvedConfig
from headway.engine.models.families import qwen2
from headway.engine.models.family import DECODER_NAMES, LAYER_NAMES, Family, WeightNames
from headway.engine.models.spec import ModelSpec, MtpSpec
from headway.engine.protocol.config import MIN_BLOCK_SIZE

# The carry of every layer but the last is kept at the end of each block, whose slots must reach there: see
# MtpHead.
MAX_MTP_LAYERS = MIN_BLOCK_SIZE
MTP_PREFIX = "model.mtp_layers."
MTP_NAMES = {
    "hidden_norm": "hidden_layernorm.weight",
    "token_norm": "token_layernorm.weight",
    "input.weight": "input_proj.weight",
    "final_norm": "final_layernorm.weight",
    **LAYER_NAMES,
}
NAMES = WeightNames(
    DECODER_NAMES | {f"mtp.{{}}.{path}": f"{MTP_PREFIX}{{}}.{name}" for path, name in MTP_NAMES.items()},
    MTP_PREFIX,
)


class MiMoKeys(qwen2.Qwen2Keys, frozen=True, kw_only=True):
    """The keys that the remote code of MiMo reads, which derives its configuration from Qwen2Config."""

    num_nextn_predict_layers: int | None = 0


def read(resolved: ResolvedConfig) -> ModelSpec:
    spec, keys = qwen2.read(resolved), resolved.keys
    assert isinstance(keys, MiMoKeys)
    if not 0 <= (keys.num_nextn_predict_layers or 0) <= MAX_MTP_LAYERS:
        raise resolved.error(
            f"num_nextn_predict_layers is {keys.num_nextn_predict_layers}; supported are 0 to {MAX_MTP_LAYERS}"
        )
    if not keys.num_nextn_predict_layers:
        return spec
    mtp = MtpSpec(
        keys.num_nextn_predict_layers, spec.layers[0], first="hidden", reads="pre_norm", carries="post_norm"
    )
    return replace(spec, draft_head=mtp)


FAMILY = Family(("MiMoForCausalLM",), "mimo", MiMoKeys, read, lambda spec: NAMES)
