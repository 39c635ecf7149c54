"""Random changes of training images, by torchvision.transforms.v2.

Invariants:
- The changes are a function of (data, seed, number of the image over all epochs): every epoch
  changes anew, and neither the number of ranks nor a resumed run matters. torchvision's own random
  numbers are not used.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmsys.config.images import AugmentationConfig
from llmsys.data.batch import Batch
from llmsys.data.images import ImageLayout
from llmsys.data.masking import draw_random_bits
from llmsys.data.shuffle import derive_order_key
from llmsys.errors import ConfigError

# C channels, H height and width


class ImageAugmenter:
    """The changes of a batch of images."""

    def __init__(
        self, config: AugmentationConfig, layout: ImageLayout, key: tuple[str | int, ...]
    ) -> None:
        """Load torchvision, which changes the images.

        Args:
            config: What may change, and how far.
            layout: Size and patches of the images.
            key: What the changes are drawn by, besides the number of an image: equal keys give
                equal changes, such as the fingerprint of the data and the seed of the run.
        """
        self.config = config
        self.layout = layout
        self.key = key
        self.functional = _import_functional()

    def mask_batch(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Return the batch with changed images.

        Args:
            batch: patches of images.
            numbers: numbers of the images over all epochs, by which the changes are drawn.
        """
        images = torch.from_numpy(self.layout.join_patches(batch.tokens_BT.numpy()))
        changed = [
            self.change_image(image, number) for image, number in zip(images, numbers, strict=True)
        ]
        patches = self.layout.cut_patches(torch.stack(changed).numpy())
        return replace(batch, tokens_BT=torch.from_numpy(patches))

    def change_image(self, image_CHH: Tensor, number: int) -> Tensor:
        """Return image `number` cut out and resized, mirrored, rotated and shifted, as far as
        the config asks.
        """
        config = self.config
        functional = self.functional
        size = self.layout.image_size
        bits = draw_random_bits(derive_order_key("image", *self.key, number), 1, 7)[0]
        flip, area, top, left, angle, down, right = (bits / 2.0**64).tolist()  # each from 0 to 1
        bilinear = functional.InterpolationMode.BILINEAR
        if config.min_crop < 1:
            side = max(1, round(size * (config.min_crop + area * (1 - config.min_crop)) ** 0.5))
            corner = [int(share * (size - side + 1)) for share in (top, left)]
            image_CHH = functional.resized_crop(
                image_CHH, *corner, side, side, [size, size], bilinear, antialias=True
            )
        if flip < config.flip:
            image_CHH = functional.horizontal_flip(image_CHH)
        if config.max_rotation or config.max_translation:
            shift = [
                round((2 * share - 1) * config.max_translation * size) for share in (right, down)
            ]
            degrees = (2 * angle - 1) * config.max_rotation
            image_CHH = functional.affine(
                image_CHH, degrees, shift, 1.0, [0.0, 0.0], interpolation=bilinear
            )
        return image_CHH


def _import_functional() -> Any:
    try:
        from torchvision.transforms.v2 import functional
    except (ImportError, RuntimeError) as error:  # RuntimeError: a build for another torch
        raise ConfigError(
            "objective.augmentation needs the package torchvision, which cannot be imported: "
            f"{error}. Install the build for this torch: pip install 'llmsys[images]', or set "
            "objective.augmentation=null."
        ) from None
    return functional
