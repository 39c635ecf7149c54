"""Convert the text of a config.json to the values of a ModelConfig.

`FAMILIES` is the registry of the supported model types, with their readers and writers.

Invariants:
- Every key is converted, known to be harmless, restricted to supported values, or an error.
- A ConfigError names the file and every wrong key.
"""

import difflib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llmsys.errors import ConfigError
from llmsys.hugging_face import dbrx, deepseek, encoder, gpt, llama, moe, seq2seq, vision
from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.defaults import DEFAULTS
from llmsys.hugging_face.shared_fields import Values


class ModelType(NamedTuple):
    """One model type: its usual class, and the conversions between config.json and ModelConfig
    values.
    """

    architecture: str
    read: Callable[[ConfigJsonReader], Values]
    write: Callable[[Values], Values]


# In the order in which a model is tried, so that the simplest type that can express it is written.
FAMILIES: dict[str, ModelType] = {
    "llama": ModelType("LlamaForCausalLM", llama.read_llama, llama.write_llama),
    "mistral": ModelType("MistralForCausalLM", llama.read_mistral, llama.write_mistral),
    "qwen2": ModelType("Qwen2ForCausalLM", llama.read_qwen2, llama.write_qwen2),
    "qwen3": ModelType("Qwen3ForCausalLM", llama.read_qwen3, llama.write_qwen3),
    "smollm3": ModelType("SmolLM3ForCausalLM", llama.read_smollm3, llama.write_smollm3),
    "olmo2": ModelType("Olmo2ForCausalLM", llama.read_olmo2, llama.write_olmo2),
    "gemma2": ModelType("Gemma2ForCausalLM", llama.read_gemma2, llama.write_gemma2),
    "gemma3_text": ModelType("Gemma3ForCausalLM", llama.read_gemma3, llama.write_gemma3),
    "mixtral": ModelType("MixtralForCausalLM", moe.read_mixtral, moe.write_mixtral),
    "qwen2_moe": ModelType("Qwen2MoeForCausalLM", moe.read_qwen2_moe, moe.write_qwen2_moe),
    "qwen3_moe": ModelType("Qwen3MoeForCausalLM", moe.read_qwen3_moe, moe.write_qwen3_moe),
    "olmoe": ModelType("OlmoeForCausalLM", moe.read_olmoe, moe.write_olmoe),
    "phimoe": ModelType("PhimoeForCausalLM", moe.read_phimoe, moe.write_phimoe),
    "gpt_oss": ModelType("GptOssForCausalLM", moe.read_gpt_oss, moe.write_gpt_oss),
    "dbrx": ModelType("DbrxForCausalLM", dbrx.read_dbrx, dbrx.write_dbrx),
    "deepseek_v2": ModelType(
        "DeepseekV2ForCausalLM", deepseek.read_deepseek_v2, deepseek.write_deepseek_v2
    ),
    "deepseek_v3": ModelType(
        "DeepseekV3ForCausalLM", deepseek.read_deepseek_v3, deepseek.write_deepseek_v3
    ),
    "glm4_moe": ModelType("Glm4MoeForCausalLM", deepseek.read_glm4_moe, deepseek.write_glm4_moe),
    "gpt2": ModelType("GPT2LMHeadModel", gpt.read_gpt2, gpt.write_gpt2),
    "gpt_neox": ModelType("GPTNeoXForCausalLM", gpt.read_gpt_neox, gpt.write_gpt_neox),
    "opt": ModelType("OPTForCausalLM", gpt.read_opt, gpt.write_opt),
    "bloom": ModelType("BloomForCausalLM", gpt.read_bloom, gpt.write_bloom),
    "falcon": ModelType("FalconForCausalLM", gpt.read_falcon, gpt.write_falcon),
    "bert": ModelType("BertForMaskedLM", encoder.read_bert, encoder.write_bert),
    "roberta": ModelType("RobertaForMaskedLM", encoder.read_roberta, encoder.write_roberta),
    "xlnet": ModelType("XLNetLMHeadModel", encoder.read_xlnet, encoder.write_xlnet),
    "vit": ModelType("ViTForImageClassification", vision.read_vit, vision.write_vit),
    "t5": ModelType("T5ForConditionalGeneration", seq2seq.read_t5, seq2seq.write_t5),
    "bart": ModelType("BartForConditionalGeneration", seq2seq.read_bart, seq2seq.write_bart),
    "marian": ModelType("MarianMTModel", seq2seq.read_marian, seq2seq.write_marian),
}

# Model types that `llmsys estimate` counts (llmsys/estimate/counted/) and nothing else reads.
COUNTED_TYPES = frozenset(
    (
        *(
            "cohere",
            "cohere2",
            "gemma",
            "granite",
            "jamba",
            "mamba",
            "mamba2",
            "ministral",
            "ministral3",
            "mt5",
        ),
        *("nemotron_h", "olmo3", "phi3", "qwen3_next", "starcoder2"),
    )
)
# Model types whose config.json is another type's, under a name of its own.
ALIASES = {"kimi_k2": "deepseek_v3"}


def read_model_values(values: dict[str, Any], source: str = "config.json") -> dict[str, Any]:
    """Convert a config.json to the values of the equivalent `model:` section.

    `num_nextn_predict_layers` is ignored, because Hugging Face's classes do not build that module.
    Set `multi_token_prediction: {depth: 1}` to build it.

    Args:
        values: the parsed config.json.
        source: name of the file in error messages.

    Returns:
        Values for ModelConfig, not yet validated.

    Raises:
        ConfigError: the model type or a key is not supported.
    """
    name = _require_model_type(values, source, list(FAMILIES))
    name = ALIASES.get(name, name)
    fields = ConfigJsonReader(values, DEFAULTS[name])
    read = FAMILIES[name].read(fields)
    fields.raise_violations(source)
    return read


def parse_json(text: str, source: str) -> dict[str, Any]:
    """Parse a JSON text that holds one mapping.

    Args:
        text: the JSON text.
        source: name of the file in error messages.

    Returns:
        The mapping.

    Raises:
        ConfigError: the text is not JSON, has a duplicate key, or is not a mapping.
    """

    def build_mapping(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        for i, (key, _) in enumerate(entries):
            if any(key == other for other, _ in entries[:i]):
                raise ConfigError(f"{source}: {key} is given twice. Keep one of them.")
        return dict(entries)

    try:
        values = json.loads(text, object_pairs_hook=build_mapping)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}:{error.lineno}: not JSON: {error.msg}. Correct column {error.colno}."
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{source}: not JSON: nested too deeply. Give the config.json of a model."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source} holds a {type(values).__name__}, not a mapping. Give the config.json of a "
            "model."
        )
    return values


def _require_model_type(values: dict[str, Any], source: str, model_types: Sequence[str]) -> str:
    name = values.get("model_type")
    known = ", ".join(sorted(model_types))
    if isinstance(name, str) and ALIASES.get(name, name) in model_types:
        return name
    if isinstance(name, str) and name in COUNTED_TYPES:
        raise ConfigError(
            f"{source}: model_type: {name!r} can be counted and not built: use llmsys estimate. "
            f"Known: {known}."
        )
    for inner in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(values.get(inner), dict):
            raise ConfigError(
                f"{source}: model_type: {name!r} has its language model under {inner}, with other "
                "parts that are not supported. Save that mapping as a separate config.json."
            )
    if name is None:
        raise ConfigError(f"{source}: model_type: is missing. Give one of {known}.")
    close = difflib.get_close_matches(str(name), model_types, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"{source}: model_type: {name!r} is not supported.{hint} Known: {known}.")
