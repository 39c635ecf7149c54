"""Tiny images with labels, as an .npz file and as a folder of image files."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LABELS = ("2", "10", "7")


def build_images(
    count: int = 12, size: int = 8, channels: int = 1
) -> tuple[NDArray[np.uint8], list[str]]:
    """Return random images, (N, H, W, C), and their labels."""
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, channels), np.uint8)
    return images, [LABELS[number % 3] for number in range(count)]


def write_images(path: Path, **shape: int) -> None:
    """Write an .npz file."""
    images, labels = build_images(**shape)
    np.savez(path, images=images, labels=np.array([int(label) for label in labels]))


def write_image_folder(folder: Path, **shape: int) -> None:
    """Write the same images as .png files, one subfolder per label."""
    from PIL import Image

    for number, (image, label) in enumerate(zip(*build_images(**shape), strict=True)):
        file = folder / label / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels: Any = image if image.shape[-1] == 3 else image[..., 0]
        Image.fromarray(pixels).save(file)
