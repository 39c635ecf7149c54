"""Starting values: one pure function from (configuration, parameter name, shape, seed) to a tensor.

No generator is shared between parameters, so the values do not depend on the order of creation, on the number of
processes or on how a parameter is sharded: a rank computes the whole tensor and keeps its slice.
"""

import math
from hashlib import blake2b

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.model.transformer import Transformer

# The last maps of the two residual branches; every block adds both to the stream.
RESIDUAL_OUTPUTS = ("attention.o_proj", "down_proj")


def initial_value(config: ModelConfig, name: str, shape: tuple[int, ...] | torch.Size, seed: int) -> Tensor:
    """The starting value of parameter `name` as float32 on the CPU.

    Norm weights are 1 and biases 0. Matrices are normal with standard deviation `initializer_range`, divided by
    sqrt(2 * num_hidden_layers) where they write into the residual stream (Radford 2019, GPT-2, section 2.3), so that
    the stream's variance at the top does not grow with depth.
    """
    layer, _, kind = name.rpartition(".")
    if kind == "bias":
        return torch.zeros(shape)
    if layer.endswith("norm"):
        return torch.ones(shape)
    deviation = config.initializer_range
    if (layer if kind == "weight" else name).endswith(RESIDUAL_OUTPUTS):
        deviation /= math.sqrt(2 * config.num_hidden_layers)
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    return torch.randn(shape, generator=generator).mul_(deviation)


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer of a model that lives whole in this process."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(model.config, name, parameter.shape, seed))
    model.reset_buffers()


def _seed_of(name: str, seed: int) -> int:
    # Python's hash() differs from process to process; blake2b does not.
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
