"""Reader and writer of the T5 family: T5, T5 1.1, Flan-T5."""

from llmsys.config.hugging_face.config_json import ConfigJsonReader
from llmsys.config.hugging_face.seq2seq import check_encoder_decoder_keys
from llmsys.config.hugging_face.shared_fields import ACTIVATIONS, GATED, Values, get_activation_name, read_architecture


def read_t5(fields: ConfigJsonReader) -> Values:
    """Read T5 and T5 1.1: relative positions, no biases, unscaled scores.

    `tie_word_embeddings: false` (T5 1.1, Flan-T5) gives the head its own matrix, as in the published weights, and
    unscaled logits. `scale_decoder_outputs` overrides the scaling only.
    """
    check_encoder_decoder_keys(fields)
    read_architecture(fields, {"T5ForConditionalGeneration": "lm", "T5WithLMHeadModel": "lm"}, "lm")
    tied = fields.read_bool("tie_word_embeddings") if "tie_word_embeddings" in fields.values else True
    scaled = fields.read_bool("scale_decoder_outputs") if "scale_decoder_outputs" in fields.values else tied
    fields.ignore_keys("tie_word_embeddings", "scale_decoder_outputs")
    fields.defaults = fields.defaults | {"n_positions": 512}
    layers = fields.read_int("num_layers", "num_hidden_layers")
    rate, size = fields.read_float("dropout_rate"), fields.read_positive_float("initializer_factor")
    buckets, furthest = (
        fields.read_int("relative_attention_num_buckets"),
        fields.read_int("relative_attention_max_distance"),
    )
    start = fields.read_optional_int("decoder_start_token_id")
    places = ("embedding", "residual", "attention", "activation", "final")
    return {
        "family": "encoder_decoder",
        "vocab_size": fields.read_int("vocab_size"),
        "hidden_size": fields.read_int("d_model", "hidden_size"),
        "intermediate_size": fields.read_int("d_ff"),
        "num_hidden_layers": fields.read_optional_int("num_decoder_layers") or layers,
        "num_attention_heads": fields.read_int("num_heads", "num_attention_heads"),
        "head_dim": fields.read_int("d_kv", "head_dim"),
        "max_position_embeddings": fields.read_int("n_positions"),
        "tie_word_embeddings": tied,
        "norm": {"kind": "rmsnorm", "eps": fields.read_positive_float("layer_norm_epsilon")},
        "position": {"kind": "relative_bias", "buckets": buckets, "max_distance": furthest},
        "attention": {"kind": "multi_head", "scale": 1.0},
        "feed_forward": {"kind": _read_feed_forward_kind(fields)},
        "embedding": {"initializer_range": size},
        "head": {"kind": "lm", "scale": "inverse_sqrt_hidden_size" if scaled else 1.0},
        "dropout": dict.fromkeys(places, rate),
        "encoder": {
            "num_hidden_layers": layers,
            "decoder_start_token_id": start if start is not None else fields.read_optional_int("pad_token_id") or 0,
        },
    }


def _read_feed_forward_kind(fields: ConfigJsonReader) -> str:
    plain = list(ACTIVATIONS)
    gated = [f"gated-{name}" for name, ours in ACTIVATIONS.items() if ours in GATED]
    word = fields.read_choice("feed_forward_proj", [*plain, *gated])
    is_gated, name = word.startswith("gated-"), word.removeprefix("gated-")
    if word == "gated-gelu":  # T5 1.1's, which has always meant the tanh form
        name = "gelu_new"
    fields.require_value("is_gated_act", is_gated, None, why="feed_forward_proj has the opposite value")
    fields.require_value("dense_act_fn", name, None, why="feed_forward_proj has another activation")
    return GATED[ACTIVATIONS[name]] if is_gated else ACTIVATIONS[name]


def write_t5(model: Values) -> Values:
    """Write the fields of `read_t5`."""
    kind = model["feed_forward"]["kind"]
    words = {"geglu_tanh": "gated-gelu", "geglu": "gated-gelu_python", "swiglu": "gated-silu"}
    return {
        "vocab_size": model["vocab_size"],
        "d_model": model["hidden_size"],
        "d_kv": model["head_dim"],
        "d_ff": model["intermediate_size"],
        "num_layers": model["encoder"]["num_hidden_layers"],
        "num_decoder_layers": model["num_hidden_layers"],
        "num_heads": model["num_attention_heads"],
        "n_positions": model["max_position_embeddings"],
        "relative_attention_num_buckets": model["position"]["buckets"],
        "relative_attention_max_distance": model["position"]["max_distance"],
        "dropout_rate": model["dropout"]["residual"],
        "layer_norm_epsilon": model["norm"]["eps"],
        "initializer_factor": model["embedding"]["initializer_range"],
        "feed_forward_proj": words.get(kind) or get_activation_name(kind),
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "decoder_start_token_id": model["encoder"]["decoder_start_token_id"],
        "tie_word_embeddings": model["tie_word_embeddings"],
        "scale_decoder_outputs": model["head"]["scale"] != 1.0,
    }
