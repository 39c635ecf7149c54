"""Layouts as their papers print them: name, model, layout, devices, and whether they multiply
out.
"""

from llmsys.config.model import ModelConfig


def build_gpt(hidden: int, layers: int, heads: int) -> ModelConfig:
    """A GPT of Megatron's tables."""
    return ModelConfig(
        vocab_size=51_200,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=2048,
    )


# Narayanan 2021 (arXiv:2104.04473), table 1; Megatron-LM's README (H100, 2024); Smith 2022
# (MT-NLG), 2.4.
MEGATRON = [
    ("sc21 1.7B", build_gpt(2304, 24, 24), "tp=1,pp=1,dp=32", 32),
    ("sc21 7.5B", build_gpt(4096, 36, 32), "tp=4,pp=1,dp=32", 128),
    ("sc21 39B", build_gpt(8192, 48, 64), "tp=8,pp=2,dp=32", 512),
    ("sc21 145B", build_gpt(12288, 80, 96), "tp=8,pp=8,dp=24", 1536),
    ("sc21 530B", build_gpt(20480, 105, 128), "tp=8,pp=35,dp=9", 2520),
    ("sc21 1T", build_gpt(25600, 128, 160), "tp=8,pp=64,dp=6", 3072),
    ("h100 16B", build_gpt(6144, 32, 48), "tp=4,pp=1,dp=48", 192),
    ("h100 70B", build_gpt(8192, 84, 64), "tp=8,pp=2,dp=48", 768),
    ("h100 177B", build_gpt(12288, 96, 96), "tp=8,pp=6,dp=48", 2304),
    ("h100 462B", build_gpt(18432, 112, 144), "tp=8,pp=16,dp=48", 6144),
    ("mt-nlg 280 nodes", build_gpt(20480, 105, 128), "tp=8,pp=35,dp=8", 2240),
    ("mt-nlg 420 nodes", build_gpt(20480, 105, 128), "tp=8,pp=35,dp=12", 3360),
]

PUBLISHED = [
    *((*row, True) for row in MEGATRON),
    ("llama3 8k", "llama3.1-405b", "tp=8,cp=1,pp=16,dp=64", 8192, True),
    ("llama3 8k, 16,384", "llama3.1-405b", "tp=8,cp=1,pp=16,dp=128", 16384, True),
    ("llama3 128k", "llama3.1-405b", "tp=8,cp=16,pp=16,dp=8", 16384, True),
    ("llama3 128k as misprinted", "llama3.1-405b", "tp=8,cp=16,pp=16,dp=4", 16384, False),
    ("deepseek-v3", "deepseek-v3", "pp=16,ep=64,dp=128", 2048, True),
    ("deepseek-v2", "deepseek-v2", "pp=16,ep=8,dp=8", 128, True),
    ("mixtral", "mixtral-8x7b", "tp=2,pp=4,ep=4,dp=16", 128, True),
    ("experts that do not divide", "mixtral-8x7b", "ep=3,dp=24", 24, False),
]
