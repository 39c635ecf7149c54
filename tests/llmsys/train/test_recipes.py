"""The shipped recipes say what their papers say, and can be built."""

import pytest
import torch

from llmsys.config.load import load_run_config
from llmsys.optim.lr_schedule import compute_learning_rate
from llmsys.train.build_engine import build_model

RECIPES = ("multi30k", "wmt14-base", "wmt14-big", "bert-small", "bert-small-classify")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_builds_and_learns_what_its_model_is_made_for(name: str) -> None:
    config = load_run_config(f"train/{name}", [])
    build_model(config)  # refuses a model of another size than the estimate's
    expected = {"b": "masked", "bert-small-classify": "classification"}
    assert config.objective.kind == expected.get(name, expected.get(name[0], "translation"))


def test_the_original_recipes_are_those_of_the_paper() -> None:
    base, big = load_run_config("train/wmt14-base", []), load_run_config("train/wmt14-big", [])
    assert (base.num_steps, big.num_steps) == (100_000, 300_000)
    assert (base.batch.tokens, base.loss.label_smoothing) == (25_000, 0.1)
    assert (base.checkpoint.average_last, big.checkpoint.average_last) == (5, 20)
    assert (base.generation.num_beams, base.generation.length_penalty) == (4, 0.6)
    assert compute_learning_rate(base, 4000) == pytest.approx(512**-0.5 * 4000**-0.5)
    assert compute_learning_rate(big, 4000) == pytest.approx(1024**-0.5 * 4000**-0.5)
    for config, heads, width, dropout in ((base, 8, 512, 0.1), (big, 16, 1024, 0.3)):
        model = config.model
        assert (model.num_attention_heads, model.hidden_size, model.intermediate_size) == (heads, width, 4 * width)
        assert (model.num_hidden_layers, model.encoder_model.num_hidden_layers) == (6, 6)
        assert model.dropout.residual == model.dropout.embedding == dropout
        assert torch.isclose(torch.tensor(model.embedding.initializer_range or 0), torch.tensor(width**-0.5), rtol=1e-2)
