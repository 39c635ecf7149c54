"""Parameters that a forward sees in another type stay float32 themselves, one object where two
modules share them.
"""

import torch

from llmsys.model.transformer import Transformer
from llmsys.parallel.mixed_precision import cast_parameters
from tests.helpers.tiny_training import build_tiny_config


def test_a_model_with_tied_embeddings_can_be_moved_after_its_parameters_are_cast() -> None:
    model = Transformer(build_tiny_config(tie_word_embeddings=True, moe=None))
    cast_parameters(model, torch.bfloat16)
    model.to("cpu")  # as accelerate does
    assert model.head is not None
    assert model.head.weight.dtype == torch.bfloat16
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert parameters["head.weight"] is parameters["embed.weight"]
    assert parameters["embed.weight"].dtype == torch.float32
    model.to_empty(device="cpu")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert parameters["head.weight"] is parameters["embed.weight"]
