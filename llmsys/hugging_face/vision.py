"""config.json of ViT.

Mean and deviation of pixels, which Hugging Face keeps in preprocessor_config.json, are read and
written as the further keys `image_mean` and `image_std`.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.gpt import read_layer_norm
from llmsys.hugging_face.shared_fields import (
    Values,
    check_common_keys,
    get_activation_name,
    read_activation,
    read_architecture,
)

VIT_CLASSES = {"ViTForImageClassification": "classification", "ViTModel": "features"}


def read_vit(fields: ConfigJsonReader) -> Values:
    """Read ViT: square images and patches, a class token, learned positions."""
    check_common_keys(fields)
    fields.ignore_keys("encoder_stride")
    fields.require_value("pooler_act", "tanh", why="the pooler ends with tanh")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values: Values = {"family": "encoder", "vocab_size": 256} | {
        name: fields.read_int(name) for name in names
    }
    fields.require_value(
        "pooler_output_size", values["hidden_size"], None, why="the pooler keeps the width"
    )
    patches: Values = {
        name: fields.read_int(name) for name in ("image_size", "patch_size", "num_channels")
    }
    for key, name in (("mean", "image_mean"), ("std", "image_std")):
        patches |= {key: given} if (given := fields.read_float_list(name)) else {}
    if patches["patch_size"] < 1 or patches["image_size"] < patches["patch_size"]:
        fields.add_violation(
            "patch_size",
            f"{patches['patch_size']} is no part of image_size={patches['image_size']}.",
        )
        return values
    dropout = fields.read_float("hidden_dropout_prob")
    return values | {
        "patches": patches,
        "max_position_embeddings": (patches["image_size"] // patches["patch_size"]) ** 2 + 1,
        "initializer_range": fields.read_float("initializer_range"),
        "norm": read_layer_norm(fields, "layer_norm_eps"),
        "position": {"kind": "learned"},
        "attention": {
            "kind": "multi_head",
            "qkv_bias": fields.read_bool("qkv_bias"),
            "output_bias": True,
        },
        "feed_forward": {"kind": read_activation(fields, "hidden_act"), "bias": True},
        "head": _read_head(fields),
        "dropout": {
            "embedding": dropout,
            "residual": dropout,
            "attention": fields.read_float("attention_probs_dropout_prob"),
        },
    }


def _read_head(fields: ConfigJsonReader) -> Values:
    if read_architecture(fields, VIT_CLASSES, "classification") == "features":
        return {"kind": "features", "pooler": True}
    labels = fields.values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else fields.values.get("num_labels", 2)
    return {"kind": "classification", "num_labels": count, "pooling": "first"}


def write_vit(model: Values) -> Values:
    """Write the fields of `read_vit`, with the class of this head."""
    patches, head = model["patches"], model["head"]
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "initializer_range",
    )
    values = {name: model[name] for name in names} | {
        "image_size": patches["image_size"],
        "patch_size": patches["patch_size"],
        "num_channels": patches["num_channels"],
        "image_mean": list(patches["mean"]),
        "image_std": list(patches["std"]),
        "hidden_act": get_activation_name(model["feed_forward"]["kind"]),
        "hidden_dropout_prob": model["dropout"]["residual"],
        "attention_probs_dropout_prob": model["dropout"]["attention"],
        "layer_norm_eps": model["norm"]["eps"],
        "qkv_bias": model["attention"]["qkv_bias"],
        "architectures": [next(name for name, kind in VIT_CLASSES.items() if kind == head["kind"])],
    }
    if head["kind"] == "classification":
        labels = {str(i): f"LABEL_{i}" for i in range(head["num_labels"])}
        values |= {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}
    return values
