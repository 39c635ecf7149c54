"""Which table a Hugging Face `model_type` uses."""

from collections.abc import Callable

from llmsys.config.model import ModelConfig
from llmsys.convert import decoders, encoders, fused_decoders
from llmsys.convert.rule import FamilyMapping
from llmsys.errors import ConfigError

TABLES: dict[str, FamilyMapping | Callable[[ModelConfig], FamilyMapping]] = {
    "gpt2": fused_decoders.GPT2,
    "gpt_neox": fused_decoders.GPT_NEOX,
    "bloom": fused_decoders.BLOOM,
    "falcon": fused_decoders.build_falcon_mapping,
    "dbrx": fused_decoders.DBRX,
    "opt": fused_decoders.OPT,
    "llama": decoders.LLAMA,
    "mistral": decoders.LLAMA,
    "qwen2": decoders.LLAMA,
    "qwen3": decoders.LLAMA,
    "smollm3": decoders.LLAMA,
    "gemma2": decoders.GEMMA,
    "gemma3_text": decoders.GEMMA,
    "olmo2": decoders.OLMO2,
    "mixtral": decoders.MIXTRAL,
    "phimoe": decoders.MIXTRAL,
    "gpt_oss": decoders.GPT_OSS,
    "qwen2_moe": decoders.QWEN_MOE,
    "qwen3_moe": decoders.QWEN_MOE,
    "olmoe": decoders.QWEN_MOE,
    "deepseek_v2": decoders.DEEPSEEK_V2,
    "deepseek_v3": decoders.DEEPSEEK,
    "glm4_moe": decoders.DEEPSEEK,
    "bert": encoders.build_bert_mapping,
    "roberta": encoders.build_roberta_mapping,
    "t5": encoders.build_t5_mapping,
    "marian": encoders.build_bart_mapping,
    "bart": encoders.build_bart_mapping,
}


def get_family_mapping(model_type: str, model: ModelConfig) -> FamilyMapping:
    """The table of a family.

    Raises ConfigError for one without.
    """
    if model_type not in TABLES:
        known = ", ".join(sorted(TABLES))
        raise ConfigError(f"weights of model_type {model_type!r} cannot be converted. Known families: {known}.")
    found = TABLES[model_type]
    return found if isinstance(found, FamilyMapping) else found(model)
