"""The model types that are understood, each with its way in and its way out."""

from collections.abc import Callable
from typing import NamedTuple

from llmsys.config.hugging_face import dbrx, deepseek, encoder, experts, falcon, gemma, gpt, llama, seq2seq, t5
from llmsys.config.hugging_face.fields import Fields
from llmsys.config.hugging_face.parts import Values


class Family(NamedTuple):
    """One model type: its usual class, and the functions between its config.json and the values of a ModelConfig."""

    architecture: str
    read: Callable[[Fields], Values]
    write: Callable[[Values], Values]


# In the order in which a model is tried: the plainest type that can say it comes first.
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", llama.read_llama, llama.write_llama),
    "mistral": Family("MistralForCausalLM", llama.read_mistral, llama.write_mistral),
    "qwen2": Family("Qwen2ForCausalLM", llama.read_qwen2, llama.write_qwen2),
    "qwen3": Family("Qwen3ForCausalLM", llama.read_qwen3, llama.write_qwen3),
    "smollm3": Family("SmolLM3ForCausalLM", llama.read_smollm3, llama.write_smollm3),
    "olmo2": Family("Olmo2ForCausalLM", llama.read_olmo2, llama.write_olmo2),
    "gemma2": Family("Gemma2ForCausalLM", gemma.read_gemma2, gemma.write_gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma.read_gemma3, gemma.write_gemma3),
    "mixtral": Family("MixtralForCausalLM", experts.read_mixtral, experts.write_mixtral),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", experts.read_qwen2_moe, experts.write_qwen2_moe),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", experts.read_qwen3_moe, experts.write_qwen3_moe),
    "olmoe": Family("OlmoeForCausalLM", experts.read_olmoe, experts.write_olmoe),
    "phimoe": Family("PhimoeForCausalLM", experts.read_phimoe, experts.write_phimoe),
    "gpt_oss": Family("GptOssForCausalLM", experts.read_gpt_oss, experts.write_gpt_oss),
    "dbrx": Family("DbrxForCausalLM", dbrx.read_dbrx, dbrx.write_dbrx),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", deepseek.read_deepseek_v2, deepseek.write_deepseek_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", deepseek.read_deepseek_v3, deepseek.write_deepseek_v3),
    "glm4_moe": Family("Glm4MoeForCausalLM", deepseek.read_glm4_moe, deepseek.write_glm4_moe),
    "gpt2": Family("GPT2LMHeadModel", gpt.read_gpt2, gpt.write_gpt2),
    "gpt_neox": Family("GPTNeoXForCausalLM", gpt.read_gpt_neox, gpt.write_gpt_neox),
    "opt": Family("OPTForCausalLM", gpt.read_opt, gpt.write_opt),
    "bloom": Family("BloomForCausalLM", falcon.read_bloom, falcon.write_bloom),
    "falcon": Family("FalconForCausalLM", falcon.read_falcon, falcon.write_falcon),
    "bert": Family("BertForMaskedLM", encoder.read_bert, encoder.write_bert),
    "roberta": Family("RobertaForMaskedLM", encoder.read_roberta, encoder.write_roberta),
    "xlnet": Family("XLNetLMHeadModel", encoder.read_xlnet, encoder.write_xlnet),
    "t5": Family("T5ForConditionalGeneration", t5.read_t5, t5.write_t5),
    "bart": Family("BartForConditionalGeneration", seq2seq.read_bart, seq2seq.write_bart),
    "marian": Family("MarianMTModel", seq2seq.read_marian, seq2seq.write_marian),
}
