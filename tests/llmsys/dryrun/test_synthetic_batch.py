"""Batches of a dry run have the shapes of those that training reads."""

import numpy as np
import torch

from llmsys.config.loading.load import load_run_config
from llmsys.data.images import ImageCollator, build_image_layout
from llmsys.dryrun.synthetic_batch import build_synthetic_batch


class OneImage:
    """Pairs of which only the tokens of a row are asked."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = np.array(tokens)

    def get_tokens(self, row: int) -> np.ndarray:
        return self._tokens


class ImagePairs:
    """Black images, all of the first class."""

    def __init__(self, pixels: int) -> None:
        self.sources = OneImage([0] * pixels)
        self.targets = OneImage([0])


def test_images_come_as_the_bytes_of_their_patches() -> None:
    config = load_run_config("train/vit-digits")
    layout = build_image_layout(config)
    assert layout is not None
    pixels = layout.patches.num_channels * layout.image_size**2
    read = ImageCollator(layout)(ImagePairs(pixels), [0, 1])

    built = build_synthetic_batch(config, 2, ())

    assert built.tokens_BT.dtype == torch.uint8
    assert built.tokens_BT.shape == read.tokens_BT.shape
    assert built.targets_BT.shape == read.targets_BT.shape
    assert read.real_BT is not None
    assert built.real_BT is not None
    assert built.real_BT.shape == read.real_BT.shape
    assert built.token_counts == read.token_counts
