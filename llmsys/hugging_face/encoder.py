"""Readers and writers of encoders: bert, roberta, and xlnet (without its weights)."""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.gpt import build_attention_section, read_layer_norm
from llmsys.hugging_face.shared_fields import (
    Values,
    check_common_keys,
    get_activation_name,
    read_activation,
    read_architecture,
)

BERT_CLASSES = {
    "BertForMaskedLM": "mlm",
    "BertForPreTraining": "pretraining",
    "BertForSequenceClassification": "classification",
    "BertModel": "features",
}
ROBERTA_CLASSES = {
    "RobertaForMaskedLM": "mlm",
    "RobertaForSequenceClassification": "classification",
    "RobertaModel": "features",
}


def read_bert(fields: ConfigJsonReader) -> Values:
    """Read BERT. The class in `architectures` selects the head."""
    fields.ignore_keys(
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"
    )
    fields.ignore_keys("pooler_size_per_head", "pooler_type")
    values = _read_bert_encoder(
        fields,
        read_architecture(fields, BERT_CLASSES, "mlm"),
        read_activation(fields, "hidden_act"),
    )
    return values | {"position": {"kind": "learned"}}


def read_roberta(fields: ConfigJsonReader) -> Values:
    """Read RoBERTa: BERT with positions that start at pad_token_id + 1, and a longer position
    table.
    """
    values = _read_bert_encoder(fields, read_architecture(fields, ROBERTA_CLASSES, "mlm"), "gelu")
    offset = fields.read_int("pad_token_id") + 1
    if values["max_position_embeddings"] <= offset:
        fields.add_violation(
            "max_position_embeddings",
            f"the first {offset} rows are unused. Use more than {offset}.",
        )
        return values
    values["max_position_embeddings"] -= offset
    return values | {"position": {"kind": "learned", "offset": offset}}


def _read_bert_encoder(fields: ConfigJsonReader, head: str, head_activation: str) -> Values:
    check_common_keys(fields)
    fields.require_value("is_decoder", False, None, why="an encoder is bidirectional")
    fields.require_value(
        "position_embedding_type", "absolute", None, why="positions are added to the embedding"
    )
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    values: Values = {"family": "encoder"} | {name: fields.read_int(name) for name in names}
    hidden, attention = (
        fields.read_float("hidden_dropout_prob"),
        fields.read_float("attention_probs_dropout_prob"),
    )
    dropout = {"embedding": hidden, "residual": hidden, "attention": attention}
    classifier = fields.read_optional_float("classifier_dropout")
    if head == "classification":
        dropout["final"] = hidden if classifier is None else classifier
    return values | {
        "max_position_embeddings": fields.read_int("max_position_embeddings"),
        "tie_word_embeddings": fields.read_bool("tie_word_embeddings"),
        "initializer_range": fields.read_float("initializer_range"),
        "norm": read_layer_norm(fields, "layer_norm_eps"),
        "residual": {"kind": "post"},
        "attention": build_attention_section(True),
        "feed_forward": {"kind": read_activation(fields, "hidden_act"), "bias": True},
        "embedding": {"norm": True, "token_types": fields.read_int("type_vocab_size")},
        "head": _read_head(fields, head, head_activation),
        "dropout": dropout,
    }


def _read_head(fields: ConfigJsonReader, head: str, activation: str) -> Values:
    if head == "classification":
        labels = fields.values.get("id2label")
        count = fields.values.get("num_labels", 2)
        return {
            "kind": "classification",
            "num_labels": len(labels) if isinstance(labels, dict) else count,
        }
    if head == "features":
        return {"kind": "features", "pooler": True}
    if not fields.read_bool("tie_word_embeddings"):
        fields.add_violation(
            "tie_word_embeddings", "false adds a second bias that is unused. Set it to true."
        )
    both = head == "pretraining"
    return {"kind": "mlm", "activation": activation, "pooler": both, "next_sentence": both}


