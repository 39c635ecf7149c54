"""Labelled images as batches of patches.

Reads the pairs that `prepare` writes: the values of an image, (C, H, W), and the number of its
label.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmsys.config.images import ImagesConfig
from llmsys.config.patches import BYTE_VALUES, PatchesConfig
from llmsys.config.run import RunConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.sequence_pairs import PairRows, SequencePairs
from llmsys.errors import ConfigError

# B images, C channels, H height and width, N patches, P values of a patch, T positions

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class ImageLayout:
    """The size of all images of a run, and their patches."""

    image_size: int
    patches: PatchesConfig

    @property
    def num_positions(self) -> int:
        """Positions of an image, the class token included."""
        return self.patches.count_positions(self.image_size)

    def require_values(self, pairs: SequencePairs) -> None:
        """Check that every image has the size of this layout.

        Args:
            pairs: The images of a split and their labels.

        Raises:
            ConfigError: An image has another number of values; the message names the first.
        """
        wanted = self.patches.num_channels * self.image_size**2
        lengths = pairs.sources.lengths
        if (strange := np.flatnonzero(lengths != wanted)).size:
            raise ConfigError(
                f"data.image_size={self.image_size} and {self.patches.num_channels} channels are "
                f"{wanted} values, but image {strange[0]} of {pairs.sources.folder} has "
                f"{lengths[strange[0]]}. Run llmsys prepare CONFIG again."
            )

    def cut_patches(self, images_BCHH: Pixels) -> Pixels:
        """Cut images into patches.

        Args:
            images_BCHH: Bytes of pixels.

        Returns:
            The values of all patches, (B, N, P), rows of patches from top to bottom.
        """
        size = self.patches.patch_size
        channels = self.patches.num_channels
        side = self.image_size // size
        cut = images_BCHH.reshape(-1, channels, side, size, side, size).transpose(0, 2, 4, 1, 3, 5)
        return np.ascontiguousarray(cut.reshape(-1, side * side, self.patches.patch_values))

    def join_patches(self, patches_BNP: Pixels) -> Pixels:
        """Join patches to images: the inverse of `cut_patches`.

        Args:
            patches_BNP: Values of patches.

        Returns:
            (B, C, H, H).
        """
        size = self.patches.patch_size
        channels = self.patches.num_channels
        side = self.image_size // size
        grid = patches_BNP.reshape(-1, side, side, channels, size, size).transpose(0, 3, 1, 4, 2, 5)
        return np.ascontiguousarray(grid.reshape(-1, channels, self.image_size, self.image_size))


@dataclass(frozen=True)
class ImageCollator:
    """Builder of batches of patches and labels."""

    layout: ImageLayout

    def __call__(self, pairs: PairRows, rows: Sequence[int]) -> Batch:
        """Return a batch of rows, see `MakeBatch`; without rows, one black image that is
        padding.
        """
        layout = self.layout
        size = self.layout.image_size
        images_BCHH = np.zeros(
            (max(1, len(rows)), layout.patches.num_channels, size, size), np.uint8
        )
        for place, row in enumerate(rows):
            images_BCHH[place] = pairs.sources.get_tokens(row).reshape(images_BCHH.shape[1:])
        labels = [[int(pairs.targets.get_tokens(row)[0])] for row in rows] or [[IGNORED]]
        # Given even without padding: patches do not tell the number of positions.
        real_BT = torch.full((len(images_BCHH), layout.num_positions), bool(rows))
        return Batch(
            torch.from_numpy(layout.cut_patches(images_BCHH)), torch.tensor(labels), real_BT=real_BT
        )


def build_image_layout(config: RunConfig) -> ImageLayout | None:
    """Build the layout of a run's images; None where its data are texts.

    Args:
        config: the config of the run.

    Returns:
        The size of images and patches.
    """
    if not isinstance(config.data, ImagesConfig) or config.model.patches is None:
        return None
    return ImageLayout(config.data.image_size, config.model.patches)


class PixelTokenizer:
    """The tokenizer of images, whose ids are the values of bytes. There is no text to encode or
    decode.
    """

    vocab_size = BYTE_VALUES
    bos_id = eos_id = -1
    fingerprint = ""
    unknown_ids: frozenset[int] = frozenset()

    def find_piece_id(self, piece: str) -> int | None:
        """Return None: there are no pieces."""
        return None

    def get_text_pieces(self) -> dict[int, str]:
        """Return {}: there are no pieces."""
        return {}

    def encode(self, text: str) -> list[int]:
        """Raise ConfigError."""
        raise _build_text_error()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Raise ConfigError."""
        raise _build_text_error()

    def decode(self, ids: Sequence[Any]) -> str:
        """Raise ConfigError."""
        raise _build_text_error()


def _build_text_error() -> ConfigError:
    return ConfigError(
        "data.kind=images has no tokenizer, so there is no text of it. Use a config of texts."
    )
