"""A model of the user's as a subject of parity.

Reads a model config; gives a subject that learns what the model is made for from the doctor's own rows. Invariants:

- Nothing of the model changes but its dropout, which is off: ranks draw other numbers than one process does.
- What this machine cannot hold is refused before a process starts.
"""

from llmsys.config.head import DropoutConfig
from llmsys.config.model import ModelConfig
from llmsys.doctor.parity_models import ParityModel
from llmsys.errors import ConfigError
from llmsys.estimate.parameter_count import count_parameters
from llmsys.train.auto_micro_batch import get_free_memory

REFERENCE_COPIES, RANK_COPIES = 6, 17
"""fp32 copies of all weights. The oracle: weights, gradients, two moments, start, first gradients. A rank: its state
(5, one a copy in 16 bits), the oracle's trajectory and its own (5 each), and what both moved by (2)."""

FP32_BYTES = 4


def build_parity_model(model: ModelConfig, name: str) -> ParityModel:
    """Return the subject of a model, with dropout off.

    Raises:
        ConfigError: the model has no head that learns, or too small a vocabulary.
    """
    if model.head.kind == "features":
        raise ConfigError(
            f"model.head.kind=features of {name} learns nothing, and parity compares training. "
            f"Use model.head.kind=lm, mlm or classification."
        )
    if model.vocab_size < 4:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} of {name} is too small for rows of parity. Use model.vocab_size=4."
        )
    return ParityModel(name, model.model_copy(update={"dropout": DropoutConfig()}))


def require_memory(model: ModelConfig, ranks: int) -> None:
    """Raise ConfigError when parity of a model on so many processes takes more memory than this machine has free."""
    parameters = count_parameters(model).total
    needed = parameters * FP32_BYTES * (REFERENCE_COPIES + RANK_COPIES * ranks)
    if needed > (free := get_free_memory()):
        raise ConfigError(
            f"Parity of {parameters:,} parameters on {ranks} processes takes about {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free. Use fewer --processes, or a smaller model of the same kind: override "
            f"model.num_hidden_layers, model.hidden_size or model.moe.num_experts."
        )
