"""Stacks and vocabularies of encoder-decoders: fields of config.json that a table of keys cannot
say.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import ACTIVATIONS, GATED, Values, get_activation_name


def read_t5_stacks(fields: ConfigJsonReader, values: Values) -> None:
    """Read the layers of the decoder, and the head.

    `tie_word_embeddings: false` (T5 1.1, Flan-T5) gives the head its own matrix, as in the
    published weights, and unscaled logits. `scale_decoder_outputs` overrides the scaling only.
    """
    given = fields.values
    tied = fields.read_bool("tie_word_embeddings") if "tie_word_embeddings" in given else True
    scaled = fields.read_bool("scale_decoder_outputs") if "scale_decoder_outputs" in given else tied
    fields.ignore_keys("tie_word_embeddings", "scale_decoder_outputs")
    values["tie_word_embeddings"] = tied
    values["head"]["scale"] = "inverse_sqrt_hidden_size" if scaled else 1.0
    layers = fields.read_optional_int("num_decoder_layers")
    values["num_hidden_layers"] = layers or values["encoder"]["num_hidden_layers"]
    start = fields.read_optional_int("decoder_start_token_id")
    padding = fields.read_optional_int("pad_token_id") if start is None else None
    values["encoder"]["decoder_start_token_id"] = padding or 0 if start is None else start


def write_t5_stacks(model: Values, keys: Values) -> None:
    """Write the keys of `read_t5_stacks`."""
    keys["num_decoder_layers"] = model["num_hidden_layers"]
    keys["decoder_start_token_id"] = model["encoder"]["decoder_start_token_id"]
    keys["tie_word_embeddings"] = model["tie_word_embeddings"]
    keys["scale_decoder_outputs"] = model["head"]["scale"] != 1.0


def read_t5_feed_forward(fields: ConfigJsonReader, values: Values) -> None:
    """Read `feed_forward_proj`, such as `relu` or `gated-gelu`, and the keys that repeat it."""
    plain = list(ACTIVATIONS)
    gated = [f"gated-{name}" for name, ours in ACTIVATIONS.items() if ours in GATED]
    word = fields.read_choice("feed_forward_proj", [*plain, *gated])
    is_gated = word.startswith("gated-")
    name = word.removeprefix("gated-")
    if word == "gated-gelu":  # T5 1.1's, which has always meant the tanh form
        name = "gelu_new"
    fields.require_value(
        "is_gated_act", is_gated, None, why="feed_forward_proj has the opposite value"
    )
    fields.require_value("dense_act_fn", name, None, why="feed_forward_proj has another activation")
    kind = ACTIVATIONS[name]
    values["feed_forward"] = {"kind": GATED[kind] if is_gated else kind}


def write_t5_feed_forward(model: Values, keys: Values) -> None:
    """Write the keys of `read_t5_feed_forward`."""
    kind = model["feed_forward"]["kind"]
    words = {"geglu_tanh": "gated-gelu", "geglu": "gated-gelu_python", "swiglu": "gated-silu"}
    keys["feed_forward_proj"] = words.get(kind) or get_activation_name(kind)


def read_encoder_sizes(fields: ConfigJsonReader, values: Values) -> None:
    """Read the sizes of BART's encoder that differ from the decoder's.

    The generic names of these sizes must agree with the `encoder_…` keys.
    """
    sizes = {
        "intermediate_size": fields.read_int("encoder_ffn_dim"),
        "num_attention_heads": fields.read_int("encoder_attention_heads"),
    }
    fields.read_int("encoder_layers", "num_hidden_layers")
    fields.read_int("encoder_attention_heads", "num_attention_heads")
    values["encoder"] |= {name: size for name, size in sizes.items() if size != values[name]}


def write_encoder_sizes(model: Values, keys: Values) -> None:
    """Write the keys of `read_encoder_sizes`."""
    encoder = model["encoder"]
    keys["encoder_ffn_dim"] = encoder["intermediate_size"] or model["intermediate_size"]
    keys["encoder_attention_heads"] = encoder["num_attention_heads"] or model["num_attention_heads"]


def read_two_vocabularies(fields: ConfigJsonReader, values: Values) -> None:
    """Read Marian's vocabularies of source and target, which may be one."""
    source = fields.read_int("vocab_size")
    target = fields.read_optional_int("decoder_vocab_size") or source
    values["vocab_size"] = target
    if not fields.read_bool("share_encoder_decoder_embeddings"):
        values["embedding"]["source_vocab_size"] = source
    elif not values["tie_word_embeddings"]:
        fields.add_violation(
            "tie_word_embeddings",
            "false contradicts share_encoder_decoder_embeddings. Set it to true.",
        )
    elif target != source:
        fields.add_violation(
            "decoder_vocab_size",
            f"{target} is not vocab_size={source}, and they share one matrix.",
        )


def write_two_vocabularies(model: Values, keys: Values) -> None:
    """Write the keys of `read_two_vocabularies`."""
    source = model["embedding"]["source_vocab_size"]
    keys["vocab_size"] = source or model["vocab_size"]
    keys["decoder_vocab_size"] = model["vocab_size"]
    keys["share_encoder_decoder_embeddings"] = source is None
    # MarianMTModel requires a padding token; the token that starts targets serves as one.
    keys["pad_token_id"] = model["encoder"]["decoder_start_token_id"]
