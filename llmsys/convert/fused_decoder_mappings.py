"""Name mappings of the decoders with fused queries, keys and values, and of OPT.

Source: the parameter names of the published checkpoints, as transformers reads and writes them.
"""

from llmsys.config.model import ModelConfig
from llmsys.convert.name_mapping import FamilyMapping, map_fused_module, map_modules, map_tensors
from llmsys.convert.tensor_transform import FusedQkv, FusedQkvByHead, StackedExperts, Transpose

OURS = "blocks.{i}"
QKV = tuple(f"{OURS}.attention.{one}_proj" for one in "qkv")
# Masks that older files carry along.
TABLES = (r"rotary_emb\.inv_freq$", r"\.attn(ention)?\.(masked_)?bias$")

_GPT2 = "transformer.h.{i}"
GPT2 = FamilyMapping(
    map_modules(
        {
            "embed": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
            f"{OURS}.attention_norm": f"{_GPT2}.ln_1",
            f"{OURS}.feed_forward_norm": f"{_GPT2}.ln_2",
        }
    )
    + map_fused_module(QKV, f"{_GPT2}.attn.c_attn", FusedQkv(transposed=True))
    + map_modules(
        {
            f"{OURS}.attention.o_proj": f"{_GPT2}.attn.c_proj",
            f"{OURS}.feed_forward.up_proj": f"{_GPT2}.mlp.c_fc",
            f"{OURS}.feed_forward.down_proj": f"{_GPT2}.mlp.c_proj",
        },
        Transpose(),
    ),
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    ignored=TABLES,
)

_NEOX = "gpt_neox.layers.{i}"
GPT_NEOX = FamilyMapping(
    map_modules(
        {
            "embed": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
            f"{OURS}.attention_norm": f"{_NEOX}.input_layernorm",
            f"{OURS}.feed_forward_norm": f"{_NEOX}.post_attention_layernorm",
            f"{OURS}.attention.o_proj": f"{_NEOX}.attention.dense",
            f"{OURS}.feed_forward.up_proj": f"{_NEOX}.mlp.dense_h_to_4h",
            f"{OURS}.feed_forward.down_proj": f"{_NEOX}.mlp.dense_4h_to_h",
        }
    )
    + map_fused_module(QKV, f"{_NEOX}.attention.query_key_value", FusedQkvByHead()),
    prefix="gpt_neox.",
    copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
    ignored=TABLES,
)


def _build_bloom_mapping(first_norm: str, second_norm: str) -> FamilyMapping:
    """Return the mapping of BLOOM or Falcon, which differ in the names of their norms."""
    theirs = "transformer.h.{i}"
    return FamilyMapping(
        map_modules(
            {
                "embed": "transformer.word_embeddings",
                "embedding_norm": "transformer.word_embeddings_layernorm",
                "norm": "transformer.ln_f",
                "head": "lm_head",
                f"{OURS}.attention_norm": f"{theirs}.{first_norm}",
                f"{OURS}.feed_forward_norm": f"{theirs}.{second_norm}",
                f"{OURS}.attention.o_proj": f"{theirs}.self_attention.dense",
                f"{OURS}.feed_forward.up_proj": f"{theirs}.mlp.dense_h_to_4h",
                f"{OURS}.feed_forward.down_proj": f"{theirs}.mlp.dense_4h_to_h",
            }
        )
        + map_fused_module(QKV, f"{theirs}.self_attention.query_key_value", FusedQkvByHead()),
        prefix="transformer.",
        copies={"lm_head.weight": "transformer.word_embeddings.weight"},
        ignored=TABLES,
    )


BLOOM = _build_bloom_mapping("input_layernorm", "post_attention_layernorm")


def build_falcon_mapping(model: ModelConfig) -> FamilyMapping:
    """Return Falcon's mapping. Two norms before parallel branches have names of their own."""
    two = model.residual.kind == "parallel" and model.residual.norms == 2
    return _build_bloom_mapping("ln_attn", "ln_mlp") if two else BLOOM


_DBRX = "transformer.blocks.{i}"
_EXPERTS, _DBRX_EXPERTS = f"{OURS}.feed_forward.experts", f"{_DBRX}.ffn.experts.mlp"
DBRX = FamilyMapping(
    map_modules(
        {
            "embed": "transformer.wte",
            "norm": "transformer.norm_f",
            "head": "lm_head",
            f"{OURS}.attention_norm": f"{_DBRX}.norm_attn_norm.norm_1",
            f"{OURS}.feed_forward_norm": f"{_DBRX}.norm_attn_norm.norm_2",
            f"{OURS}.attention.o_proj": f"{_DBRX}.norm_attn_norm.attn.out_proj",
            f"{OURS}.feed_forward.router": f"{_DBRX}.ffn.router.layer",
        }
    )
    + map_fused_module(QKV, f"{_DBRX}.norm_attn_norm.attn.Wqkv", FusedQkv())
    + map_tensors(
        {f"{_EXPERTS}.gate_proj": f"{_DBRX_EXPERTS}.w1", f"{_EXPERTS}.up_proj": f"{_DBRX_EXPERTS}.v1"}, StackedExperts()
    )
    + map_tensors({f"{_EXPERTS}.down_proj": f"{_DBRX_EXPERTS}.w2"}, StackedExperts(down=True)),
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    ignored=TABLES,
)

_OPT = "model.decoder.layers.{i}"
OPT = FamilyMapping(
    map_modules(
        {
            "embed": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "norm": "model.decoder.final_layer_norm",
            "head": "lm_head",
            f"{OURS}.attention_norm": f"{_OPT}.self_attn_layer_norm",
            f"{OURS}.feed_forward_norm": f"{_OPT}.final_layer_norm",
            f"{OURS}.attention.o_proj": f"{_OPT}.self_attn.out_proj",
            f"{OURS}.feed_forward.up_proj": f"{_OPT}.fc1",
            f"{OURS}.feed_forward.down_proj": f"{_OPT}.fc2",
        }
        | {f"{OURS}.attention.{one}_proj": f"{_OPT}.self_attn.{one}_proj" for one in "qkv"}
    ),
    prefix="model.",
    copies={"lm_head.weight": "model.decoder.embed_tokens.weight"},
)
