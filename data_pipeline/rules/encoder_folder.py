"""Folder of an encoder classifier: what can be told of it without loading it.

Reads config.json and the names of the other files.

Invariants:
    - Neither torch nor transformers is imported, so that a mistake is named in a moment.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmsys.config.custom_rules import EncoderClassifierConfig
from llmsys.data_pipeline.rules.rule import ThresholdTest
from llmsys.errors import DataError

_HEAD = "ForSequenceClassification"
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")

Activation = Literal["none", "sigmoid", "softmax"]


@dataclass(frozen=True)
class EncoderFolder:
    """The output of a model that is the score, and its activation.

    Attributes:
        column: Index of the label among the outputs.
        activation: That of transformers' pipeline for text classification.
    """

    column: int
    activation: Activation


def read_encoder_folder(config: EncoderClassifierConfig, key: str = "") -> EncoderFolder:
    """Read and check the folder of a model.

    Args:
        config: The rule.
        key: Its key in the config, for messages.

    Returns:
        The output that is the score.

    Raises:
        DataError: The folder has no classifier, no weights or no tokenizer, or another label; or
            its texts are shorter than `max_tokens`.
    """
    place = f"{key}.model: " if key else ""
    folder = config.model
    values = _read_config(config, place)
    names = [str(name) for name in values.get("architectures") or ()]
    if not any(name.endswith(_HEAD) for name in names):
        raise DataError(
            f"{place}{folder} has the architecture {', '.join(names) or 'of no name'}, which "
            f"scores no label. Give a model whose architecture ends in {_HEAD}."
        )
    for wanted, files in (("weights", _WEIGHTS), ("tokenizer", _TOKENIZERS)):
        if not any((folder / name).is_file() for name in files):
            raise DataError(
                f"{place}{folder} has no {wanted}: none of {', '.join(files)} is there. Download "
                "the whole model, or save it with save_pretrained."
            )
    longest = values.get("max_position_embeddings")
    if isinstance(longest, int) and config.max_tokens > longest:
        raise DataError(
            f"{f'{key}.max_tokens: ' if key else ''}{config.max_tokens} is above the "
            f"{longest} positions of {folder}. Set max_tokens to {longest} or less."
        )
    labels = _list_labels(values)
    return EncoderFolder(_find_label(config, labels, key), _find_activation(values, len(labels)))


def list_score_limits(config: EncoderClassifierConfig) -> Sequence[ThresholdTest]:
    """Return the minimum and maximum score of a kept document, as far as there are any.

    Args:
        config: The rule.

    Returns:
        At most two tests.
    """
    test = f"score of {config.label}" if config.label else "score"
    limits = []
    if config.min_score is not None:
        limits.append(ThresholdTest(test, "score", "below", config.min_score))
    if config.max_score is not None:
        limits.append(ThresholdTest(test, "score", "above", config.max_score))
    return limits


def _read_config(config: EncoderClassifierConfig, place: str) -> dict[str, Any]:
    path = config.model / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{place}{config.model} has no config.json, so it is no folder of a model. Give the "
            "folder that save_pretrained wrote."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{place}{path} cannot be read: {error}. Download it again.") from None
    if not isinstance(values, dict):
        raise DataError(f"{place}{path} is no JSON object. Download it again.")
    return values


def _list_labels(values: dict[str, Any]) -> list[str]:
    """Return the labels in the order of the outputs, as transformers names them."""
    named = values.get("id2label")
    if isinstance(named, dict) and named:
        return [str(named[number]) for number in sorted(named, key=int)]
    count = values.get("num_labels", values.get("_num_labels", 2))
    return [f"LABEL_{number}" for number in range(int(count))]


def _find_label(config: EncoderClassifierConfig, labels: Sequence[str], key: str) -> int:
    place = f"{key}.label: " if key else ""
    if not config.label and len(labels) == 1:
        return 0
    if config.label not in labels:
        wrong = f"has no label {config.label!r}" if config.label else "has several labels"
        raise DataError(
            f"{place}{config.model} {wrong}; its labels are {', '.join(labels)}. Set label to one "
            "of them."
        )
    return labels.index(config.label)


def _find_activation(values: dict[str, Any], labels: int) -> Activation:
    problem = values.get("problem_type")
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or labels == 1:
        return "sigmoid"
    return "softmax"
