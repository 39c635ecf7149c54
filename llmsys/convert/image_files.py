"""Read and write Hugging Face's settings of images, preprocessor_config.json."""

import json
from pathlib import Path
from typing import Any

from llmsys.config.patches import PatchesConfig
from llmsys.hugging_face.read_config_json import parse_json

NAME = "preprocessor_config.json"
KEYS = ("image_mean", "image_std")


def read_image_settings(folder: Path) -> dict[str, Any]:
    """Return mean and deviation of pixels as keys that the reader of ViT knows; {} where the
    folder has none.
    """
    file = folder / NAME
    values = parse_json(file.read_text(encoding="utf-8-sig"), str(file)) if file.is_file() else {}
    return {key: values[key] for key in KEYS if key in values}


def write_image_files(folder: Path, patches: PatchesConfig, values: dict[str, Any]) -> None:
    """Write config.json, and the settings by which transformers resizes and normalizes images as
    `prepare` does.

    Args:
        folder: Folder to write into.
        patches: Size and normalization of images.
        values: Values of config.json.
    """
    pixels = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": patches.image_size, "width": patches.image_size},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": patches.list_channel_values(patches.mean),
        "image_std": patches.list_channel_values(patches.std),
    }
    for name, content in (("config.json", values), (NAME, pixels)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
