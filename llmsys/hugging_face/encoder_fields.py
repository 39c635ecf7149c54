"""Heads and positions of encoders: fields of config.json that a table of keys cannot say.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import Values


def read_bert_head(fields: ConfigJsonReader, values: Values, *, activation: str = "") -> None:
    """Read the head of the class in `architectures`.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place; `head.kind` is that of the class.
        activation: activation of the masked-language-model head. Empty: that of the blocks.
    """
    kind = values["head"]["kind"]
    classifier = fields.read_optional_float("classifier_dropout")
    if kind == "classification":
        rate = values["dropout"]["residual"]
        values["dropout"]["final"] = rate if classifier is None else classifier
        values["head"] = {"kind": kind, "num_labels": _read_num_labels(fields)}
        return
    if kind == "features":
        values["head"]["pooler"] = True
        return
    if not values["tie_word_embeddings"]:
        fields.add_violation(
            "tie_word_embeddings", "false adds a second bias that is unused. Set it to true."
        )
    both = kind == "pretraining"
    values["head"] = {
        "kind": "mlm",
        "activation": activation or values["feed_forward"]["kind"],
        "pooler": both,
        "next_sentence": both,
    }


def write_bert_head(model: Values, keys: Values, *, activation: str = "") -> None:
    """Write the keys of `read_bert_head`."""
    if model["head"]["kind"] == "classification":
        _write_labels(model, keys)
        keys["classifier_dropout"] = model["dropout"]["final"]


def _read_num_labels(fields: ConfigJsonReader) -> int:
    labels = fields.values.get("id2label")
    return len(labels) if isinstance(labels, dict) else fields.values.get("num_labels", 2)


def _write_labels(model: Values, keys: Values) -> None:
    labels = {str(i): f"LABEL_{i}" for i in range(model["head"]["num_labels"])}
    keys["id2label"] = labels
    keys["label2id"] = {label: int(i) for i, label in labels.items()}


def read_positions_after_padding(fields: ConfigJsonReader, values: Values) -> None:
    """Read RoBERTa's table of positions, whose first rows, up to pad_token_id, are unused."""
    offset = fields.read_int("pad_token_id") + 1
    if values["max_position_embeddings"] <= offset:
        fields.add_violation(
            "max_position_embeddings",
            f"the first {offset} rows are unused. Use more than {offset}.",
        )
        return
    values["max_position_embeddings"] -= offset
    values["position"]["offset"] = offset


def write_positions_after_padding(model: Values, keys: Values) -> None:
    """Write the keys of `read_positions_after_padding`."""
    offset = model["position"]["offset"]
    keys["max_position_embeddings"] = model["max_position_embeddings"] + offset
    keys["pad_token_id"] = offset - 1


def read_divided_heads(fields: ConfigJsonReader, values: Values, *, key: str) -> None:
    """Check that heads share the width of the model, whatever `key` may say (XLNet, Command A)."""
    width = values["hidden_size"] // (values["num_attention_heads"] or 1)
    fields.require_value(key, width, None, why="heads share the width of the model")


def read_image_positions(fields: ConfigJsonReader, values: Values) -> None:
    """Read one position per patch, and one for the class token."""
    size = values["patches"]["image_size"]
    patch = values["patches"]["patch_size"]
    if patch < 1 or size < patch:
        fields.add_violation("patch_size", f"{patch} is no part of image_size={size}.")
        return
    values["max_position_embeddings"] = (size // patch) ** 2 + 1


def read_image_head(fields: ConfigJsonReader, values: Values) -> None:
    """Read the head of the class in `architectures`."""
    if values["head"]["kind"] == "features":
        values["head"]["pooler"] = True
    else:
        values["head"] |= {"num_labels": _read_num_labels(fields), "pooling": "first"}


def write_image_head(model: Values, keys: Values) -> None:
    """Write the keys of `read_image_head`."""
    if model["head"]["kind"] == "classification":
        _write_labels(model, keys)
