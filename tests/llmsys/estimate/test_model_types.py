"""Parameters and operations equal what transformers' own classes have and what PyTorch counts on
them.
"""

import json
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.loading.load import build_model_config
from llmsys.config.model import ModelConfig
from llmsys.estimate.flops import count_flops
from llmsys.estimate.model_tensors import count_parameters
from tests.helpers.hugging_face_families import FAMILIES

SEQUENCES, LENGTH, TARGET = 2, 7, 5
OUTPUTS = (
    "logits",
    "prediction_logits",
    "seq_relationship_logits",
    "last_hidden_state",
    "pooler_output",
)


def oracle(name: str) -> tuple[Any, ModelConfig]:
    """The class of transformers with random weights, and our config read from its config.json."""
    kind, architecture, values = FAMILIES[name]
    config = transformers.AutoConfig.for_model(kind, **values)
    config.architectures = [architecture]
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # grouped products are not counted
    model = getattr(transformers, architecture)(config).eval()
    return model, build_model_config(json.loads(config.to_json_string(use_diff=False)))


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    if model.config.model_type == "vit":
        return {
            "pixel_values": torch.zeros(
                SEQUENCES, 3, model.config.image_size, model.config.image_size
            )
        }
    tokens = torch.full((SEQUENCES, LENGTH), 5)
    if not model.config.is_encoder_decoder:
        return {"input_ids": tokens}
    return {"input_ids": tokens, "decoder_input_ids": tokens[:, :TARGET]}


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_equal_those_of_the_class(name: str) -> None:
    model, config = oracle(name)
    # Marian keeps its sinusoids as a parameter that is never trained.
    assert count_parameters(config).total == sum(
        one.numel() for one in model.parameters() if one.requires_grad
    )


# Their classes multiply the empty state of the first chunk too, and queries with keys once for each
# value head; an indexer does not learn there. test_flops.py counts our modules.
COUNTED_OTHERWISE = {
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "kimi_linear",
    "kimi_linear with query rank",
    "bamba",
    "granitemoehybrid",
    "deepseek_v32",
    "glm_moe_dsa",
    "falcon_h1",
    "olmo_hybrid",
    "nemotron_h",
    "mamba2",
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in COUNTED_OTHERWISE])
def test_operations_equal_those_that_torch_counts(name: str) -> None:
    model, config = oracle(name)
    with FlopCounterMode(display=False) as counter:
        outputs = model(**inputs_of(model))
        forward = counter.get_total_flops()
        sum(value.sum() for key, value in outputs.items() if key in OUTPUTS).backward()
    length = LENGTH if config.patches is None else config.max_position_embeddings
    ours = count_flops(config, length, SEQUENCES, "full", target_length=TARGET)
    assert (ours.forward, ours.forward_backward) == (forward, counter.get_total_flops())
