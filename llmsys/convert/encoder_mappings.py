"""Name mappings of the encoders and the encoder-decoders.

Source: the parameter names of the published checkpoints, as transformers reads and writes them.
"""

from llmsys.config.model import ModelConfig
from llmsys.convert.name_mapping import (
    ConvolutionWeight,
    FamilyMapping,
    NameMapping,
    SingleRow,
    map_modules,
    map_tensors,
)

OURS, ENCODER = "blocks.{i}", "encoder.blocks.{i}"
POSITION_IDS = (r"embeddings\.position_ids$",)


def _map_bert_body(prefix: str) -> tuple[NameMapping, ...]:
    layer = f"{prefix}encoder.layer.{{i}}"
    return map_modules(
        {
            "embed": f"{prefix}embeddings.word_embeddings",
            "positions": f"{prefix}embeddings.position_embeddings",
            "token_types": f"{prefix}embeddings.token_type_embeddings",
            "embedding_norm": f"{prefix}embeddings.LayerNorm",
            f"{OURS}.attention.q_proj": f"{layer}.attention.self.query",
            f"{OURS}.attention.k_proj": f"{layer}.attention.self.key",
            f"{OURS}.attention.v_proj": f"{layer}.attention.self.value",
            f"{OURS}.attention.o_proj": f"{layer}.attention.output.dense",
            f"{OURS}.attention_norm": f"{layer}.attention.output.LayerNorm",
            f"{OURS}.feed_forward.up_proj": f"{layer}.intermediate.dense",
            f"{OURS}.feed_forward.down_proj": f"{layer}.output.dense",
            f"{OURS}.feed_forward_norm": f"{layer}.output.LayerNorm",
        }
    )


# TensorFlow's names, which the first BERT files kept
OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def build_bert_mapping(model: ModelConfig) -> FamilyMapping:
    """Return BERT's mapping. Files of the bare model have no `bert.` prefix."""
    prefix = "" if model.head.kind == "features" else "bert."
    heads = map_modules(
        {
            "head.dense": "cls.predictions.transform.dense",
            "head.norm": "cls.predictions.transform.LayerNorm",
            "pooler": f"{prefix}pooler.dense",
            "next_sentence": "cls.seq_relationship",
            "classifier": "classifier",
        }
    ) + map_tensors(
        {"head.weight": "cls.predictions.decoder.weight", "head.bias": "cls.predictions.bias"}
    )
    copies = {
        "cls.predictions.decoder.weight": f"{prefix}embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    return FamilyMapping(
        _map_bert_body(prefix) + heads, copies=copies, ignored=POSITION_IDS, aliases=OLD_NORMS
    )


