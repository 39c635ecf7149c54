"""Patches in front of an encoder: pooling, other image sizes, and what is rejected.

test_matches_transformers.py compares the model and its gradients with Hugging Face's ViT.
"""

from typing import Any

import pytest
import torch

from llmsys.config.loading.load import load_model_config
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.model_tensors import count_parameters
from llmsys.model.output_head import pool_positions
from llmsys.model.transformer import Transformer

VIT: dict[str, Any] = {
    "family": "encoder", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 5, "position": {"kind": "learned"},
    "head": {"kind": "classification", "num_labels": 3, "pooling": "first"},
    "patches": {"image_size": 8, "patch_size": 4, "num_channels": 1},
}  # fmt: skip
NONE: dict[str, Any] = {"kind": "none"}
IMAGES: dict[str, Any] = {"kind": "images", "image_size": 8, "num_channels": 1}


def test_the_mean_leaves_padding_out() -> None:
    x_BTD = torch.arange(12.0).view(2, 3, 2)
    assert pool_positions(x_BTD, "first", None).tolist() == [[0, 1], [6, 7]]
    assert pool_positions(x_BTD, "mean", None).tolist() == [[2, 3], [8, 9]]
    real_BT = torch.tensor([[True, True, False], [False, False, False]])
    assert pool_positions(x_BTD, "mean", real_BT).tolist() == [[1, 2], [0, 0]]


def test_features_of_an_image_have_all_positions() -> None:
    model = Transformer(ModelConfig.model_validate(VIT | {"head": {"kind": "features"}}))
    assert model(torch.zeros(2, 4, 16, dtype=torch.uint8)).shape == (2, 5, 16)


def test_patches_that_are_no_square_are_rejected() -> None:
    model = Transformer(ModelConfig.model_validate(VIT))
    assert model(torch.zeros(2, 9, 16, dtype=torch.uint8)).shape == (2, 3)
    with pytest.raises(ConfigError, match="6 patches are not a square, and images must be"):
        model(torch.zeros(2, 6, 16, dtype=torch.uint8))


def test_vit_base_has_its_published_parameters() -> None:
    # google/vit-base-patch16-224: 86.6M with the classifier of ImageNet.
    assert count_parameters(load_model_config("model/vit-base-16")).total == 86_567_656


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": {"kind": "mlm"}}, "images need family=encoder with head=classification or "
        "features"),
        ({"vocab_size": 300}, "300 is not the 256 values of a byte. Use 256"),
        ({"max_position_embeddings": 4}, "4 is not the 5 positions of patches.image_size=8. Use 5"),
        ({"position": {"kind": "learned", "offset": 2}}, "2 rows would have no patch. Use 0"),
        ({"patches": {"image_size": 9, "patch_size": 4}}, "9 pixels are not a whole number of "
        "patches of 4"),
        ({"patches": {"image_size": 8, "patch_size": 4, "mean": [0.1, 0.2]}},
            "2 values for 3 channels. Give one"),
        ({"patches": {"image_size": 8, "patch_size": 4, "std": [0.0]}}, "0.0 is no deviation. Use "
        "more than 0"),
    ],
)  # fmt: skip
def test_models_that_fit_no_image_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(VIT | changes)


AUGMENTED = {"kind": "classification", "augmentation": {"flip": 0.5}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": {"sequence_length": 4}}, "4 is not the 5 positions of data.image_size=8. Use 5"),
        ({"data": IMAGES | {"num_channels": 3}}, "1 differs from data.num_channels=3. Use 3"),
        ({"data": IMAGES | {"image_size": 10}}, "10 pixels are not a whole number of patches of 4"),
        ({"data": {"kind": "labelled"}}, "labelled data have no images, which model.patches needs"),
        (
            {"data": {"kind": "labelled"}, "objective": AUGMENTED},
            "has no images to change. Leave augmentation out",
        ),
        (
            {"model": VIT | {"patches": None}},
            "data.kind=images has no token ids. Set patches.image_size",
        ),
        (
            {"tokenizer": {"kind": "sentencepiece"}},
            "sentencepiece does not fit data.kind=images: .* Use none",
        ),
        ({"data": {"kind": "labelled"}}, "none does not fit data.kind=labelled"),
        (
            {"layout": {"tensor": 2}},
            "model.head.kind=classification needs full sequences on each rank",
        ),
        (
            {"layout": {"context": 2}},
            "model.head.kind=classification needs full sequences on each rank",
        ),
        ({"layout": {"pipeline": 2}}, "model.head.kind=classification does not run in stages"),
        (
            {
                "model": VIT | {"position": {"kind": "sinusoidal"}},
                "data": IMAGES | {"image_size": 12},
            },
            "12 pixels are 10 positions, and only learned ones are interpolated. Use 8",
        ),
    ],
)
def test_runs_that_fit_no_image_are_rejected(changes: dict[str, Any], message: str) -> None:
    run = {
        "model": VIT,
        "data": IMAGES,
        "tokenizer": NONE,
        "batch": {"sequence_length": 5, "tokens": 20},
    }
    assert RunConfig.model_validate(run)
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(run | changes)


def test_images_of_another_size_than_the_table_are_a_legal_run() -> None:
    larger = {"data": IMAGES | {"image_size": 12}, "batch": {"sequence_length": 10, "tokens": 40}}
    assert (
        RunConfig.model_validate({"model": VIT, "tokenizer": NONE} | larger).batch.sequence_length
        == 10
    )
