"""Tables of the decoders that name their tensors as Llama does: the names of their files beside ours.

Source: the parameter names of the published checkpoints, as transformers reads and writes them.
"""

from llmsys.convert.form import GateUpInTurn, Transposed
from llmsys.convert.rule import Rule, Table, modules, tensors

OURS, LAYER = "blocks.{i}", "model.layers.{i}"
TOP = modules({"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"})
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
# Computed tables that older files carry along.
TABLES = (r"rotary_emb\.inv_freq$", r"\.attn(ention)?\.(masked_)?bias$")


def _attention(block: str = OURS, layer: str = LAYER) -> tuple[Rule, ...]:
    plain = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "q_a_proj", "q_b_proj", "kv_b_proj")
    names = {f"{block}.attention.{one}": f"{layer}.self_attn.{one}" for one in plain}
    names[f"{block}.attention.q_a_norm"] = f"{layer}.self_attn.q_a_layernorm"
    names[f"{block}.attention.kv_a_norm"] = f"{layer}.self_attn.kv_a_layernorm"
    names[f"{block}.attention.kv_a_proj"] = f"{layer}.self_attn.kv_a_proj_with_mqa"
    return modules(names) + tensors({f"{block}.attention.sinks": f"{layer}.self_attn.sinks"})


def _gated(ours: str, theirs: str) -> tuple[Rule, ...]:
    return modules({f"{ours}.{one}_proj": f"{theirs}.{one}_proj" for one in ("gate", "up", "down")})


def _pre_norms(block: str = OURS, layer: str = LAYER) -> tuple[Rule, ...]:
    first, second = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
    return modules({f"{block}.attention_norm": first, f"{block}.feed_forward_norm": second})


def _experts(block: str, theirs: str, names: tuple[str, str, str]) -> tuple[Rule, ...]:
    """One matrix (out, in) for each expert beside our stack of (in, out); `names` of gate, up and down."""
    ours = f"{block}.feed_forward.experts"
    gate_up_down = zip(("gate", "up", "down"), names, strict=True)
    return tensors({f"{ours}.{one}_proj": f"{theirs}.{{e}}.{name}.weight" for one, name in gate_up_down}, Transposed())


def _mixture(shared: str, block: str = OURS, layer: str = LAYER) -> tuple[Rule, ...]:
    """The mixtures of Qwen, DeepSeek, GLM and OLMoE, whose shared expert is called `shared`."""
    ours, theirs = f"{block}.feed_forward", f"{layer}.mlp"
    return (
        modules({f"{ours}.router": f"{theirs}.gate", f"{ours}.shared_gate": f"{theirs}.shared_expert_gate"})
        + _gated(f"{ours}.shared", f"{theirs}.{shared}")
        + _experts(block, f"{theirs}.experts", ("gate_proj", "up_proj", "down_proj"))
    )


def _correction(block: str = OURS, layer: str = LAYER) -> tuple[Rule, ...]:
    """The bias that keeps DeepSeek-V3's and GLM's experts evenly loaded."""
    return tensors({f"{block}.feed_forward.balance_bias_E": f"{layer}.mlp.gate.e_score_correction_bias"})


BLOCKS = _pre_norms() + _attention() + _gated(f"{OURS}.feed_forward", f"{LAYER}.mlp")
LLAMA = Table(TOP + BLOCKS, copies=TIED, ignored=TABLES)

SANDWICH = modules(
    {
        f"{OURS}.attention_norm": f"{LAYER}.input_layernorm",
        f"{OURS}.attention_output_norm": f"{LAYER}.post_attention_layernorm",
        f"{OURS}.feed_forward_norm": f"{LAYER}.pre_feedforward_layernorm",
        f"{OURS}.feed_forward_output_norm": f"{LAYER}.post_feedforward_layernorm",
    }
)
# Gemma 2 and 3 have all four norms, OLMo 2 those of the outputs; the names are the same.
GEMMA = OLMO2 = Table(
    TOP + SANDWICH + _attention() + _gated(f"{OURS}.feed_forward", f"{LAYER}.mlp"), copies=TIED, ignored=TABLES
)

PREDICTION, NEXT = "prediction.{i}", "model.layers.{n}"
PREDICTED = (
    modules(
        {
            f"{PREDICTION}.embedding_norm": f"{NEXT}.enorm",
            f"{PREDICTION}.hidden_norm": f"{NEXT}.hnorm",
            f"{PREDICTION}.projection": f"{NEXT}.eh_proj",
            f"{PREDICTION}.norm": f"{NEXT}.shared_head.norm",
        }
    )
    + _pre_norms(f"{PREDICTION}.block", NEXT)
    + _attention(f"{PREDICTION}.block", NEXT)
    + _gated(f"{PREDICTION}.block.feed_forward", f"{NEXT}.mlp")
    + _mixture("shared_experts", f"{PREDICTION}.block", NEXT)
    + _correction(f"{PREDICTION}.block", NEXT)
)
DEEPSEEK_V2 = Table(TOP + BLOCKS + _mixture("shared_experts"), copies=TIED, ignored=TABLES)
DEEPSEEK = Table(
    DEEPSEEK_V2.rules + _correction() + PREDICTED,
    copies=TIED
    | {f"{NEXT}.embed_tokens.weight": "model.embed_tokens.weight", f"{NEXT}.shared_head.head.weight": "lm_head.weight"},
    ignored=TABLES,
)
QWEN_MOE = Table(TOP + BLOCKS + _mixture("shared_expert"), copies=TIED, ignored=TABLES)

MIXTURE = f"{LAYER}.block_sparse_moe"
MIXTRAL = Table(
    TOP
    + BLOCKS
    + modules({f"{OURS}.feed_forward.router": f"{MIXTURE}.gate"})
    + _experts(OURS, f"{MIXTURE}.experts", ("w1", "w3", "w2")),
    copies=TIED,
    ignored=TABLES,
)

_OSS, _OSS_THEIRS = f"{OURS}.feed_forward.experts", f"{LAYER}.mlp.experts"
GPT_OSS = Table(
    TOP
    + BLOCKS
    + modules({f"{OURS}.feed_forward.router": f"{LAYER}.mlp.router"})
    + tensors({f"{_OSS}.down_proj": f"{_OSS_THEIRS}.down_proj", f"{_OSS}.down_bias": f"{_OSS_THEIRS}.down_proj_bias"})
    + (
        Rule((f"{_OSS}.gate_proj", f"{_OSS}.up_proj"), (f"{_OSS_THEIRS}.gate_up_proj",), GateUpInTurn()),
        Rule((f"{_OSS}.gate_bias", f"{_OSS}.up_bias"), (f"{_OSS_THEIRS}.gate_up_proj_bias",), GateUpInTurn()),
    ),
    copies=TIED,
)
