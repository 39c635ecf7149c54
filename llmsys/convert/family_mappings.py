"""Choose the name mapping of a Hugging Face `model_type`."""

from collections.abc import Callable

from llmsys.config.model import ModelConfig
from llmsys.convert import decoder_mappings, encoder_mappings, hybrid_mappings
from llmsys.convert.name_mapping import FamilyMapping
from llmsys.errors import ConfigError

TABLES: dict[str, FamilyMapping | Callable[[ModelConfig], FamilyMapping]] = {
    "gpt2": decoder_mappings.GPT2,
    "gpt_neox": decoder_mappings.GPT_NEOX,
    "bloom": decoder_mappings.BLOOM,
    "falcon": decoder_mappings.build_falcon_mapping,
    "dbrx": decoder_mappings.DBRX,
    "opt": decoder_mappings.OPT,
    "llama": decoder_mappings.LLAMA,
    "mistral": decoder_mappings.LLAMA,
    "qwen2": decoder_mappings.LLAMA,
    "qwen3": decoder_mappings.LLAMA,
    "smollm3": decoder_mappings.LLAMA,
    "gemma": decoder_mappings.LLAMA,
    "gemma2": decoder_mappings.GEMMA,
    "gemma3_text": decoder_mappings.GEMMA,
    "olmo2": decoder_mappings.OLMO2,
    "olmo3": decoder_mappings.OLMO2,
    "ministral": decoder_mappings.LLAMA,
    "starcoder2": decoder_mappings.STARCODER2,
    "cohere2": decoder_mappings.COHERE2,
    "mixtral": decoder_mappings.MIXTRAL,
    "phimoe": decoder_mappings.MIXTRAL,
    "gpt_oss": decoder_mappings.GPT_OSS,
    "qwen2_moe": decoder_mappings.QWEN_MOE,
    "qwen3_moe": decoder_mappings.QWEN_MOE,
    "granite": decoder_mappings.LLAMA,
    "granitemoe": decoder_mappings.GRANITE_MOE,
    "granitemoehybrid": hybrid_mappings.build_granite_hybrid_mapping,
    "kimi_linear": hybrid_mappings.build_kimi_linear_mapping,
    "falcon_h1": hybrid_mappings.FALCON_H1,
    "nemotron_h": hybrid_mappings.build_nemotron_h_mapping,
    "mamba2": hybrid_mappings.build_mamba2_mapping,
    "olmo_hybrid": hybrid_mappings.build_olmo_hybrid_mapping,
    "bamba": hybrid_mappings.build_bamba_mapping,
    "qwen3_5_text": hybrid_mappings.build_qwen3_5_mapping,
    "qwen3_5_moe_text": hybrid_mappings.build_qwen3_5_mapping,
    "qwen3_next": hybrid_mappings.build_qwen3_next_mapping,
    "olmoe": decoder_mappings.QWEN_MOE,
    "deepseek_v2": decoder_mappings.DEEPSEEK_V2,
    "deepseek_v3": decoder_mappings.DEEPSEEK,
    "deepseek_v32": decoder_mappings.DEEPSEEK,
    "glm_moe_dsa": decoder_mappings.DEEPSEEK,
    "glm4_moe": decoder_mappings.DEEPSEEK,
    "arcee": decoder_mappings.LLAMA,
    "seed_oss": decoder_mappings.LLAMA,
    "exaone4": decoder_mappings.OLMO2,
    "dots1": decoder_mappings.DEEPSEEK,
    "minimax_m2": decoder_mappings.MINIMAX_M2,
    "glm": decoder_mappings.GLM,
    "glm4": decoder_mappings.GLM4,
    "mpt": decoder_mappings.MPT,
    "ernie4_5": decoder_mappings.LLAMA,
    "ernie4_5_moe": decoder_mappings.ERNIE_MOE,
    "bert": encoder_mappings.build_bert_mapping,
    "roberta": encoder_mappings.build_roberta_mapping,
    "roformer": encoder_mappings.build_roformer_mapping,
    "vit": encoder_mappings.build_vit_mapping,
    "t5": encoder_mappings.build_t5_mapping,
    "marian": encoder_mappings.build_bart_mapping,
    "bart": encoder_mappings.build_bart_mapping,
}


def get_family_mapping(model_type: str, model: ModelConfig) -> FamilyMapping:
    """Return the mapping of a family.

    Raises ConfigError for a family without one.
    """
    if model_type not in TABLES:
        known = ", ".join(sorted(TABLES))
        raise ConfigError(
            f"weights of model_type {model_type!r} cannot be converted. Known model types: {known}."
        )
    found = TABLES[model_type]
    return found if isinstance(found, FamilyMapping) else found(model)
