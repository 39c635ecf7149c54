"""Rules between the sections of a run: engine, prompts, checkpoints, evaluation tasks.

Each violation names the value, the rule and the remedy. Rules of the axes are in
parallel_layout.py.
"""

from collections.abc import Iterator

from llmsys.config.batch import BatchConfig
from llmsys.config.checkpoint import CheckpointConfig
from llmsys.config.engine import EngineConfig
from llmsys.config.evaluation import EvaluationConfig
from llmsys.config.model import ModelConfig
from llmsys.config.optimizer import OptimizerConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.train import GenerationConfig, TrainConfig
from llmsys.errors import LayoutError, Violation


def find_length_violations(
    model: ModelConfig, batch: BatchConfig, lengths: tuple[int, int]
) -> Iterator[Violation]:
    """Yield the sequences that are longer than the model allows.

    Args:
        model: the `model:` section.
        batch: the `batch:` section.
        lengths: tokens of one window at the encoder and at the decoder.
    """
    longest, given = model.max_position_embeddings, batch.model_fields_set | {"sequence_length"}
    for name, length in zip(("sequence_length", "target_sequence_length"), lengths, strict=True):
        # The second stream of XLNet has no positions of its own.
        length = lengths[0] if model.head.kind == "permutation" else length
        if length > longest and name in given and not model.interpolates_positions:
            text = (
                f"{length} positions are more than model.max_position_embeddings={longest}. Use "
                f"at most {longest}"
            )
            yield Violation(f"batch.{name}", f"{text}, or raise model.max_position_embeddings.")


def find_generation_violations(
    generation: GenerationConfig, model: ModelConfig
) -> Iterator[Violation]:
    """Yield the violations between `generation:` and the model."""
    # Only decoders generate from prompts; other families ignore the section.
    if not generation.prompts or model.family != "decoder":
        return
    if model.moe is not None and model.moe.routing.kind == "expert_choice":
        yield Violation(
            "generation.prompts",
            f"{len(generation.prompts)} prompts cannot be completed with "
            "model.moe.routing.kind=expert_choice: experts choose among all tokens of a "
            "sequence, later ones included. Use generation.prompts=[], or "
            "model.moe.routing.kind=token_choice or capacity.",
        )


FSDP, COMPILED = "engine.data_parallel=fsdp", ("train.compile", "block", "none")


def find_average_violations(
    train: TrainConfig, engine: EngineConfig, checkpoint: CheckpointConfig
) -> Iterator[Violation]:
    """Yield the violations of a moving average of the weights."""
    if not train.ema_half_life_tokens:
        return
    if engine.kind == "deepspeed":
        yield Violation(
            "train.ema_half_life_tokens",
            f"{train.ema_half_life_tokens} needs access to single weights, but DeepSpeed keeps "
            "flat shards. Use engine.kind=torch, or checkpoint.average_last, or 0.",
        )
    if checkpoint.average_last:
        yield Violation(
            "train.ema_half_life_tokens",
            f"{train.ema_half_life_tokens} and checkpoint.average_last={checkpoint.average_last} "
            "both average weights. Set one of them to 0.",
        )


def find_torch_violations(
    engine: EngineConfig, layout: ParallelLayout, train: TrainConfig
) -> Iterator[Violation]:
    """Yield the violations of the torch and accelerate engines that hold for every number of
    ranks.
    """
    if is_replicated(engine):
        yield from _find_replica_violations(engine, layout)
    if train.activation_checkpoint == "offload" and (
        engine.kind == "deepspeed" or train.compile == "block"
    ):
        key, value, legal = (
            COMPILED if train.compile == "block" else ("engine.kind", "deepspeed", "torch")
        )
        text = (
            f"offload copies each tensor as a block saves it, which {key}={value} decides by "
            f"itself. Use {key}={legal}"
        )
        yield Violation(
            "train.activation_checkpoint", f"{text}, or train.activation_checkpoint=selective."
        )
    if (
        engine.kind == "torch"
        and engine.gradient_accumulation == "whole"
        and train.reproducibility == "bitwise"
    ):
        yield Violation(
            "engine.gradient_accumulation",
            "whole sums over micro-batches before ranks, but train.reproducibility=bitwise needs "
            "its own order. Use engine.gradient_accumulation=sharded, or "
            "train.reproducibility=fast.",
        )
    for key in ("matmul_dtype", "expert_matmul_dtype"):
        if (recipe := getattr(train, key)) != "compute":
            yield from _find_fp8_violations(f"train.{key}", recipe, engine, train)


def is_replicated(engine: EngineConfig) -> bool:
    """Return whether every rank keeps all weights, gradients and moments.

    Args:
        engine: the `engine:` section.

    Returns:
        True under DDP, which Accelerate uses too.
    """
    return engine.kind == "accelerate" or (engine.kind == "torch" and engine.data_parallel == "ddp")


