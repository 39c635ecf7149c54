"""Registry of the supported model types, with their readers and writers."""

from collections.abc import Callable
from typing import NamedTuple

from llmsys.config.hugging_face import dbrx, deepseek, encoder, falcon, gemma, gpt, llama, moe, seq2seq, t5
from llmsys.config.hugging_face.config_json import ConfigJsonReader
from llmsys.config.hugging_face.shared_fields import Values


class ModelType(NamedTuple):
    """One model type: its usual class, and the conversions between config.json and ModelConfig values."""

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
    "gemma2": ModelType("Gemma2ForCausalLM", gemma.read_gemma2, gemma.write_gemma2),
    "gemma3_text": ModelType("Gemma3ForCausalLM", gemma.read_gemma3, gemma.write_gemma3),
    "mixtral": ModelType("MixtralForCausalLM", moe.read_mixtral, moe.write_mixtral),
    "qwen2_moe": ModelType("Qwen2MoeForCausalLM", moe.read_qwen2_moe, moe.write_qwen2_moe),
    "qwen3_moe": ModelType("Qwen3MoeForCausalLM", moe.read_qwen3_moe, moe.write_qwen3_moe),
    "olmoe": ModelType("OlmoeForCausalLM", moe.read_olmoe, moe.write_olmoe),
    "phimoe": ModelType("PhimoeForCausalLM", moe.read_phimoe, moe.write_phimoe),
    "gpt_oss": ModelType("GptOssForCausalLM", moe.read_gpt_oss, moe.write_gpt_oss),
    "dbrx": ModelType("DbrxForCausalLM", dbrx.read_dbrx, dbrx.write_dbrx),
    "deepseek_v2": ModelType("DeepseekV2ForCausalLM", deepseek.read_deepseek_v2, deepseek.write_deepseek_v2),
    "deepseek_v3": ModelType("DeepseekV3ForCausalLM", deepseek.read_deepseek_v3, deepseek.write_deepseek_v3),
    "glm4_moe": ModelType("Glm4MoeForCausalLM", deepseek.read_glm4_moe, deepseek.write_glm4_moe),
    "gpt2": ModelType("GPT2LMHeadModel", gpt.read_gpt2, gpt.write_gpt2),
    "gpt_neox": ModelType("GPTNeoXForCausalLM", gpt.read_gpt_neox, gpt.write_gpt_neox),
    "opt": ModelType("OPTForCausalLM", gpt.read_opt, gpt.write_opt),
    "bloom": ModelType("BloomForCausalLM", falcon.read_bloom, falcon.write_bloom),
    "falcon": ModelType("FalconForCausalLM", falcon.read_falcon, falcon.write_falcon),
    "bert": ModelType("BertForMaskedLM", encoder.read_bert, encoder.write_bert),
    "roberta": ModelType("RobertaForMaskedLM", encoder.read_roberta, encoder.write_roberta),
    "xlnet": ModelType("XLNetLMHeadModel", encoder.read_xlnet, encoder.write_xlnet),
    "t5": ModelType("T5ForConditionalGeneration", t5.read_t5, t5.write_t5),
    "bart": ModelType("BartForConditionalGeneration", seq2seq.read_bart, seq2seq.write_bart),
    "marian": ModelType("MarianMTModel", seq2seq.read_marian, seq2seq.write_marian),
}
