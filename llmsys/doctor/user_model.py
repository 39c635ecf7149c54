"""Parity of a user's model: the model with its dropout off, on the doctor's own rows.

Invariants:
- Only dropout changes: ranks draw other random numbers than one process does.
- A model that does not fit into this machine's memory is rejected before a process starts.
"""

from typing import assert_never

from llmsys.config.head import (
    ClassificationHeadConfig,
    DropoutConfig,
    FeaturesHeadConfig,
    LmHeadConfig,
    MlmHeadConfig,
    PermutationHeadConfig,
)
from llmsys.config.model import ModelConfig
from llmsys.doctor.parity_models import ParityModel
from llmsys.errors import ConfigError
from llmsys.estimate.parameter_count import count_parameters
from llmsys.train.auto_micro_batch import get_free_memory

REFERENCE_COPIES, RANK_COPIES = 6, 17
"""fp32 copies of all weights. The reference run: weights, gradients, two moments, start, first gradients. A rank: its
state (5, one a copy in 16 bits), the reference trajectory and its own (5 each), and the changes of both (2).
"""

FP32_BYTES = 4


def build_parity_model(model: ModelConfig, name: str) -> ParityModel:
    """Build the parity model of a user's model, with dropout off.

    Args:
        model: the model config.
        name: name of the case in the table.

    Returns:
        The parity model, without expert bias.

    Raises:
        ConfigError: the model has no head that learns, or too small a vocabulary.
    """
    match model.head:
        case FeaturesHeadConfig():
            raise ConfigError(
                f"model.head.kind=features of {name} has no loss, but parity compares training. Use "
                "model.head.kind=lm, mlm or classification."
            )
        case LmHeadConfig() | MlmHeadConfig() | ClassificationHeadConfig() | PermutationHeadConfig():
            pass
        case unreachable:
            assert_never(unreachable)
    if model.vocab_size < 4:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} of {name} is too small for rows of parity. Use model.vocab_size=4."
        )
    return ParityModel(name, model.model_copy(update={"dropout": DropoutConfig()}))


def require_memory(model: ModelConfig, ranks: int) -> None:
    """Check that parity of a model fits into the free memory of this machine.

    Args:
        model: the model config.
        ranks: number of processes.

    Raises:
        ConfigError: it takes more memory than is free.
    """
    parameters = count_parameters(model).total
    needed = parameters * FP32_BYTES * (REFERENCE_COPIES + RANK_COPIES * ranks)
    if needed > (free := get_free_memory()):
        raise ConfigError(
            f"Parity of {parameters:,} parameters on {ranks} processes takes about {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free. Use fewer --processes, or a smaller model of the same kind: override "
            f"model.num_hidden_layers, model.hidden_size or model.moe.num_experts."
        )