def _get_replication_settings(engine: EngineConfig) -> tuple[str, str]:
    """Return the setting that replicates, and the setting that shards instead."""
    if engine.kind == "accelerate":
        return "engine.kind=accelerate", "engine.kind=torch"
    return "engine.data_parallel=ddp", FSDP


def resolve_layout(
    layout: ParallelLayout, engine: EngineConfig, model: ModelConfig, ranks: int
) -> ParallelLayout:
    """Return the layout for a number of ranks, with no size left open.

    Args:
        layout: the `layout:` section.
        engine: the `engine:` section. Under DDP the free ranks are replicas, not shards.
        model: the model, whose widths limit the axes.
        ranks: processes of the run.

    Returns:
        A layout whose axes multiply to `ranks`.

    Raises:
        LayoutError: with the value, the rule and the legal values.
    """
    if not is_replicated(engine):
        return layout.resolve(ranks, model)
    if layout.replicate not in (1, ranks):
        copies, shards = _get_replication_settings(engine)
        raise LayoutError(
            f"replicate={layout.replicate} replicas do not fit {ranks} ranks: with {copies} every "
            f"rank holds one replica. Leave layout.replicate out, start {layout.replicate} "
            f"processes, or use {shards}."
        )
    return layout.model_copy(update={"replicate": ranks, "shard": 1}).resolve(ranks, model)


def _find_replica_violations(engine: EngineConfig, layout: ParallelLayout) -> Iterator[Violation]:
    copies, shards = _get_replication_settings(engine)
    if layout.shard not in (-1, 1):
        yield Violation(
            "layout.shard",
            f"{layout.shard} ranks cannot shard a replica that {copies} keeps unsharded on every "
            f"rank. Use layout.shard=1, or {shards}.",
        )
    if layout.expert > 1:
        yield Violation(
            "layout.expert",
            f"{layout.expert} ranks cannot shard the experts of a replica that {copies} keeps "
            f"unsharded on every rank. Use layout.expert=1, or {shards}.",
        )
    if engine.kind == "torch" and engine.cpu_offload != "none":
        yield Violation(
            "engine.cpu_offload",
            f"{engine.cpu_offload} needs FSDP: engine.data_parallel=ddp keeps master weights and "
            f"gradients on the compute device. Use engine.cpu_offload=none, or {FSDP}.",
        )


def _find_fp8_violations(
    key: str, recipe: str, engine: EngineConfig, train: TrainConfig
) -> Iterator[Violation]:
    reason = None
    if engine.kind != "torch":
        reason = f"engine.kind={engine.kind} does not support fp8 layers. Use engine.kind=torch"
    elif is_replicated(engine):
        reason = f"engine.data_parallel=ddp casts weights itself. Use {FSDP}"
    elif train.precision not in ("auto", "bf16"):
        reason = (
            f"train.precision={train.precision} is not the output dtype of fp8 matmuls. Use "
            "train.precision=bf16"
        )
    elif train.reproducibility == "bitwise":
        reason = "train.reproducibility=bitwise does not support fp8 matmuls. Use fast"
    if reason is not None:
        yield Violation(key, f"{recipe} is not available: {reason}, or {key}=compute.")


def find_optimizer_violations(
    optimizer: OptimizerConfig, engine: EngineConfig, train: TrainConfig
) -> Iterator[Violation]:
    """Yield the violations of an optimizer that needs full matrices, or whose moments are
    compressed.
    """
    if optimizer.kind == "schedule_free" and engine.kind == "deepspeed":
        text = "needs single weights to evaluate their average. Use engine.kind=torch"
    elif optimizer.kind == "schedule_free" and train.ema_half_life_tokens:
        text = "evaluates its own average. Use train.ema_half_life_tokens=0"
    elif (
        not (optimizer.can_update_flat_shards or optimizer.kind == "muon")
        and getattr(engine, "zero_stage", 0) > 0
    ):
        text = (
            "is not built by engine.kind=deepspeed on flat shards. Use engine.zero_stage=0, or "
            "engine.kind=torch"
        )
    else:
        text = ""
    if text:
        yield Violation("optimizer.kind", f"{optimizer.kind} {text}, or optimizer.kind=adamw.")
    if optimizer.kind == "python" and not (optimizer.elementwise or is_replicated(engine)):
        yield Violation(
            "optimizer.elementwise",
            f"false needs whole parameters, which engine.kind={engine.kind} shards over ranks. "
            "Use engine.kind=torch with engine.data_parallel=ddp, or write an elementwise rule.",
        )
    if optimizer.kind != "adamw" or optimizer.moments == "fp32":
        return
    if engine.kind == "deepspeed":
        text = "DeepSpeed keeps flat float32 shards. Use engine.kind=torch"
    elif train.reproducibility == "bitwise":
        text = (
            "train.reproducibility=bitwise rounds nothing by chance. Use train.reproducibility=fast"
        )
    else:
        return
    yield Violation(
        "optimizer.moments",
        f"{optimizer.moments} is not available: {text}, or optimizer.moments=fp32.",
    )


