"""The factors: choices that can change a training step, and events between steps.

Invariants:
- The first value of a factor is its default: a case shrinks towards it.
- Where a factor does not act, such as the schedule of a model without pipeline, its value counts
  for nothing.
"""

from collections.abc import Mapping
from typing import Any

from llmsys.config.patches import BYTE_VALUES
from llmsys.doctor.pairs.factor import (
    NONE,
    Assignment,
    Factor,
    Settings,
    Value,
    build_choice_factor,
    build_event,
    build_factor,
    list_choices,
    list_literal_values,
)
from llmsys.doctor.pairs.model_factors import EXPERT_FACTORS, MODEL_FACTORS

# Key of a union or literal below the sections of a step that no factor has → why.
UNNAMED_CHOICES: dict[str, str] = {
    "tokenizer": "ids are the same to a step whatever made them",
    "data": "follows from the objective and from sources",
    "model.head": "follows from the objective; features have no loss",
    "model.moe.expert": "the activations of model.feed_forward, on experts",
    "model.linear_attention": "follows from the layer types",
    "model.initializer": "both processes begin with the same weights",
    "objective.augmentation": "images have their own runs in tests/llmsys/train",
    "evaluation.tasks": "scored after a step, by the weights that are compared",
    "evaluation.metrics": "computed after a step, from the logits that are compared",
}

# Sequences of a step; a micro-batch has at most half of those of a rank where 4 ranks share a step.
SEQUENCES, LENGTH = 8, 16
STEP_TOKENS = SEQUENCES * LENGTH


