"""Encoders: bert, roberta, and xlnet, which is counted only."""

from llmsys.config.hugging_face.fields import Fields
from llmsys.config.hugging_face.gpt import layer_norm, with_bias
from llmsys.config.hugging_face.parts import Values, activation_name, read_activation, read_class, read_common

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


def read_bert(fields: Fields) -> Values:
    """BERT; the class says which head stands on it."""
    fields.skip("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    fields.skip("pooler_size_per_head", "pooler_type")
    values = _bert(fields, read_class(fields, BERT_CLASSES, "mlm"), read_activation(fields, "hidden_act"))
    return values | {"position": {"kind": "learned"}}


def read_roberta(fields: Fields) -> Values:
    """BERT whose positions are counted from pad_token_id + 1, in a table that has room for that."""
    values = _bert(fields, read_class(fields, ROBERTA_CLASSES, "mlm"), "gelu")
    offset = fields.whole("pad_token_id") + 1
    if values["max_position_embeddings"] <= offset:
        fields.refuse("max_position_embeddings", f"{offset} rows of it are never read. Use more than {offset}.")
        return values
    values["max_position_embeddings"] -= offset
    return values | {"position": {"kind": "learned", "offset": offset}}


def _bert(fields: Fields, head: str, head_activation: str) -> Values:
    read_common(fields)
    fields.only("is_decoder", False, None, why="an encoder looks both ways")
    fields.only("position_embedding_type", "absolute", None, why="positions are added to the embedding")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values: Values = {"family": "encoder"} | {name: fields.whole(name) for name in names}
    hidden, attention = fields.number("hidden_dropout_prob"), fields.number("attention_probs_dropout_prob")
    dropout = {"embedding": hidden, "residual": hidden, "attention": attention}
    classifier = fields.number_or_none("classifier_dropout")
    if head == "classification":
        dropout["final"] = hidden if classifier is None else classifier
    return values | {
        "max_position_embeddings": fields.whole("max_position_embeddings"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "initializer_range": fields.number("initializer_range"),
        "norm": layer_norm(fields, "layer_norm_eps"),
        "residual": {"kind": "post"},
        "attention": with_bias(True),
        "feed_forward": {"kind": read_activation(fields, "hidden_act"), "bias": True},
        "embedding": {"norm": True, "token_types": fields.whole("type_vocab_size")},
        "head": _head(fields, head, head_activation),
        "dropout": dropout,
    }


def _head(fields: Fields, head: str, activation: str) -> Values:
    if head == "classification":
        labels = fields.values.get("id2label")
        count = fields.values.get("num_labels", 2)
        return {"kind": "classification", "num_labels": len(labels) if isinstance(labels, dict) else count}
    if head == "features":
        return {"kind": "features", "pooler": True}
    if not fields.flag("tie_word_embeddings"):
        fields.refuse("tie_word_embeddings", "false leaves a second bias that nothing reads. Set it to true.")
    both = head == "pretraining"
    return {"kind": "mlm", "activation": activation, "pooler": both, "next_sentence": both}


def read_xlnet(fields: Fields) -> Values:
    """XLNet: relative positions with segment encodings in every layer, and the permutation objective's mask vector."""
    read_common(fields)
    read_class(fields, {"XLNetLMHeadModel": "permutation"}, "permutation")
    fields.skip("mem_len", "reuse_len", "use_mems_eval", "use_mems_train", "bi_data", "start_n_top", "end_n_top")
    fields.only("attn_type", "bi", why="XLNet looks both ways")
    fields.only("clamp_len", -1, why="all distances are told apart")
    fields.only("same_length", False, None, why="every token sees the whole sequence")
    fields.only("untie_r", True, why="every layer has its own position biases")
    names = {"hidden_size": "d_model", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    values: Values = {"family": "encoder"} | {ours: fields.whole(theirs, ours) for ours, theirs in names.items()}
    fields.only(
        "d_head", values["hidden_size"] // (values["num_attention_heads"] or 1), None, why="heads share d_model"
    )
    rate = fields.number("dropout")
    places = ("embedding", "residual", "attention", "activation", "final")
    return values | {
        "vocab_size": fields.whole("vocab_size", "n_token"),
        "intermediate_size": fields.whole("d_inner"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "initializer_range": fields.number("initializer_range"),
        "norm": layer_norm(fields, "layer_norm_eps"),
        "residual": {"kind": "post"},
        "position": {"kind": "transformer_xl", "segments": 2},
        "feed_forward": {"kind": read_activation(fields, "ff_activation"), "bias": True},
        "head": {"kind": "permutation"},
        "dropout": dict.fromkeys(places, rate),
    }


def _write_bert(model: Values) -> Values:
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "initializer_range", "tie_word_embeddings",
    )  # fmt: skip
    values = {name: model[name] for name in names} | {
        "hidden_act": activation_name(model["feed_forward"]["kind"]),
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
    """As `read_bert` reads it, with the class that has this head."""
    return _write_bert(model) | {"architectures": [_class_of(model, BERT_CLASSES)]}


def write_roberta(model: Values) -> Values:
    """As `read_roberta` reads it, with the class that has this head."""
    offset = model["position"]["offset"]
    rows = {"max_position_embeddings": model["max_position_embeddings"] + offset, "pad_token_id": offset - 1}
    return _write_bert(model) | rows | {"architectures": [_class_of(model, ROBERTA_CLASSES)]}


def _class_of(model: Values, classes: dict[str, str]) -> str:
    head = model["head"]
    wanted = "pretraining" if head.get("next_sentence") else head["kind"]
    return next((name for name, kind in classes.items() if kind == wanted), next(iter(classes)))


def write_xlnet(model: Values) -> Values:
    """As `read_xlnet` reads it."""
    return {
        "vocab_size": model["vocab_size"],
        "d_model": model["hidden_size"],
        "n_layer": model["num_hidden_layers"],
        "n_head": model["num_attention_heads"],
        "d_inner": model["intermediate_size"],
        "ff_activation": activation_name(model["feed_forward"]["kind"]),
        "initializer_range": model["initializer_range"],
        "layer_norm_eps": model["norm"]["eps"],
        "dropout": model["dropout"]["residual"],
        "tie_word_embeddings": model["tie_word_embeddings"],
    }
