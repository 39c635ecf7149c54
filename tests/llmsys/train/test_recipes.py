"""The shipped recipes say what their papers say, and can be built."""

import pytest
import torch

from llmsys.config.bitwise_constraints import list_micro_batch_counts, require_ranks
from llmsys.config.loading.load import load_run_config
from llmsys.optim.lr_schedule import compute_learning_rate
from llmsys.train.build_engine import build_model
from tests.helpers.paths import CONFIGS
from tools.bench.recipes import CHAT, LADDER, PREDICTED, RUNS

RECIPES = ("multi30k", "wmt14-base", "wmt14-big", "bert-small", "bert-small-classify")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_builds_and_learns_what_its_model_is_made_for(name: str) -> None:
    config = load_run_config(f"train/{name}", [])
    build_model(config)  # refuses a model of another size than the estimate's
    expected = {"b": "masked", "bert-small-classify": "classification"}
    assert config.objective.kind == expected.get(name, expected.get(name[0], "translation"))


def test_recipes_repeat_their_bits_on_one_process_and_on_two() -> None:
    folder = CONFIGS / "recipes"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    assert {run.recipe for run in RUNS} | {"base"} == set(names)
    for name in set(names) - {"base"}:
        config = load_run_config(f"recipes/{name}", [])
        assert (config.train.precision, config.train.reproducibility) == ("fp32", "bitwise"), name
        for ranks in (1, 2):
            require_ranks(
                ranks, list_micro_batch_counts(config.batch, windows=config.objective.uses_windows)
            )
        build_model(config)
    chat, dense = (load_run_config(f"recipes/{name}", []) for name in (CHAT, PREDICTED))
    assert (chat.train.init_from, chat.model) == (dense.run.folder, dense.model)
    assert chat.tokenizer.path == dense.data.folder / "tokenizer"


def test_learning_rates_of_the_ladder_follow_the_width() -> None:
    for name in (*LADDER, PREDICTED):
        config = load_run_config(f"recipes/{name}", [])
        rate, width = config.optimizer.learning_rate, config.model.hidden_size
        assert rate == pytest.approx(0.2 / width, rel=0.01), name
        assert rate * config.optimizer.embedding_lr_multiplier == pytest.approx(0.08, rel=0.01), (
            name
        )


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
        assert (model.num_attention_heads, model.hidden_size, model.intermediate_size) == (
            heads,
            width,
            4 * width,
        )
        assert (model.num_hidden_layers, model.encoder_model.num_hidden_layers) == (6, 6)
        assert model.dropout.residual == model.dropout.embedding == dropout
        assert torch.isclose(
            torch.tensor(model.embedding.initializer_range or 0),
            torch.tensor(width**-0.5),
            rtol=1e-2,
        )
