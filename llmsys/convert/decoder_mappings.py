"""Name mappings of decoders: those named as Llama, those with fused queries, keys and values, and
OPT.

Source: the parameter names of the published checkpoints, as transformers reads and writes them.
"""

from llmsys.config.model import ModelConfig
from llmsys.convert.name_mapping import (
    FamilyMapping,
    FusedQkv,
    FusedQkvByHead,
    FusedRows,
    InterleavedGateUp,
    NameMapping,
    SingleRow,
    StackedExperts,
    Transpose,
    TransposedExperts,
    map_fused_module,
    map_modules,
    map_tensors,
)

OURS, LAYER = "blocks.{i}", "model.layers.{i}"
TOP = map_modules({"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"})
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
INDEXER = {"q_b_proj": "wq_b", "k_proj": "wk", "k_norm": "k_norm", "weights_proj": "weights_proj"}
# Computed tables that older files carry along.
TABLES = (r"rotary_emb\.inv_freq$", r"\.attn(ention)?\.(masked_)?bias$")


def _map_attention(block: str = OURS, layer: str = LAYER) -> tuple[NameMapping, ...]:
    plain = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "q_norm",
        "k_norm",
        "q_a_proj",
        "q_b_proj",
        "kv_b_proj",
    )
    names = {f"{block}.attention.{one}": f"{layer}.self_attn.{one}" for one in plain}
    names |= {
        f"{block}.attention.indexer.{ours}": f"{layer}.self_attn.indexer.{theirs}"
        for ours, theirs in INDEXER.items()
    }
    names[f"{block}.attention.q_a_norm"] = f"{layer}.self_attn.q_a_layernorm"
    names[f"{block}.attention.kv_a_norm"] = f"{layer}.self_attn.kv_a_layernorm"
    names[f"{block}.attention.kv_a_proj"] = f"{layer}.self_attn.kv_a_proj_with_mqa"
    return map_modules(names) + map_tensors(
        {f"{block}.attention.sinks": f"{layer}.self_attn.sinks"}
    )


def _map_gated_feed_forward(ours: str, theirs: str) -> tuple[NameMapping, ...]:
    return map_modules(
        {f"{ours}.{one}_proj": f"{theirs}.{one}_proj" for one in ("gate", "up", "down")}
    )


def _map_pre_norms(block: str = OURS, layer: str = LAYER) -> tuple[NameMapping, ...]:
    first, second = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
    return map_modules({f"{block}.attention_norm": first, f"{block}.feed_forward_norm": second})


def _map_experts(block: str, theirs: str, names: tuple[str, str, str]) -> tuple[NameMapping, ...]:
    """Return the mapping of experts: one matrix (out, in) each in theirs, a stack of (in, out) in
    ours.

    `names` are those of gate, up and down.
    """
    ours = f"{block}.feed_forward.experts"
    gate_up_down = zip(("gate", "up", "down"), names, strict=True)
    return map_tensors(
        {f"{ours}.{one}_proj": f"{theirs}.{{e}}.{name}.weight" for one, name in gate_up_down},
        Transpose(),
    )


def _map_moe(shared: str, block: str = OURS, layer: str = LAYER) -> tuple[NameMapping, ...]:
    """Return the mixtures of experts of Qwen, DeepSeek, GLM and OLMoE, whose shared expert is
    called `shared`.
    """
    ours, theirs = f"{block}.feed_forward", f"{layer}.mlp"
    return (
        map_modules(
            {
                f"{ours}.router": f"{theirs}.gate",
                f"{ours}.shared_gate": f"{theirs}.shared_expert_gate",
            }
        )
        + _map_gated_feed_forward(f"{ours}.shared", f"{theirs}.{shared}")
        + _map_experts(block, f"{theirs}.experts", ("gate_proj", "up_proj", "down_proj"))
    )


def _map_correction_bias(block: str = OURS, layer: str = LAYER) -> tuple[NameMapping, ...]:
    """Return the bias that balances the load of DeepSeek-V3's and GLM's experts."""
    return map_tensors(
        {f"{block}.feed_forward.balance_bias_E": f"{layer}.mlp.gate.e_score_correction_bias"}
    )


BLOCKS = (
    _map_pre_norms()
    + _map_attention()
    + _map_gated_feed_forward(f"{OURS}.feed_forward", f"{LAYER}.mlp")
)
LLAMA = FamilyMapping(TOP + BLOCKS, copies=TIED, ignored=TABLES)

