"""A config.json as a checked ModelConfig, for those who have the file and no run config around it."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmsys.config.hugging_face.read import read_model_values, parse_json
from llmsys.config.merge import ConfigLayer
from llmsys.config.model import ModelConfig
from llmsys.config.problems import build_config_error
from llmsys.errors import ConfigError


def build_model_config(values: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """The model that these values of a config.json describe.

    Raises ConfigError that names every key that is unknown, malformed or cannot be built; `source` is what it calls
    the file.
    """
    read = read_model_values(values, source)
    try:
        return ModelConfig.model_validate(read)
    except ValidationError as error:
        raise build_config_error(error, ModelConfig, ConfigLayer(read, {(): source}), source) from None


def load_hugging_face_config(path: Path) -> ModelConfig:
    """The model of a config.json, or of the folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Give a config.json, or the folder of one.") from error
    return build_model_config(parse_json(text, str(file)), str(file))
