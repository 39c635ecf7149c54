"""The factors: choices that can change a training step, events between steps, and their values.

A value is a label and the settings that it makes. Values of tagged unions and of literals come from
the config itself: a new kind of optimizer, of position or of schedule becomes a value without a
line here, unless it needs settings.

Invariants:
- The first value of a factor is its default: a case shrinks towards it.
- Where a factor does not act, such as the schedule of a model without pipeline, its value counts
  for nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from llmsys.config.run import RunConfig
from llmsys.config.section import SectionType, get_kind, list_section_types

# Factor → label of its value.
Assignment = Mapping[str, str]
# Dotted key of RunConfig → value.
Settings = dict[str, Any]
# Settings, or a function of the assignment where they depend on other factors.
MakeSettings = Callable[[Assignment], Settings]

NONE = "none"


@dataclass(frozen=True)
class Value:
    """One value of a factor.

    Attributes:
        label: its name in cases.
        settings: what it sets, or a function of the assignment.
        needs: values that other factors take with it unless a case says otherwise.
        costs_processes: it takes more processes, so it is taken only where it covers more.
        is_slow: it takes many times the time of a usual case, so the sample leaves it out.
    """

    label: str
    settings: Settings | MakeSettings = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    costs_processes: bool = False
    is_slow: bool = False

    def build_settings(self, assignment: Assignment) -> Settings:
        """Return the settings in a case."""
        return self.settings(assignment) if callable(self.settings) else self.settings


@dataclass(frozen=True)
class Factor:
    """A choice.

    Attributes:
        name: its name in cases.
        values: its values, the default first.
        acts_with: values of other factors without which it does not act.
        path: dotted key of the union or literal that its values come from; empty: none.
        is_event: it is something that happens between steps.
    """

    name: str
    values: tuple[Value, ...]
    acts_with: Mapping[str, frozenset[str]] = field(default_factory=dict)
    path: str = ""
    is_event: bool = False

    @property
    def default(self) -> str:
        """Label of the first value."""
        return self.values[0].label

    def get_value(self, label: str) -> Value:
        """Return the value of a label."""
        return next(value for value in self.values if value.label == label)

    def is_active(self, assignment: Assignment) -> bool:
        """Return whether the factor acts in a case."""
        return all(assignment[name] in labels for name, labels in self.acts_with.items())


def list_choices(path: str) -> tuple[str, ...]:
    """Return the kinds of a union of RunConfig, or the values of a literal, as defined.

    Args:
        path: dotted key, such as `model.moe.balance` or `train.precision`.

    Raises:
        KeyError: RunConfig has no such key.
    """
    owners: list[SectionType] = [RunConfig]
    *parents, last = path.split(".")
    for key in parents:
        fields = [owner.model_fields[key] for owner in owners if key in owner.model_fields]
        owners = [section for found in fields for section in list_section_types(found.annotation)]
    fields = [owner.model_fields[last] for owner in owners if last in owner.model_fields]
    if not fields:
        raise KeyError(path)
    kinds = [
        kind
        for found in fields
        for section in list_section_types(found.annotation)
        if (kind := get_kind(section))
    ]
    literals = [
        str(value)
        for found in fields
        for value in get_args(found.annotation)
        if isinstance(value, str)
    ]
    return tuple(dict.fromkeys(kinds or literals))


def _build_union_factor(
    name: str, path: str, default: str, *special: Value, **options: Any
) -> Factor:
    """Build a factor with a value for each kind of a union; `special` ones replace plain ones."""
    given = {value.label: value for value in special}
    plain = {kind: Value(kind, {path: {"kind": kind}}) for kind in list_choices(path)}
    # An optional union has no kind for its absence.
    values = {NONE: Value(NONE)} | plain | given if default == NONE else plain | given
    kept = {label: value for label, value in values.items() if (name, label) not in LEFT_OUT}
    return Factor(name, (kept.pop(default), *kept.values()), path=path, **options)


def _build_literal_factor(
    name: str, path: str, default: str, *special: Value, **options: Any
) -> Factor:
    given = {value.label: value for value in special}
    values = {one: given.get(one, Value(one, {path: one})) for one in list_choices(path)}
    kept = {label: value for label, value in values.items() if (name, label) not in LEFT_OUT}
    return Factor(name, (kept.pop(default), *kept.values()), path=path, **options)


def _build_factor(name: str, *values: Value, **options: Any) -> Factor:
    return Factor(name, values, **options)


def _build_event(name: str) -> Factor:
    return Factor(name, (Value("no"), Value("yes")), is_event=True)


# (factor, kind) → why no case has it.
LEFT_OUT: dict[tuple[str, str], str] = {
    ("optimizer", "python"): "a class of the user's own has no plain form here",
    ("schedule", "python"): "a class of the user's own has no plain form here",
    ("precision", "auto"): "it is one of the others, by the device",
    ("compile", "auto"): "it is one of the others, by the device",
}

# Key of a union or literal below the sections of a step that no factor has → why.
UNNAMED_CHOICES: dict[str, str] = {
    "tokenizer": "ids are the same to a step whatever made them",
    "data": "follows from the objective; chats and mixtures have runs in tests/llmsys/train",
    "model.head": "follows from the objective; features have no loss",
    "model.moe.expert": "the activations of model.feed_forward, on experts",
    "model.initializer": "both processes begin with the same weights",
    "objective.augmentation": "images have their own runs in tests/llmsys/train",
    "evaluation.tasks": "scored after a step, by the weights that are compared",
    "evaluation.metrics": "computed after a step, from the logits that are compared",
}

ENCODER, DECODER, BOTH = "encoder", "decoder", "encoder_decoder"


def _set_masked(**more: Any) -> Settings:
    return {"model.family": ENCODER, "model.head": {"kind": "mlm"} | more}


def _list_objectives() -> tuple[Value, ...]:
    alone = {"experts": NONE, "residual": "pre"}
    return (
        Value("masked", {"objective.kind": "masked"} | _set_masked()),
        Value(
            "masked_next_sentence",
            {"objective.kind": "masked_next_sentence", "model.embedding.token_types": 2}
            | _set_masked(pooler=True, next_sentence=True),
        ),
        Value(
            "permutation",
            {
                "objective.kind": "permutation",
                "model.family": ENCODER,
                "model.head": {"kind": "permutation"},
            },
            needs={"position": "transformer_xl", "heads": "multi"} | alone,
        ),
        Value(
            "span_corruption",
            {
                "objective.kind": "span_corruption",
                "objective.noise_density": 0.3,
                "model.family": BOTH,
            },
            needs={"scope": "window"},
        ),
        Value(
            "translation",
            {"objective.kind": "translation", "model.family": BOTH, "data.kind": "pairs"},
        ),
        Value(
            "classification",
            {
                "objective.kind": "classification",
                "model.family": ENCODER,
                "model.head": {"kind": "classification", "num_labels": 3},
                "data.kind": "labelled",
            },
        ),
    )


def _set_longformer(assignment: Assignment) -> Settings:
    # A decoder's global tokens would see later ones.
    leading = 0 if assignment["objective"] == "next_token" else 1
    section = {
        "kind": "longformer",
        "windows": [8],
        "dilations": [1, 2],
        "num_global_tokens": leading,
    }
    return {"model.attention": section}


def _list_attention_kinds() -> tuple[Value, ...]:
    latent = {
        "kind": "latent",
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    multi = {"heads": "multi"}
    return (
        Value("latent", {"model.attention": latent}, needs=multi),
        Value("longformer", _set_longformer, needs=multi | {"position": "sinusoidal"}),
        Value(
            "linformer",
            {"model.attention": {"kind": "linformer", "projected_length": 6}},
            needs={"objective": "masked", "scope": "window", "position": "sinusoidal"},
        ),
        Value(
            "lsh",
            {"model.attention": {"kind": "lsh", "chunk_length": 4, "num_hashes": 2}},
            needs=multi | {"position": "learned"},
        ),
        Value(
            "segment_memory",
            {
                "model.attention": {
                    "kind": "segment_memory",
                    "segment_length": 4,
                    "memory_length": 6,
                }
            },
            needs=multi | {"position": "transformer_xl"},
        ),
    )


def _list_scalings() -> tuple[Value, ...]:
    path, grown = "model.position.scaling", {"factor": 2.0, "original_max_position_embeddings": 8}
    # Half the rotated channels of a head: divisors of longrope.
    lists = {
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    return (
        Value("linear", {path: {"kind": "linear", "factor": 2.0}}),
        *(Value(kind, {path: {"kind": kind} | grown}) for kind in ("ntk", "yarn", "llama3")),
        Value("longrope", {path: {"kind": "longrope"} | lists}),
    )


def _list_recurrent_layers() -> tuple[Value, ...]:
    shape = {
        "model.intermediate_size": 0,
        "model.num_attention_heads": 1,
        "model.num_key_value_heads": 1,
        "model.position": {"kind": "none"},
    }
    needs = {"objective": "translation", "experts": NONE, "position": "none", "heads": "multi"}
    return tuple(
        Value(kind, {"model.rnn.kind": kind} | shape, needs) for kind in list_choices("model.rnn")
    )


MODEL_FACTORS = (
    _build_union_factor("objective", "objective", "next_token", *_list_objectives()),
    _build_union_factor("attention", "model.attention", "multi_head", *_list_attention_kinds()),
    _build_factor(
        "heads",
        Value("grouped", {"model.num_key_value_heads": 2}),
        Value("multi", {"model.num_key_value_heads": 4}),
        Value("one", {"model.num_key_value_heads": 1}),
    ),
    _build_factor(
        "queries",
        Value("plain"),
        Value("sinks", {"model.attention.sinks": True}),
        Value("norm of heads", {"model.attention.qk_norm": "head"}),
        Value("norm over heads", {"model.attention.qk_norm": "full"}),
        Value("biases", {"model.attention.qkv_bias": True, "model.attention.output_bias": True}),
        Value("softcap", {"model.attention.logit_softcap": 5.0}),
        Value("clip", {"model.attention.clip": 0.5}),
        acts_with={"attention": frozenset({"multi_head"})},
    ),
    _build_union_factor(
        "position",
        "model.position",
        "rope",
        Value("relative_bias", {"model.position": {"kind": "relative_bias", "buckets": 8}}),
        Value(
            "transformer_xl",
            {"model.position": {"kind": "transformer_xl"}},
            needs={"heads": "multi"},
        ),
    ),
    _build_union_factor(
        "rope scaling",
        "model.position.scaling",
        NONE,
        *_list_scalings(),
        acts_with={"position": frozenset({"rope"}), "attention": frozenset({"multi_head"})},
    ),
    _build_factor(
        "windows",
        Value("full"),
        Value("sliding", {"model.sliding_window": 5}),
        Value(
            "alternating",
            {
                "model.sliding_window": 5,
                "model.layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ),
    _build_union_factor(
        "residual",
        "model.residual",
        "pre",
        Value("reversible", {"model.residual": {"kind": "reversible"}}, needs={"experts": NONE}),
    ),
    _build_union_factor("norm", "model.norm", "rmsnorm"),
    _build_union_factor("feed-forward", "model.feed_forward", "swiglu"),
    _build_factor("tied", Value("no"), Value("yes", {"model.tie_word_embeddings": True})),
    _build_factor(
        "multi-token prediction",
        Value(NONE),
        Value("one", {"model.multi_token_prediction": {"depth": 1, "weight": 0.3}}),
        Value("two", {"model.multi_token_prediction": {"depth": 2, "weight": 0.3}}),
    ),
    _build_union_factor("recurrence", "model.recurrence", NONE),
    _build_union_factor("recurrent layers", "model.rnn", NONE, *_list_recurrent_layers()),
    _build_union_factor(
        "parametrization",
        "model.parametrization",
        "standard",
        Value("mup", {"model.parametrization": {"kind": "mup", "base_hidden_size": 16}}),
        Value(
            "complete_p",
            {
                "model.parametrization": {
                    "kind": "complete_p",
                    "base_hidden_size": 16,
                    "base_num_hidden_layers": 1,
                }
            },
        ),
    ),
)

MOE: Settings = {
    "model.moe.num_experts": 4,
    "model.moe.num_experts_per_tok": 2,
    "model.moe.moe_intermediate_size": 16,
}
HAS_EXPERTS = {"experts": frozenset({"all", "after the first", "every second"})}

EXPERT_FACTORS = (
    _build_factor(
        "experts",
        Value(NONE),
        Value("all", MOE),
        Value("after the first", MOE | {"model.moe.first_dense_layers": 1}),
        Value("every second", MOE | {"model.moe.every": 2}),
    ),
    _build_union_factor(
        "routing",
        "model.moe.routing",
        "token_choice",
        Value("capacity", {"model.moe.routing": {"kind": "capacity", "factor": 0.7}}),
        Value(
            "capacity of documents",
            {"model.moe.routing": {"kind": "capacity", "factor": 0.7, "scope": "document"}},
        ),
        Value("expert_choice", {"model.moe.routing": {"kind": "expert_choice", "factor": 1.5}}),
        acts_with=HAS_EXPERTS,
    ),
    _build_union_factor(
        "balance",
        "model.moe.balance",
        "bias",
        Value("bias", {"model.moe.balance": {"kind": "bias", "rate": 0.01}}),
        Value(
            "bias and loss",
            {"model.moe.balance": {"kind": "bias", "rate": 0.01, "sequence_weight": 0.5}},
        ),
        Value("auxiliary_loss", {"model.moe.balance": {"kind": "auxiliary_loss", "weight": 0.5}}),
        Value(
            "loss of sequences",
            {"model.moe.balance": {"kind": "auxiliary_loss", "weight": 0.5, "scope": "sequence"}},
        ),
        acts_with=HAS_EXPERTS,
    ),
    _build_factor(
        "shared experts",
        Value(NONE),
        Value("one", {"model.moe.num_shared_experts": 1}),
        Value("gated", {"model.moe.num_shared_experts": 1, "model.moe.shared_gate": True}),
        acts_with=HAS_EXPERTS,
    ),
    _build_literal_factor("router score", "model.moe.score", "softmax", acts_with=HAS_EXPERTS),
    _build_factor(
        "expert groups",
        Value(NONE),
        Value("best", {"model.moe.groups": {"num_groups": 2, "groups_per_token": 1}}),
        Value(
            "best two",
            {"model.moe.groups": {"num_groups": 2, "groups_per_token": 1, "score": "top2"}},
        ),
        acts_with=HAS_EXPERTS,
    ),
    _build_factor(
        "router z",
        Value(NONE),
        Value("on", {"model.moe.z_loss_weight": 0.1}),
        acts_with=HAS_EXPERTS,
    ),
    _build_factor(
        "expert biases",
        Value(NONE),
        Value(
            "on",
            {
                "model.moe.router_bias": True,
                "model.moe.expert": {"kind": "clamped_swiglu", "bias": True},
            },
        ),
        acts_with=HAS_EXPERTS,
    ),
)

# Sequences of a step; a micro-batch has at most half of those of a rank where 4 ranks share a step.
SEQUENCES, LENGTH = 8, 16
STEP_TOKENS = SEQUENCES * LENGTH


def _set_ramp(kind: str, **more: Any) -> Settings:
    return {"batch.ramp": {"kind": kind, "start_tokens": STEP_TOKENS // 2} | more}


MIDDLE = {"batch.fill_in_middle": {"rate": 0.7}}

BATCH_FACTORS = (
    _build_literal_factor("packing", "batch.packing", "concatenate"),
    _build_factor(
        "fill in the middle", Value(NONE), Value("on", MIDDLE, needs={"packing": "best_fit"})
    ),
    _build_literal_factor("scope", "batch.attention_scope", "document"),
    _build_literal_factor("window order", "batch.window_order", "shuffled"),
    _build_literal_factor("assignment", "batch.assignment", "sequential"),
    _build_union_factor(
        "ramp",
        "batch.ramp",
        NONE,
        Value("linear", _set_ramp("linear", ramp_tokens=4 * STEP_TOKENS)),
        Value("noise_scale", _set_ramp("noise_scale", doubled_after_steps=[4])),
    ),
    _build_factor(
        "length stages",
        Value(NONE),
        Value(
            "on",
            {
                "batch.length_stages": [
                    {"until_tokens": 4 * STEP_TOKENS, "sequence_length": LENGTH // 2}
                ]
            },
        ),
    ),
    # Pairs and texts have a bucket for each micro-batch.
    _build_factor(
        "accumulation",
        Value("2 sequences", {"batch.micro_sequences": 2, "batch.num_length_buckets": 4}),
        Value("1 sequence", {"batch.micro_sequences": 1, "batch.num_length_buckets": 8}),
        Value("all sequences", {"batch.micro_sequences": 0, "batch.num_length_buckets": 1}),
    ),
)

FSDP = {"engine": frozenset({"fsdp"})}
PIPELINE = {"pipeline": frozenset({"2", "4"})}


def _list_engines() -> tuple[Value, ...]:
    stages, named = list_choices_of_literal("engine.zero_stage"), ("torch", "deepspeed")
    return (
        Value("fsdp", {"engine.kind": "torch"}),
        Value("ddp", {"engine.kind": "torch", "engine.data_parallel": "ddp"}),
        *(
            Value(f"zero-{stage}", {"engine.kind": "deepspeed", "engine.zero_stage": stage})
            for stage in stages
        ),
        *(
            Value(kind, {"engine.kind": kind})
            for kind in list_choices("engine")
            if kind not in named
        ),
    )


def list_choices_of_literal(path: str) -> tuple[Any, ...]:
    """Return the values of a literal below a union of RunConfig, such as `engine.zero_stage`."""
    section, key = path.split(".")
    members = list_section_types(RunConfig.model_fields[section].annotation)
    [found] = [member.model_fields[key] for member in members if key in member.model_fields]
    return get_args(found.annotation)


def _list_fp8(path: str, **needs: str) -> tuple[Value, ...]:
    # Products of 8-bit numbers are in bf16.
    recipes = (recipe for recipe in list_choices(path) if recipe != "compute")
    return tuple(Value(recipe, {path: recipe}, {"precision": "bf16"} | needs) for recipe in recipes)


def _set_offload(assignment: Assignment) -> Settings:
    return {
        "engine.cpu_offload": "optimizer" if assignment["engine"].startswith("zero") else "state"
    }


def _set_context(size: int, kind: str) -> Settings:
    return {"layout.context": size, "layout.context_kind": kind}


PLACEMENT_FACTORS = (
    _build_factor("engine", *_list_engines()),
    _build_factor(
        "replicate", Value("1"), Value("2", {"layout.replicate": 2}, costs_processes=True)
    ),
    # The ranks that the other axes leave: replicas under DDP.
    _build_factor(
        "shard", Value("1"), Value("2", costs_processes=True), Value("4", costs_processes=True)
    ),
    _build_factor(
        "expert axis",
        Value("1"),
        Value("2", {"layout.expert": 2}, needs={"experts": "all", "shard": "2"}),
        Value("4", {"layout.expert": 4}, needs={"experts": "all", "shard": "4"}),
    ),
    _build_factor("tensor", Value("1"), Value("2", {"layout.tensor": 2}, costs_processes=True)),
    _build_factor(
        "context",
        Value("1"),
        Value("ulysses", _set_context(2, "ulysses"), costs_processes=True),
        Value("ring", _set_context(2, "ring"), costs_processes=True),
        Value("ulysses_ring", _set_context(4, "ulysses_ring"), costs_processes=True),
    ),
    _build_factor(
        "pipeline",
        Value("1"),
        Value("2", {"layout.pipeline": 2}, needs={"recurrence": NONE}),
        Value("4", {"layout.pipeline": 4}, costs_processes=True),
    ),
    _build_union_factor(
        "schedule of stages", "layout.pipeline_schedule", "1f1b", acts_with=PIPELINE
    ),
    _build_literal_factor("summation", "engine.gradient_accumulation", "sharded", acts_with=FSDP),
    _build_factor("host offload", Value(NONE), Value("on", _set_offload)),
    _build_literal_factor("recomputation", "train.activation_checkpoint", "none"),
    _build_literal_factor(
        "compile", "train.compile", "none", Value("block", {"train.compile": "block"}, is_slow=True)
    ),
    _build_literal_factor("precision", "train.precision", "fp32"),
    _build_literal_factor(
        "matmuls", "train.matmul_dtype", "compute", *_list_fp8("train.matmul_dtype")
    ),
    _build_literal_factor(
        "expert matmuls",
        "train.expert_matmul_dtype",
        "compute",
        *_list_fp8("train.expert_matmul_dtype", experts="all"),
    ),
    _build_literal_factor("reproducibility", "train.reproducibility", "fast"),
)

STEP_FACTORS = (
    _build_union_factor(
        "optimizer",
        "optimizer",
        "adamw",
        # Its updates have the size of the rate.
        Value("lion", {"optimizer.kind": "lion", "optimizer.learning_rate": 1e-3}),
        Value("ademamix", {"optimizer.kind": "ademamix", "optimizer.slow_warmup_steps": 5}),
        Value("soap", {"optimizer.kind": "soap", "optimizer.precondition_every_steps": 2}),
    ),
    _build_literal_factor(
        "moments", "optimizer.moments", "fp32", acts_with={"optimizer": frozenset({"adamw"})}
    ),
    _build_factor("clipping", Value("on"), Value(NONE, {"optimizer.max_grad_norm": 0.0})),
    _build_factor("ema", Value(NONE), Value("on", {"train.ema_half_life_tokens": 3 * STEP_TOKENS})),
    _build_factor("label smoothing", Value(NONE), Value("on", {"loss.label_smoothing": 0.1})),
    _build_factor("z loss", Value(NONE), Value("on", {"loss.z_loss": 1e-2})),
    _build_union_factor(
        "schedule",
        "schedule",
        "constant",
        Value("constant", {"schedule": {"kind": "constant", "warmup_tokens": 3 * STEP_TOKENS}}),
        Value("cosine", {"schedule": {"kind": "cosine", "warmup_tokens": 2 * STEP_TOKENS}}),
        Value("linear", {"schedule": {"kind": "linear", "warmup_tokens": 2 * STEP_TOKENS}}),
        Value("wsd", {"schedule": {"kind": "wsd", "decay_tokens": 4 * STEP_TOKENS}}),
        Value(
            "inverse_sqrt", {"schedule": {"kind": "inverse_sqrt", "warmup_tokens": 2 * STEP_TOKENS}}
        ),
        Value(
            "noam",
            {"schedule": {"kind": "noam", "warmup_steps": 3}, "optimizer.learning_rate": 0.02},
        ),
    ),
    _build_factor(
        "multipliers",
        Value(NONE),
        Value(
            "on",
            {
                "factors.weight_decay": [[0, 0.5], [6 * STEP_TOKENS, 2.0]],
                "factors.balance": [[0, 1.0], [4 * STEP_TOKENS, 1.0], [4 * STEP_TOKENS, 0.25]],
            },
        ),
    ),
    _build_factor("noise scale", Value(NONE), Value("on", {"train.noise_scale_every_steps": 1})),
    _build_factor("norms", Value(NONE), Value("on", {"train.norms_every_steps": 2})),
    _build_factor(
        "corruption check", Value(NONE), Value("on", {"train.corruption_check_every_steps": 2})
    ),
    _build_literal_factor("saves", "checkpoint.mode", "sync"),
    # To look at the state gathers it, which may hide what a step leaves behind.
    # In 16 bits a run and the plain process would go apart in between.
    _build_factor(
        "inspection",
        Value("each step"),
        Value("the end"),
        acts_with={"precision": frozenset({"fp32"})},
    ),
)

RESUMES = (
    "1 fsdp",
    "2 fsdp",
    "2 ddp",
    "2 expert",
    "2 tensor",
    "2 pipeline",
    "4 pipeline",
    "2 zero-1",
    "2 zero-3",
)


def _list_resume_needs(label: str) -> Mapping[str, str]:
    return {"experts": "all"} if label.endswith("expert") else {}


EVENT_FACTORS = (
    _build_event("evaluate"),
    _build_event("save"),
    _build_event("evaluate and save"),
    _build_event("skip"),
    _build_event("overflow"),
    _build_event("rewind"),
    _build_event("signal"),
    # Killed without a save, and resumed by other ranks.
    Factor(
        "kill",
        (Value("no"), *(Value(one, needs=_list_resume_needs(one)) for one in RESUMES)),
        is_event=True,
    ),
    _build_event("branch"),
)

FACTORS: tuple[Factor, ...] = (
    *MODEL_FACTORS,
    *EXPERT_FACTORS,
    *BATCH_FACTORS,
    *PLACEMENT_FACTORS,
    *STEP_FACTORS,
    *EVENT_FACTORS,
)