STARCODER2 = FamilyMapping(
    TOP
    + _map_pre_norms()
    + _map_attention()
    + map_modules(
        {
            f"{OURS}.feed_forward.up_proj": f"{LAYER}.mlp.c_fc",
            f"{OURS}.feed_forward.down_proj": f"{LAYER}.mlp.c_proj",
        }
    ),
    copies=TIED,
    ignored=TABLES,
)
# Command A normalizes once for both branches.
COHERE2 = FamilyMapping(
    TOP
    + map_modules({f"{OURS}.attention_norm": f"{LAYER}.input_layernorm"})
    + _map_attention()
    + _map_gated_feed_forward(f"{OURS}.feed_forward", f"{LAYER}.mlp"),
    copies=TIED,
    ignored=TABLES,
)

SANDWICH = map_modules(
    {
        f"{OURS}.attention_norm": f"{LAYER}.input_layernorm",
        f"{OURS}.attention_output_norm": f"{LAYER}.post_attention_layernorm",
        f"{OURS}.feed_forward_norm": f"{LAYER}.pre_feedforward_layernorm",
        f"{OURS}.feed_forward_output_norm": f"{LAYER}.post_feedforward_layernorm",
    }
)
# Gemma 2 and 3 have all four norms, OLMo 2 those of the outputs; the names are the same.
GEMMA = OLMO2 = FamilyMapping(
    TOP
    + SANDWICH
    + _map_attention()
    + _map_gated_feed_forward(f"{OURS}.feed_forward", f"{LAYER}.mlp"),
    copies=TIED,
    ignored=TABLES,
)

PREDICTION, NEXT = "prediction.{i}", "model.layers.{n}"
PREDICTED = (
    map_modules(
        {
            f"{PREDICTION}.embedding_norm": f"{NEXT}.enorm",
            f"{PREDICTION}.hidden_norm": f"{NEXT}.hnorm",
            f"{PREDICTION}.projection": f"{NEXT}.eh_proj",
            f"{PREDICTION}.norm": f"{NEXT}.shared_head.norm",
        }
    )
    + _map_pre_norms(f"{PREDICTION}.block", NEXT)
    + _map_attention(f"{PREDICTION}.block", NEXT)
    + _map_gated_feed_forward(f"{PREDICTION}.block.feed_forward", f"{NEXT}.mlp")
    + _map_moe("shared_experts", f"{PREDICTION}.block", NEXT)
    + _map_correction_bias(f"{PREDICTION}.block", NEXT)
)
DEEPSEEK_V2 = FamilyMapping(TOP + BLOCKS + _map_moe("shared_experts"), copies=TIED, ignored=TABLES)
DEEPSEEK = FamilyMapping(
    DEEPSEEK_V2.rules + _map_correction_bias() + PREDICTED,
    copies=TIED
    | {
        f"{NEXT}.embed_tokens.weight": "model.embed_tokens.weight",
        f"{NEXT}.shared_head.head.weight": "lm_head.weight",
    },
    ignored=TABLES,
)
ERNIE_MOE = FamilyMapping(
    DEEPSEEK_V2.rules
    + map_tensors(
        {
            f"{OURS}.feed_forward.balance_bias_E": (
                f"{LAYER}.mlp.moe_statics.e_score_correction_bias"
            )
        },
        SingleRow(),
    ),
    copies=TIED,
    ignored=TABLES,
)
QWEN_MOE = FamilyMapping(TOP + BLOCKS + _map_moe("shared_expert"), copies=TIED, ignored=TABLES)

MIXTURE = f"{LAYER}.block_sparse_moe"
MIXTRAL = FamilyMapping(
    TOP
    + BLOCKS
    + map_modules({f"{OURS}.feed_forward.router": f"{MIXTURE}.gate"})
    + _map_experts(OURS, f"{MIXTURE}.experts", ("w1", "w3", "w2")),
    copies=TIED,
    ignored=TABLES,
)

