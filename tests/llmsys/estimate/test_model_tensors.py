"""The rows of the estimate are the parameters of the built module, name by name and shape by
shape.
"""

from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.model.transformer import Transformer
from tests.helpers.model_sections import SHAPE, VARIANTS
from tests.helpers.tensor_names import list_parameter_names


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_tensor_is_one_of_the_built_module(changes: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(SHAPE | changes)
    with torch.device("meta"):
        built = {
            name: tuple(parameter.shape)
            for name, parameter in Transformer(config).named_parameters()
        }
    assert {
        name: row.shape for row in list_model_tensors(config) for name in list_parameter_names(row)
    } == built
