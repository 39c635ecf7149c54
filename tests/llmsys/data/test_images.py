"""Images as patches: their order, batches without rows, and random changes that depend on the
number alone.
"""

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmsys.config.images import AugmentationConfig
from llmsys.config.patches import PatchesConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.image_augmentation import ImageAugmenter
from llmsys.data.images import ImageCollator, ImageLayout, PixelTokenizer
from llmsys.data.length_buckets import LengthBuckets
from llmsys.data.step_batches import BucketedStepBatches
from llmsys.errors import ConfigError
from tests.helpers.tiny_images import build_images

LAYOUT = ImageLayout(8, PatchesConfig(image_size=8, patch_size=4, num_channels=3))


class Rows:
    """Rows of values by number."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def get_tokens(self, document: int, /) -> Any:
        return np.asarray(self.rows[document])


class ToyPairs:
    """Random images and their labels."""

    def __init__(self) -> None:
        images, _ = build_images(channels=3)
        self.sources = Rows(
            [image.transpose(2, 0, 1).ravel().astype(np.uint16) for image in images]
        )
        self.targets = Rows([[number % 3] for number in range(len(images))])

    def __len__(self) -> int:
        return len(self.targets.rows)


def build_pairs() -> Any:
    return ToyPairs()


def test_patches_are_those_of_a_convolution() -> None:
    images_BCHW = build_images(channels=3)[0].transpose(0, 3, 1, 2)
    unfolded = F.unfold(torch.from_numpy(images_BCHW.astype(np.float32)), 4, stride=4).transpose(
        1, 2
    )
    assert np.array_equal(LAYOUT.cut_patches(images_BCHW), unfolded.numpy())
    assert np.array_equal(LAYOUT.join_patches(LAYOUT.cut_patches(images_BCHW)), images_BCHW)


def test_a_batch_counts_positions_and_not_pixels() -> None:
    """A rank without rows gets an image that is padding."""
    collate = ImageCollator(LAYOUT)
    batch, empty = collate(build_pairs(), [1, 5, 2]), collate(build_pairs(), [])
    assert (batch.tokens_BT.shape, batch.tokens_BT.dtype) == ((3, 4, 48), torch.uint8)
    assert batch.targets_BT.tolist() == [[1], [2], [2]]
    assert batch.token_counts[:3] == (3, 15, 0)
    assert empty.targets_BT.tolist() == [[IGNORED]]
    assert empty.token_counts[:3] == (0, 0, 0)


@pytest.fixture
def functional(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stand in for torchvision with functions that record their arguments; the mirror image is
    real.
    """
    calls: list[tuple[Any, ...]] = []

    def record(image: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments)
        return image

    names = {
        "resized_crop": record,
        "affine": record,
        "horizontal_flip": lambda image: image.flip(-1),
    }
    modules = {
        "torchvision": ModuleType("torchvision"),
        "torchvision.transforms": ModuleType("transforms"),
    }
    modules["torchvision.transforms.v2"] = ModuleType("v2")
    stand_in: Any = modules["torchvision.transforms.v2"]
    stand_in.functional = SimpleNamespace(
        InterpolationMode=SimpleNamespace(BILINEAR="bilinear"), **names
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def augment(numbers: Sequence[int], **config: float) -> torch.Tensor:
    batch = ImageCollator(LAYOUT)(build_pairs(), [0, 1, 2])
    return (
        ImageAugmenter(AugmentationConfig(**config), LAYOUT, ("data", 1))
        .mask_batch(batch, numbers)
        .tokens_BT
    )


def test_changes_depend_on_the_number_of_an_image_alone(functional: list[tuple[Any, ...]]) -> None:
    plain = ImageCollator(LAYOUT)(build_pairs(), [0, 1, 2])
    mirrored = LAYOUT.cut_patches(
        np.ascontiguousarray(LAYOUT.join_patches(plain.tokens_BT.numpy())[..., ::-1])
    )
    assert torch.equal(augment([0, 1, 2], flip=1.0), torch.from_numpy(mirrored))
    assert torch.equal(augment([0, 1, 2]), plain.tokens_BT)
    assert functional == []
    for numbers in ([0, 1, 2], [0, 1, 2], [12, 13, 14]):
        augment(numbers, min_crop=0.25, max_rotation=20.0, max_translation=0.25)
    first, second, other = functional[:6], functional[6:12], functional[12:]
    assert first == second != other
    for top, left, height, width, size, _ in functional[::2]:
        assert 4 <= height == width <= 8
        assert min(top, left) >= 0
        assert max(top, left) + height <= 8
        assert size == [8, 8]
    for degrees, (right, down), *_ in functional[1::2]:
        assert -20 <= degrees <= 20
        assert max(abs(right), abs(down)) <= 2


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        ConfigError, match=r"needs the package torchvision, .*pip install 'llmsys\[images\]'"
    ):
        augment([0, 1, 2], flip=0.5)


def test_images_have_no_text() -> None:
    tokenizer = PixelTokenizer()
    assert (tokenizer.vocab_size, tokenizer.find_piece_id("a"), tokenizer.get_text_pieces()) == (
        256,
        None,
        {},
    )
    for call in (
        lambda: tokenizer.encode("a"),
        lambda: tokenizer.encode_batch(["a"]),
        lambda: tokenizer.decode([1]),
    ):
        with pytest.raises(ConfigError, match=r"data.kind=images has no tokenizer"):
            call()


class NumberRecorder:
    """An augmentation that keeps the numbers of its images."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def mask_batch(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        self.numbers += numbers
        return batch


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_image_has_a_number_of_its_own_in_every_epoch(ranks: int) -> None:
    pairs, lengths_N, recorder = build_pairs(), np.full(12, 5), NumberRecorder()
    grouping = LengthBuckets(lengths_N, lengths_N, 20, 1, ("data", 1))
    assert grouping.steps_per_epoch == 3
    for rank in range(ranks):
        steps = BucketedStepBatches(
            pairs,
            grouping,
            ImageCollator(LAYOUT),
            data_ranks=ranks,
            data_rank=rank,
            augmentation=recorder,
        )
        for step in range(6):
            steps.get_micro_batches(step)
    assert sorted(recorder.numbers) == list(range(24))
