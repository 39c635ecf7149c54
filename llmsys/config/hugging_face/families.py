"""The model types that are understood, each with its way in and its way out."""

from collections.abc import Callable
from typing import NamedTuple

from llmsys.config.hugging_face import experts, llama
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
    "mixtral": Family("MixtralForCausalLM", experts.read_mixtral, experts.write_mixtral),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", experts.read_qwen2_moe, experts.write_qwen2_moe),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", experts.read_qwen3_moe, experts.write_qwen3_moe),
    "olmoe": Family("OlmoeForCausalLM", experts.read_olmoe, experts.write_olmoe),
    "phimoe": Family("PhimoeForCausalLM", experts.read_phimoe, experts.write_phimoe),
    "gpt_oss": Family("GptOssForCausalLM", experts.read_gpt_oss, experts.write_gpt_oss),
}
