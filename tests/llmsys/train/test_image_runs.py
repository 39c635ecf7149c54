"""Steps and evaluation of a run on images, in one process; test_objective_parity.py trains under
every engine.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.run import RunConfig
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import ConfigError
from llmsys.model.transformer import Transformer
from llmsys.train.build_objective import build_evaluator, build_step_batches
from tests.helpers.config_variants import LABELS, MODEL, VIT
from tests.helpers.tiny_images import write_images


def build_run(tmp_path: Path, **changes: Any) -> RunConfig:
    write_images(tmp_path / "images.npz")
    data = {
        "kind": "images", "folder": tmp_path / "data", "executor": {"kind": "inline"},
        "image_size": 8,
        "inputs": [tmp_path / "images.npz"], "heldout_inputs": [tmp_path / "images.npz"],
        "num_channels": 1,
    }  # fmt: skip
    settings = {
        "data": data,
        "tokenizer": {"kind": "none"},
        "model": MODEL | VIT | {"head": LABELS},
    }
    return RunConfig.model_validate(
        settings | {"batch": {"sequence_length": 5, "tokens": 20}} | changes
    )


def test_an_epoch_has_every_image_once_and_all_held_out_ones_are_evaluated(tmp_path: Path) -> None:
    config = build_run(tmp_path)
    prepare_dataset(config)
    steps, seen = build_step_batches(config, 1, 0), []
    for step in range(3):
        for batch in steps.get_micro_batches(step):
            seen += batch.tokens_BT.flatten(1).tolist()
            assert batch.num_tokens == 5 * len(batch.tokens_BT)
    assert len({tuple(values) for values in seen}) == len(seen) == 12
    assert steps.get_packing_stats()["tokens_per_epoch"] == 12 * 5 + 12  # positions and labels
    model = Transformer(config.model).eval()
    result = build_evaluator(config).evaluate(
        lambda batch: model(**batch.to_model_inputs()), torch.device("cpu")
    )
    assert result.to_dict()["evaluated_targets"] == 12


def test_labels_and_sizes_that_differ_from_the_dataset_are_rejected(tmp_path: Path) -> None:
    prepare_dataset(build_run(tmp_path))
    labels = build_run(tmp_path, model=MODEL | VIT | {"head": LABELS | {"num_labels": 4}})
    with pytest.raises(
        ConfigError, match=r"model.head.num_labels=4, and .* has 3 labels \(2, 7, 10\)"
    ):
        build_step_batches(labels, 1, 0)
    model = MODEL | VIT | {"head": LABELS}
    larger = build_run(tmp_path, model=model)
    data = larger.data.model_copy(update={"image_size": 12})
    with pytest.raises(ConfigError, match=r"are 144 values, but image 0 of .* has 64"):
        build_step_batches(larger.model_copy(update={"data": data}), 1, 0)
