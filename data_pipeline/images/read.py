"""Read labelled images: a folder with one subfolder per label, or an .npz file.

Reads .png, .jpg, .jpeg, .bmp and .webp files with Pillow, and the arrays `images` and `labels` of
.npz files.

Invariants:
    - Images come in the order of their paths, or of the arrays.
    - An image file that cannot be read is a problem of that image; a wrong folder or array is an
      error.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmsys.config.images import ImagesConfig
from llmsys.errors import ConfigError, DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class ImagePart:
    """Consecutive images of one input: image files with their labels, or rows of an .npz file."""

    files: tuple[tuple[Path, str], ...] = ()
    archive: Path | None = None
    start: int = 0
    labels: tuple[str, ...] = ()

    @property
    def paths(self) -> list[Path]:
        """Files that are read."""
        return [path for path, _ in self.files] if self.archive is None else [self.archive]

    @property
    def row_labels(self) -> tuple[str, ...]:
        """Label of each image."""
        return tuple(label for _, label in self.files) if self.archive is None else self.labels


@dataclass(frozen=True)
class LabelledImage:
    """One image, (C, H, W) uint8, or the reason why there is none. `number` counts in the input,
    from 0.
    """

    file: Path
    number: int
    label: str
    pixels_CHW: Pixels | None
    problem: str = ""


def list_parts(path: Path, shard_images: int) -> list[ImagePart]:
    """Cut an input into parts.

    Args:
        path: A folder, or an .npz file.
        shard_images: Images of a part.

    Returns:
        The parts, in order.

    Raises:
        DataError: If there are no images, or they have another form than documented.
    """
    if path.is_dir():
        files = _list_image_files(path)
        return [
            ImagePart(files[start : start + shard_images])
            for start in range(0, len(files), shard_images)
        ]
    labels = tuple(str(label) for label in _load_arrays(path)[1].tolist())
    starts = range(0, len(labels), shard_images)
    return [ImagePart((), path, start, labels[start : start + shard_images]) for start in starts]


def _list_image_files(folder: Path) -> tuple[tuple[Path, str], ...]:
    files = []
    for label in sorted(one for one in folder.iterdir() if one.is_dir()):
        for file in sorted(label.rglob("*")):
            if file.is_file() and not file.name.startswith("."):
                files.append((file, label.name))
    strange = [file for file, _ in files if file.suffix.lower() not in SUFFIXES]
    if strange:
        raise DataError(f"{strange[0]} is none of {', '.join(SUFFIXES)}. Convert or remove it.")
    if not files:
        raise DataError(
            f"{folder} has no images. Give a folder with one subfolder of images for each label."
        )
    return tuple(files)


def _load_arrays(path: Path) -> tuple[Pixels, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images = arrays["images"]
            labels = arrays["labels"]
    except KeyError as error:
        raise DataError(
            f"{path} has no array {error}. Save images and labels: numpy.savez(path, images=…, "
            "labels=…)."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as .npz: {error}. Give an .npz file, or a folder of images."
        ) from None
    if (
        images.dtype != np.uint8
        or images.ndim not in (3, 4)
        or labels.shape != images.shape[:1]
        or not len(images)
    ):
        raise DataError(
            f"{path} has images of {images.dtype} {images.shape} with labels of {labels.dtype} "
            f"{labels.shape}. Save uint8 images (N, H, W) or (N, H, W, C), one or more, with N "
            "labels."
        )
    return images, labels


def iter_images(part: ImagePart, data: ImagesConfig) -> Iterator[LabelledImage]:
    """Yield the images of a part.

    Args:
        part: From `list_parts`.
        data: Size and channels.

    Yields:
        Images, those that cannot be read with their problem.

    Raises:
        DataError: If the images of an .npz file have another size or other channels.
        ConfigError: If Pillow is not installed.
    """
    if part.archive is None:
        for number, (file, label) in enumerate(part.files):
            yield _read_image(file, number, label, data)
        return
    images = _load_arrays(part.archive)[0]
    size = data.image_size
    channels = data.num_channels
    images = images[..., None] if images.ndim == 3 else images
    if images.shape[1:] != (size, size, channels):
        raise DataError(
            f"{part.archive} has images of {images.shape[1:]} pixels, but data.image_size={size} "
            f"with data.num_channels={channels} is {(size, size, channels)}. Correct these "
            "settings, or the file."
        )
    for number, label in enumerate(part.labels, start=part.start):
        yield LabelledImage(part.archive, number, label, images[number].transpose(2, 0, 1))


def _read_image(file: Path, number: int, label: str, data: ImagesConfig) -> LabelledImage:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            f"{file} needs the package pillow, which is not installed. Run pip install pillow, or "
            "give .npz files."
        ) from None
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB" if data.num_channels == 3 else "L")
            # To a square, as Hugging Face's ViT processor does.
            resized = image.resize((data.image_size, data.image_size), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        return LabelledImage(file, number, label, None, f"it cannot be read: {error}")
    pixels = np.asarray(resized)
    return LabelledImage(
        file, number, label, (pixels[..., None] if pixels.ndim == 2 else pixels).transpose(2, 0, 1)
    )
