"""Folder of an encoder of Hugging Face: what can be told of it without loading it.

Reads config.json, the names of the other files, and how sentence-transformers pools.

Invariants:
    - Neither torch nor transformers is imported, so that a mistake is named in a moment.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmsys.config.custom_rules import EncoderClassifierConfig
from llmsys.config.deduplication import EncoderEmbeddingsConfig
from llmsys.config.encoder_model import EncoderModelConfig
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
# Their names in sentence-transformers' files.
_POOLING = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}

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
    values = _read_config(config.model, place)
    names = [str(name) for name in values.get("architectures") or ()]
    if not any(name.endswith(_HEAD) for name in names):
        raise DataError(
            f"{place}{config.model} has the architecture {', '.join(names) or 'of no name'}, which "
            f"scores no label. Give a model whose architecture ends in {_HEAD}."
        )
    _require_files(config, values, key)
    labels = _list_labels(values)
    return EncoderFolder(_find_label(config, labels, key), _find_activation(values, len(labels)))


def require_embedding_folder(config: EncoderEmbeddingsConfig, key: str) -> None:
    """Check the folder of a model that embeds texts.

    Args:
        config: The embeddings.
        key: Their key in the config, for messages.

    Raises:
        DataError: The folder has no encoder, no weights or no tokenizer; its texts are shorter than
            `max_tokens`; or its own file says that it pools otherwise.
    """
    values = _read_config(config.model, f"{key}.model: ")
    if values.get("is_encoder_decoder"):
        raise DataError(
            f"{key}.model: {config.model} is an encoder with a decoder, which embeds no text by "
            "itself. Give the folder of an encoder, such as a BERT."
        )
    _require_files(config, values, key)
    path = config.model / "1_Pooling" / "config.json"
    if not path.is_file():
        return
    try:
        modes = json.loads(path.read_bytes())
        wanted = [name for name, is_on in modes.items() if is_on is True and "mode" in name]
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} cannot be read: {error}. Download it again.") from None
    if wanted == [_POOLING[config.pooling]]:
        return
    others = [pooling for pooling, name in _POOLING.items() if wanted == [name]]
    raise DataError(
        f"{key}.pooling: {path} says {', '.join(wanted) or 'nothing'}, not {config.pooling}. "
        + (
            f"Set pooling: {others[0]}."
            if others
            else "Embed the texts with sentence-transformers, and name their column with "
            "kind: column."
        )
    )


def _require_files(config: EncoderModelConfig, values: dict[str, Any], key: str) -> None:
    """Raise DataError for a folder without weights or tokenizer, or with fewer positions than
    `max_tokens`.
    """
    folder = config.model
    for wanted, files in (("weights", _WEIGHTS), ("tokenizer", _TOKENIZERS)):
        if not any((folder / name).is_file() for name in files):
            raise DataError(
                f"{f'{key}.model: ' if key else ''}{folder} has no {wanted}: none of "
                f"{', '.join(files)} is there. Download the whole model, or save it with "
                "save_pretrained."
            )
    longest = values.get("max_position_embeddings")
    if isinstance(longest, int) and config.max_tokens > longest:
        raise DataError(
            f"{f'{key}.max_tokens: ' if key else ''}{config.max_tokens} is above the "
            f"{longest} positions of {folder}. Set max_tokens to {longest} or less."
        )


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


def _read_config(folder: Path, place: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{place}{folder} has no config.json, so it is no folder of a model. Give the "
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