# Granite's experts are three tensors for all of them.
GRANITE_EXPERTS = (
    *map_modules({f"{OURS}.feed_forward.router": f"{MIXTURE}.router.layer"}),
    NameMapping(
        (f"{OURS}.feed_forward.experts.gate_proj", f"{OURS}.feed_forward.experts.up_proj"),
        (f"{MIXTURE}.input_linear.weight",),
        TransposedExperts(parts=2),
    ),
    NameMapping(
        (f"{OURS}.feed_forward.experts.down_proj",),
        (f"{MIXTURE}.output_linear.weight",),
        TransposedExperts(),
    ),
)
GRANITE_MOE = FamilyMapping(
    TOP + _map_pre_norms() + _map_attention() + GRANITE_EXPERTS, copies=TIED, ignored=TABLES
)

MINIMAX_M2 = FamilyMapping(
    MIXTRAL.rules
    + map_tensors({f"{OURS}.feed_forward.balance_bias_E": f"{MIXTURE}.e_score_correction_bias"}),
    copies=TIED,
    ignored=TABLES,
)

_FUSED_MLP = map_fused_module(
    tuple(f"{OURS}.feed_forward.{one}_proj" for one in ("gate", "up")),
    f"{LAYER}.mlp.gate_up_proj",
    FusedRows(),
) + map_modules({f"{OURS}.feed_forward.down_proj": f"{LAYER}.mlp.down_proj"})
GLM = FamilyMapping(
    TOP + _map_pre_norms() + _map_attention() + _FUSED_MLP, copies=TIED, ignored=TABLES
)
GLM4 = FamilyMapping(
    TOP
    + map_modules(
        {
            f"{OURS}.attention_norm": f"{LAYER}.input_layernorm",
            f"{OURS}.attention_output_norm": f"{LAYER}.post_self_attn_layernorm",
            f"{OURS}.feed_forward_norm": f"{LAYER}.post_attention_layernorm",
            f"{OURS}.feed_forward_output_norm": f"{LAYER}.post_mlp_layernorm",
        }
    )
    + _map_attention()
    + _FUSED_MLP,
    copies=TIED,
    ignored=TABLES,
)

_OSS, _OSS_THEIRS = f"{OURS}.feed_forward.experts", f"{LAYER}.mlp.experts"
GPT_OSS = FamilyMapping(
    TOP
    + BLOCKS
    + map_modules({f"{OURS}.feed_forward.router": f"{LAYER}.mlp.router"})
    + map_tensors(
        {
            f"{_OSS}.down_proj": f"{_OSS_THEIRS}.down_proj",
            f"{_OSS}.down_bias": f"{_OSS_THEIRS}.down_proj_bias",
        }
    )
    + (
        NameMapping(
            (f"{_OSS}.gate_proj", f"{_OSS}.up_proj"),
            (f"{_OSS_THEIRS}.gate_up_proj",),
            InterleavedGateUp(),
        ),
        NameMapping(
            (f"{_OSS}.gate_bias", f"{_OSS}.up_bias"),
            (f"{_OSS_THEIRS}.gate_up_proj_bias",),
            InterleavedGateUp(),
        ),
    ),
    copies=TIED,
)


QKV = tuple(f"{OURS}.attention.{one}_proj" for one in "qkv")

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
    """Return Falcon's mapping. Two norms before parallel branches have their own names."""
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
        {
            f"{_EXPERTS}.gate_proj": f"{_DBRX_EXPERTS}.w1",
            f"{_EXPERTS}.up_proj": f"{_DBRX_EXPERTS}.v1",
        },
        StackedExperts(),
    )
    + map_tensors({f"{_EXPERTS}.down_proj": f"{_DBRX_EXPERTS}.w2"}, StackedExperts(down=True)),
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    ignored=TABLES,
)

_MPT = "transformer.blocks.{i}"
MPT = FamilyMapping(
    map_modules(
        {
            "embed": "transformer.wte",
            "norm": "transformer.norm_f",
            "head": "lm_head",
            f"{OURS}.attention_norm": f"{_MPT}.norm_1",
            f"{OURS}.feed_forward_norm": f"{_MPT}.norm_2",
            f"{OURS}.attention.o_proj": f"{_MPT}.attn.out_proj",
            f"{OURS}.feed_forward.up_proj": f"{_MPT}.ffn.up_proj",
            f"{OURS}.feed_forward.down_proj": f"{_MPT}.ffn.down_proj",
        }
    )
    + map_fused_module(QKV, f"{_MPT}.attn.Wqkv", FusedQkv()),
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
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