def find_deepspeed_violations(
    engine: EngineConfig, layout: ParallelLayout, model: ModelConfig
) -> Iterator[Violation]:
    """Yield the violations of the DeepSpeed engine; none for other engines.

    Args:
        engine: the `engine:` section.
        layout: the `layout:` section.
        model: the `model:` section.
    """
    replicate, expert, recurrence = layout.replicate, layout.expert, model.recurrence
    if engine.kind != "deepspeed":
        return
    if engine.zero_stage == 3 and recurrence is not None:
        # DeepSpeed 0.19.8 puts the gradient of each use into one bucket, and asserts that they are
        # different weights.
        yield Violation(
            "engine.zero_stage",
            "3 reduces the gradient of a block after each of its uses, but model.recurrence.kind="
            f"{recurrence.kind} repeats one. Use zero_stage=2, or engine.kind=torch.",
        )
    if engine.zero_stage == 3 and expert > 1:
        yield Violation(
            "engine.zero_stage",
            "3 shards every expert over all ranks and cannot assign experts to "
            f"layout.expert={expert}. Use engine.kind=torch, which does both, or zero_stage=2, or "
            "layout.expert=1.",
        )
    if engine.zero_stage == 0 and engine.cpu_offload == "optimizer":
        yield Violation(
            "engine.cpu_offload",
            "optimizer offloads the shards of a rank, but zero_stage=0 shards nothing. Use "
            "zero_stage=1, 2 or 3, or cpu_offload=none.",
        )
    if engine.zero_stage > 0 and replicate > 1:
        yield Violation(
            "layout.replicate",
            f"{replicate} replicas are not supported by DeepSpeed: zero_stage={engine.zero_stage} "
            "shards over all ranks. Use layout.replicate=1, or engine.kind=torch.",
        )


def find_retention_violations(
    checkpoint: CheckpointConfig, evaluation_every_steps: int
) -> Iterator[Violation]:
    """Yield the retention rules that would select no checkpoint, or fewer than are averaged.

    Args:
        checkpoint: the `checkpoint:` section.
        evaluation_every_steps: steps between two evaluations; 0 evaluates at the end only.
    """
    if checkpoint.average_last > checkpoint.keep_last:
        yield Violation(
            "checkpoint.keep_last",
            f"{checkpoint.keep_last} cannot hold the {checkpoint.average_last} of average_last. "
            f"Use {checkpoint.average_last}.",
        )
    saved, kept = checkpoint.every_steps, checkpoint.keep_every_steps
    if kept and (not saved or kept % saved):
        near = max(1, round(kept / saved)) * saved if saved else 0
        remedy = f"Use keep_every_steps={near}" if saved else "Set checkpoint.every_steps"
        yield Violation(
            "checkpoint.keep_every_steps",
            f"{kept} is not a multiple of checkpoint.every_steps={saved}, so few or none of its "
            f"steps are saved. {remedy}, or 0.",
        )
    if checkpoint.keep_best and (
        not evaluation_every_steps or not saved or saved % evaluation_every_steps
    ):
        yield Violation(
            "checkpoint.keep_best",
            f"{checkpoint.keep_best} best checkpoints need an evaluation of each checkpoint, but "
            f"evaluation.every_steps={evaluation_every_steps} does not divide "
            f"checkpoint.every_steps={saved}. Use evaluation.every_steps={saved or 100}, or "
            "checkpoint.keep_best=0.",
        )


def find_evaluation_violations(
    evaluation: EvaluationConfig, objective: str, length: int
) -> Iterator[Violation]:
    """Yield the violations of the evaluation tasks and of the length of held-out windows.

    Args:
        evaluation: the `evaluation:` section.
        objective: `objective.kind`; tasks need the next-token objective.
        length: positions of a training sequence.
    """
    longest = length if objective in ("next_token", "masked") else 0
    if evaluation.sequence_length > longest:
        yield Violation(
            "evaluation.sequence_length",
            f"{evaluation.sequence_length} positions exceed the {longest} of a training window. "
            f"Use at most {longest}.",
        )
    if evaluation.tasks and objective != "next_token":
        yield Violation(
            "evaluation.tasks",
            f"{len(evaluation.tasks)} tasks are scored by the likelihood of a text, which "
            f"objective.kind={objective} does not model. Use evaluation.tasks=[], or a model with "
            "family=decoder.",
        )