def read_xlnet(fields: ConfigJsonReader) -> Values:
    """Read XLNet: relative positions and segment encodings in every layer, and the mask vector
    of its objective.
    """
    check_common_keys(fields)
    read_architecture(fields, {"XLNetLMHeadModel": "permutation"}, "permutation")
    fields.ignore_keys(
        "mem_len",
        "reuse_len",
        "use_mems_eval",
        "use_mems_train",
        "bi_data",
        "start_n_top",
        "end_n_top",
    )
    fields.require_value("attn_type", "bi", why="XLNet is bidirectional")
    fields.require_value("clamp_len", -1, why="distances are not clamped")
    fields.require_value(
        "same_length", False, None, why="every token attends to the whole sequence"
    )
    fields.require_value("untie_r", True, why="every layer has its own position biases")
    names = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    values: Values = {"family": "encoder"} | {
        ours: fields.read_int(theirs, ours) for ours, theirs in names.items()
    }
    fields.require_value(
        "d_head",
        values["hidden_size"] // (values["num_attention_heads"] or 1),
        None,
        why="heads share d_model",
    )
    rate = fields.read_float("dropout")
    places = ("embedding", "residual", "attention", "activation", "final")
    return values | {
        "vocab_size": fields.read_int("vocab_size", "n_token"),
        "intermediate_size": fields.read_int("d_inner"),
        "tie_word_embeddings": fields.read_bool("tie_word_embeddings"),
        "initializer_range": fields.read_float("initializer_range"),
        "norm": read_layer_norm(fields, "layer_norm_eps"),
        "residual": {"kind": "post"},
        "position": {"kind": "transformer_xl", "segments": 2},
        "feed_forward": {"kind": read_activation(fields, "ff_activation"), "bias": True},
        "head": {"kind": "permutation"},
        "dropout": dict.fromkeys(places, rate),
    }


def _write_bert_encoder(model: Values) -> Values:
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings", "initializer_range", "tie_word_embeddings",
    )  # fmt: skip
    values = {name: model[name] for name in names} | {
        "hidden_act": get_activation_name(model["feed_forward"]["kind"]),
        "hidden_dropout_prob": model["dropout"]["residual"],
        "attention_probs_dropout_prob": model["dropout"]["attention"],
        "type_vocab_size": model["embedding"]["token_types"],
        "layer_norm_eps": model["norm"]["eps"],
    }
    if model["head"]["kind"] == "classification":
        labels = {str(i): f"LABEL_{i}" for i in range(model["head"]["num_labels"])}
        values |= {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}
        values |= {"classifier_dropout": model["dropout"]["final"]}
    return values


def write_bert(model: Values) -> Values:
    """Write the fields of `read_bert`, with the class of this head."""
    return _write_bert_encoder(model) | {"architectures": [_get_architecture(model, BERT_CLASSES)]}


def write_roberta(model: Values) -> Values:
    """Write the fields of `read_roberta`, with the class of this head."""
    offset = model["position"]["offset"]
    rows = {
        "max_position_embeddings": model["max_position_embeddings"] + offset,
        "pad_token_id": offset - 1,
    }
    return (
        _write_bert_encoder(model)
        | rows
        | {"architectures": [_get_architecture(model, ROBERTA_CLASSES)]}
    )


def _get_architecture(model: Values, classes: dict[str, str]) -> str:
    head = model["head"]
    wanted = "pretraining" if head.get("next_sentence") else head["kind"]
    return next((name for name, kind in classes.items() if kind == wanted), next(iter(classes)))


def write_xlnet(model: Values) -> Values:
    """Write the fields of `read_xlnet`."""
    return {
        "vocab_size": model["vocab_size"],
        "d_model": model["hidden_size"],
        "n_layer": model["num_hidden_layers"],
        "n_head": model["num_attention_heads"],
        "d_inner": model["intermediate_size"],
        "ff_activation": get_activation_name(model["feed_forward"]["kind"]),
        "initializer_range": model["initializer_range"],
        "layer_norm_eps": model["norm"]["eps"],
        "dropout": model["dropout"]["residual"],
        "tie_word_embeddings": model["tie_word_embeddings"],
    }