def build_roberta_mapping(model: ModelConfig) -> FamilyMapping:
    """Return RoBERTa's mapping: BERT's with other heads; the classifier holds the pooler."""
    prefix = "" if model.head.kind == "features" else "roberta."
    classifies = model.head.kind == "classification"
    heads = map_modules(
        {
            "head.dense": "lm_head.dense",
            "head.norm": "lm_head.layer_norm",
            "pooler": "classifier.dense" if classifies else f"{prefix}pooler.dense",
            "classifier": "classifier.out_proj",
        }
    ) + map_tensors({"head.weight": "lm_head.decoder.weight", "head.bias": "lm_head.bias"})
    copies = {
        "lm_head.decoder.weight": f"{prefix}embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }
    return FamilyMapping(
        _map_bert_body(prefix) + heads, copies=copies, ignored=POSITION_IDS, aliases=OLD_NORMS
    )


def build_roformer_mapping(model: ModelConfig) -> FamilyMapping:
    """Return RoFormer's mapping: BERT's without positions, whose table of sines is computed."""
    heads = map_modules(
        {
            "head.dense": "cls.predictions.transform.dense",
            "head.norm": "cls.predictions.transform.LayerNorm",
        }
    ) + map_tensors(
        {"head.weight": "cls.predictions.decoder.weight", "head.bias": "cls.predictions.bias"}
    )
    copies = {
        "cls.predictions.decoder.weight": "roformer.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    return FamilyMapping(
        _map_bert_body("roformer.") + heads,
        copies=copies,
        ignored=(*POSITION_IDS, r"encoder\.embed_positions\.weight$"),
    )


def build_vit_mapping(model: ModelConfig) -> FamilyMapping:
    """Return ViT's mapping. Files of the bare model have no `vit.` prefix."""
    prefix = "" if model.head.kind == "features" else "vit."
    layer, embeddings = f"{prefix}encoder.layer.{{i}}", f"{prefix}embeddings"
    modules = map_modules(
        {
            f"{OURS}.attention.q_proj": f"{layer}.attention.attention.query",
            f"{OURS}.attention.k_proj": f"{layer}.attention.attention.key",
            f"{OURS}.attention.v_proj": f"{layer}.attention.attention.value",
            f"{OURS}.attention.o_proj": f"{layer}.attention.output.dense",
            f"{OURS}.attention_norm": f"{layer}.layernorm_before",
            f"{OURS}.feed_forward.up_proj": f"{layer}.intermediate.dense",
            f"{OURS}.feed_forward.down_proj": f"{layer}.output.dense",
            f"{OURS}.feed_forward_norm": f"{layer}.layernorm_after",
            "norm": f"{prefix}layernorm",
            "pooler": f"{prefix}pooler.dense",
            "classifier": "classifier",
        }
    )
    tensors = (
        NameMapping(
            ("embed.weight",),
            (f"{embeddings}.patch_embeddings.projection.weight",),
            ConvolutionWeight(),
        ),
        NameMapping(("embed.bias",), (f"{embeddings}.patch_embeddings.projection.bias",)),
        NameMapping(("embed.class_token",), (f"{embeddings}.cls_token",), SingleRow(dims=2)),
        NameMapping(("positions.weight",), (f"{embeddings}.position_embeddings",), SingleRow()),
    )
    return FamilyMapping(modules + tensors)


def _map_t5_stack(ours: str, stack: str, feed_forward_place: int) -> tuple[NameMapping, ...]:
    layer = f"{stack}.block.{{i}}.layer"
    block, feed_forward = f"{ours}blocks.{{i}}", f"{layer}.{feed_forward_place}"
    names = {f"{block}.attention.{one}_proj": f"{layer}.0.SelfAttention.{one}" for one in "qkvo"}
    names |= {
        f"{block}.attention_norm": f"{layer}.0.layer_norm",
        f"{block}.feed_forward_norm": f"{feed_forward}.layer_norm",
        f"{block}.feed_forward.down_proj": f"{feed_forward}.DenseReluDense.wo",
        f"{ours}relative_bias": f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{ours}norm": f"{stack}.final_layer_norm",
    }
    return map_modules(names)


def build_t5_mapping(model: ModelConfig) -> FamilyMapping:
    """Return T5's mapping. With a gate, wi_0 is the gate and wi_1 the up projection; without one
    there is only wi.
    """
    gated = model.feed_forward.kind in ("swiglu", "geglu", "geglu_tanh")
    decoder = "decoder.block.{i}.layer"
    names = {
        f"{OURS}.cross_attention.{one}_proj": f"{decoder}.1.EncDecAttention.{one}" for one in "qkvo"
    }
    names |= {
        f"{OURS}.cross_attention_norm": f"{decoder}.1.layer_norm",
        "embed": "shared",
        "head": "lm_head",
    }
    for block, layer in ((OURS, f"{decoder}.2"), (ENCODER, "encoder.block.{i}.layer.1")):
        names[f"{block}.feed_forward.gate_proj"] = f"{layer}.DenseReluDense.wi_0"
        names[f"{block}.feed_forward.up_proj"] = (
            f"{layer}.DenseReluDense.wi_1" if gated else f"{layer}.DenseReluDense.wi"
        )
    copies = dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
    )
    if model.tie_word_embeddings:
        copies["lm_head.weight"] = "shared.weight"
    # Early T5 files hold a table in the cross attention that was never used.
    unused = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",)
    return FamilyMapping(
        map_modules(names)
        + _map_t5_stack("", "decoder", 2)
        + _map_t5_stack("encoder.", "encoder", 1),
        "",
        copies,
        unused,
    )


def _map_bart_stack(ours: str, stack: str) -> tuple[NameMapping, ...]:
    block, layer = f"{ours}blocks.{{i}}", f"{stack}.layers.{{i}}"
    names = {f"{block}.attention.{one}_proj": f"{layer}.self_attn.{one}_proj" for one in "qkv"}
    names |= {
        f"{block}.cross_attention.{one}_proj": f"{layer}.encoder_attn.{one}_proj" for one in "qkv"
    }
    return map_modules(
        names
        | {
            f"{block}.attention.o_proj": f"{layer}.self_attn.out_proj",
            f"{block}.cross_attention.o_proj": f"{layer}.encoder_attn.out_proj",
            f"{block}.attention_norm": f"{layer}.self_attn_layer_norm",
            f"{block}.cross_attention_norm": f"{layer}.encoder_attn_layer_norm",
            f"{block}.feed_forward_norm": f"{layer}.final_layer_norm",
            f"{block}.feed_forward.up_proj": f"{layer}.fc1",
            f"{block}.feed_forward.down_proj": f"{layer}.fc2",
            f"{ours}positions": f"{stack}.embed_positions",
            f"{ours}embedding_norm": f"{stack}.layernorm_embedding",
            f"{ours}norm": f"{stack}.layer_norm",
        }
    )


def build_bart_mapping(model: ModelConfig) -> FamilyMapping:
    """Return BART's and Marian's mapping. A separate source vocabulary splits the shared
    embedding.
    """
    shared = model.embedding.source_vocab_size is None
    encoder, decoder = "model.encoder.embed_tokens", "model.decoder.embed_tokens"
    names = {
        "embed": "model.shared" if shared else decoder,
        "source_embed": encoder,
        "head": "lm_head",
    }
    copies = (
        {f"{one}.weight": "model.shared.weight" for one in (encoder, decoder)} if shared else {}
    )
    if model.tie_word_embeddings:
        copies["lm_head.weight"] = f"{names['embed']}.weight"
    rules = map_modules(names) + map_tensors(
        {"head.fixed_bias_V": "final_logits_bias"}, SingleRow()
    )
    stacks = _map_bart_stack("", "model.decoder") + _map_bart_stack("encoder.", "model.encoder")
    # Sinusoids, which Marian's older files carry along.
    return FamilyMapping(rules + stacks, "model.", copies, (r"embed_positions\.weight$",))
