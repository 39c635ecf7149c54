"""Images with labels: the dataset (`data.kind=images`), and their random changes in training."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from llmsys.config.executor import ExecutorConfig, LocalExecutorConfig
from llmsys.config.section import FolderPath, LocalPath, Section


class ImagesConfig(Section):
    """Labelled images: folders with one subfolder per label, or .npz files with the arrays `images`
    and `labels`.

    Images of a folder are resized to `image_size` × `image_size`. Those of an .npz file are uint8
    of that size already, (N, H, W) or (N, H, W, C).
    """

    kind: Literal["images"] = "images"
    name: str = Field("images", min_length=1, description="Display name of the dataset.")
    folder: FolderPath = Field(
        Path("runs/images"), description="Dataset folder, written by `prepare` and read by `train`."
    )
    inputs: tuple[LocalPath, ...] = Field((), description="Folders or .npz files to train on.")
    heldout_inputs: tuple[LocalPath, ...] = Field(
        (), description="Folders or .npz files to evaluate on."
    )
    labels: tuple[str, ...] = Field(
        (),
        description="Labels in order of their ids. Empty: those of the inputs, sorted; numbers by "
        "value.",
    )
    image_size: int = Field(ge=1, description="Height and width of every image, in pixels.")
    num_channels: Literal[1, 3] = Field(
        3, description="Channels of a pixel: 3 for colour, 1 for grey."
    )
    shard_images: int = Field(10_000, ge=1, description="Number of images per token file.")
    executor: ExecutorConfig = Field(
        LocalExecutorConfig(), description="Executor that runs the tasks."
    )


class AugmentationConfig(Section):
    """Random changes of training images by torchvision.transforms.v2. Held-out images are never
    changed.
    """

    flip: float = Field(
        0.0, ge=0, le=1, description="Probability of a mirror image, left to right."
    )
    min_crop: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Smallest share of an image's area that is cut out and resized to all of it.",
    )
    max_rotation: float = Field(
        0.0, ge=0, le=180, description="Largest rotation to either side, in degrees."
    )
    max_translation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Largest shift along each axis, as a share of the image's height.",
    )
