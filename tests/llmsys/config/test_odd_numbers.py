"""Values that pydantic would take for numbers."""

import pytest
from pydantic import ValidationError

from llmsys.config.batch import BatchConfig
from llmsys.config.optimizer import AdamWConfig
from llmsys.config.train import TrackingConfig
from llmsys.estimate.json_output import RunSize


def test_true_is_no_number_and_a_switch_stays_one() -> None:
    with pytest.raises(ValidationError, match="True is not a number"):
        AdamWConfig.model_validate({"learning_rate": True})
    with pytest.raises(ValidationError, match="False is not a number"):
        BatchConfig.model_validate({"micro_sequences": False})
    assert TrackingConfig.model_validate({"wandb": True}).wandb


def test_a_number_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ValidationError, match="the maximum has 18 digits"):
        BatchConfig.model_validate({"sequences": 2**63})


def test_computed_numbers_have_as_many_bits_as_they_need() -> None:
    size = RunSize(tokens=1, steps=1, flops=2**73, tokens_per_parameter=1.0)
    assert size.flops == 2**73