def _set_ramp(kind: str, **more: Any) -> Settings:
    return {"batch.ramp": {"kind": kind, "start_tokens": STEP_TOKENS // 2} | more}


MIDDLE = {"batch.fill_in_middle": {"rate": 0.7}}
SUFFIX_FIRST = {"batch.fill_in_middle": {"rate": 0.7, "spm_rate": 1.0}}


def _build_mixture() -> Settings:
    # Datasets of the check.
    sources = [
        {"folder": "crawl", "weight": 3.0},
        {"folder": "other crawl", "weight": 1.0},
    ]
    # The weights are turned round in the middle of the run.
    stages = [{"start_tokens": 4 * STEP_TOKENS, "weights": [1.0, 3.0]}]
    return {"data": {"kind": "mixture", "sources": sources, "stages": stages}}


# Pixels of a side. Four patches and the class token are few enough for a bucket of one image.
IMAGE_SIZE, PATCH_SIZE = 8, 4
NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2


def _build_images() -> Settings:
    size = {"image_size": IMAGE_SIZE, "num_channels": 1}
    return {
        "data": {"kind": "images"} | size,
        "tokenizer": {"kind": "none"},
        "model.vocab_size": BYTE_VALUES,
        "model.patches": {"patch_size": PATCH_SIZE} | size,
        "model.max_position_embeddings": NUM_PATCHES + 1,
        "batch.sequence_length": NUM_PATCHES + 1,
    }


BATCH_FACTORS = (
    build_factor(
        "sources",
        Value("one"),
        Value("mixture", _build_mixture()),
        # Only answers have a loss.
        Value("chats", {"data.kind": "chat"}, needs={"objective": "next_token"}),
        Value("images", _build_images(), needs={"objective": "classification"}),
        acts_with={
            "objective": frozenset(
                {
                    "classification",
                    "next_token",
                    "masked",
                    "masked_next_sentence",
                    "permutation",
                    "span_corruption",
                }
            )
        },
    ),
    build_choice_factor("packing", "batch.packing", "concatenate"),
    build_factor(
        "fill in the middle",
        Value(NONE),
        Value("on", MIDDLE, needs={"packing": "best_fit"}),
        Value("suffix first", SUFFIX_FIRST, needs={"packing": "best_fit"}),
    ),
    build_choice_factor("scope", "batch.attention_scope", "document"),
    build_choice_factor("window order", "batch.window_order", "shuffled"),
    build_choice_factor("assignment", "batch.assignment", "sequential"),
    build_choice_factor(
        "ramp",
        "batch.ramp",
        NONE,
        Value("linear", _set_ramp("linear", ramp_tokens=4 * STEP_TOKENS)),
        Value("noise_scale", _set_ramp("noise_scale", doubled_after_steps=[4])),
    ),
    build_factor(
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
    build_factor(
        "accumulation",
        Value("2 sequences", {"batch.micro_sequences": 2, "batch.num_length_buckets": 4}),
        Value("1 sequence", {"batch.micro_sequences": 1, "batch.num_length_buckets": 8}),
        Value("all sequences", {"batch.micro_sequences": 0, "batch.num_length_buckets": 1}),
    ),
)

FSDP = {"engine": frozenset({"fsdp"})}
MUON = {"optimizer": frozenset({"muon"})}
PIPELINE = {"pipeline": frozenset({"2", "4"})}


def _list_engines() -> tuple[Value, ...]:
    stages, named = list_literal_values("engine.zero_stage"), ("torch", "deepspeed")
    # The first one is the default of cases: the wrapper that most other choices act with.
    ways = sorted(list_choices("engine.data_parallel"), key=lambda way: way != "fsdp")
    return (
        *(Value(way, {"engine.kind": "torch", "engine.data_parallel": way}) for way in ways),
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
    build_factor("engine", *_list_engines()),
    build_factor("replicate", Value("1"), Value("2", {"layout.replicate": 2}, is_costly=True)),
    # The ranks that the other axes leave: replicas under DDP.
    build_factor("shard", Value("1"), Value("2", is_costly=True), Value("4", is_costly=True)),
    build_factor(
        "expert axis",
        Value("1"),
        Value("2", {"layout.expert": 2}, needs={"experts": "all", "shard": "2"}),
        Value("4", {"layout.expert": 4}, needs={"experts": "all", "shard": "4"}),
    ),
    build_factor("tensor", Value("1"), Value("2", {"layout.tensor": 2}, is_costly=True)),
    build_factor(
        "context",
        Value("1"),
        Value("ulysses", _set_context(2, "ulysses"), is_costly=True),
        Value("ring", _set_context(2, "ring"), is_costly=True),
        Value("ulysses_ring", _set_context(4, "ulysses_ring"), is_costly=True),
    ),
    build_factor(
        "pipeline",
        Value("1"),
        Value("2", {"layout.pipeline": 2}, needs={"recurrence": NONE}),
        Value("4", {"layout.pipeline": 4}, is_costly=True),
    ),
    build_choice_factor(
        "schedule of stages", "layout.pipeline_schedule", "1f1b", acts_with=PIPELINE
    ),
    build_choice_factor("summation", "engine.gradient_accumulation", "sharded", acts_with=FSDP),
    build_choice_factor("resharding", "engine.reshard", "after_forward", acts_with=FSDP),
    build_choice_factor(
        "reduction",
        "engine.reduce_dtype",
        "fp32",
        # What is rounded is computed in bf16.
        Value("bf16", {"engine.reduce_dtype": "bf16"}, {"precision": "bf16"}),
        acts_with=FSDP,
    ),
    build_factor("host offload", Value(NONE), Value("on", _set_offload)),
    build_choice_factor("recomputation", "train.activation_checkpoint", "none"),
    build_choice_factor(
        "compile", "train.compile", "none", Value("block", {"train.compile": "block"}, is_slow=True)
    ),
    build_choice_factor("precision", "train.precision", "fp32"),
    build_choice_factor(
        "matmuls", "train.matmul_dtype", "compute", *_list_fp8("train.matmul_dtype")
    ),
    build_choice_factor(
        "expert matmuls",
        "train.expert_matmul_dtype",
        "compute",
        *_list_fp8("train.expert_matmul_dtype", experts="all"),
    ),
    build_choice_factor("reproducibility", "train.reproducibility", "fast"),
)

STEP_FACTORS = (
    build_choice_factor(
        "optimizer",
        "optimizer",
        "adamw",
        # Its updates have the size of the rate.
        Value("lion", {"optimizer.kind": "lion", "optimizer.learning_rate": 1e-3}),
        Value("ademamix", {"optimizer.kind": "ademamix", "optimizer.slow_warmup_steps": 5}),
        Value("soap", {"optimizer.kind": "soap", "optimizer.precondition_every_steps": 2}),
    ),
    build_choice_factor(
        "moments", "optimizer.moments", "fp32", acts_with={"optimizer": frozenset({"adamw"})}
    ),
    build_choice_factor(
        "orthogonalization", "optimizer.orthogonalization", "newton_schulz", acts_with=MUON
    ),
    build_factor(
        "neuron moments",
        Value(NONE),
        Value("on", {"optimizer.neuron_beta": 0.9}),
        acts_with=MUON,
    ),
    build_factor(
        "weight decay",
        Value("all"),
        Value("cautious", {"optimizer.cautious_weight_decay": True}),
    ),
    build_factor("query clip", Value(NONE), Value("on", {"optimizer.max_attention_logit": 0.3})),
    build_factor("clipping", Value("on"), Value(NONE, {"optimizer.max_grad_norm": 0.0})),
    build_factor("ema", Value(NONE), Value("on", {"train.ema_half_life_tokens": 3 * STEP_TOKENS})),
    build_factor("label smoothing", Value(NONE), Value("on", {"loss.label_smoothing": 0.1})),
    build_factor("z loss", Value(NONE), Value("on", {"loss.z_loss": 1e-2})),
    build_choice_factor(
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
    build_factor(
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
    build_factor("noise scale", Value(NONE), Value("on", {"train.noise_scale_every_steps": 1})),
    build_factor(
        "document losses",
        Value(NONE),
        Value(
            "recorded",
            {"train.record_document_losses": True},
            needs={"objective": "next_token"},
        ),
    ),
    build_factor("norms", Value(NONE), Value("on", {"train.norms_every_steps": 2})),
    build_factor(
        "corruption check", Value(NONE), Value("on", {"train.corruption_check_every_steps": 2})
    ),
    build_choice_factor("saves", "checkpoint.mode", "sync"),
    # To look at the state gathers it, which may hide what a step leaves behind.
    # In 16 bits a run and the plain process would go apart in between.
    build_factor(
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
    "2 plain",
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
    build_event("evaluate"),
    Factor("save", (Value("no"), Value("yes"), Value("by minutes")), is_event=True),
    build_event("evaluate and save"),
    build_event("skip"),
    build_event("overflow"),
    build_event("rewind"),
    build_event("signal"),
    # Killed without a save, and resumed by other ranks.
    Factor(
        "kill",
        (Value("no"), *(Value(one, needs=_list_resume_needs(one)) for one in RESUMES)),
        is_event=True,
    ),
    build_event("branch"),
)

FACTORS: tuple[Factor, ...] = (
    *MODEL_FACTORS,
    *EXPERT_FACTORS,
    *BATCH_FACTORS,
    *PLACEMENT_FACTORS,
    *STEP_FACTORS,
    *EVENT_FACTORS,
)
