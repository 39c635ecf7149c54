"""Rules between the sections of a run: engine, gradient noise scale, prompts.

Each violation names the value, the rule and the remedy. Rules of the axes are in parallel_layout.py.

The gradient noise scale (`train.noise_scale_every_steps`) compares the gradient of the first micro-batch of a step with
that of the full step (McCandlish 2018). A step therefore needs several micro-batches, and the first gradient must be
complete before the next is added."""

from collections.abc import Iterator

from llmsys.config.batch import BatchConfig
from llmsys.config.engine import EngineConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.section import Violation
from llmsys.config.train import GenerationConfig, TrainConfig
from llmsys.errors import ConfigError, LayoutError

NONE = "or set train.noise_scale_every_steps=0"


def find_noise_scale_violations(
    train: TrainConfig, engine: EngineConfig, layout: ParallelLayout, batch: BatchConfig, *, windows: bool
) -> Iterator[Violation]:
    """Yield a violation for every setting that hides the gradient of a single micro-batch.

    Args:
        windows: steps consist of windows of equal length, not of pairs or texts.
    """
    if not train.noise_scale_every_steps:
        return
    what = "the gradient noise scale needs the gradient of one micro-batch, summed over ranks"
    if engine.kind != "torch" or engine.data_parallel != "fsdp":
        value = engine.kind if engine.kind != "torch" else f"torch with data_parallel={engine.data_parallel}"
        text = f"{value} reduces over ranks only after the last micro-batch, but {what}. "
        yield Violation("engine.kind", f"{text}Use torch with data_parallel=fsdp, {NONE}.")
    if layout.tensor > 1:
        text = f"{layout.tensor} ranks reduce some gradients only after the last micro-batch, but {what}. "
        yield Violation("layout.tensor", f"{text}Use tensor=1, {NONE}.")
    if train.reproducibility == "bitwise":
        yield Violation("train.reproducibility", f"bitwise sums micro-batches in a tree, but {what}. Use fast, {NONE}.")
    if train.precision == "fp16":
        yield Violation(
            "train.precision", f"fp16 unscales gradients only after the last micro-batch, but {what}. Use bf16, {NONE}."
        )
    if not windows:
        text = "pairs and texts are batched in length buckets, which are no random sample of a step. "
        yield Violation("train.noise_scale_every_steps", f"{text}Set it to 0.")
    elif batch.micro_sequences == 0:
        text = "0 makes one micro-batch of a rank's share, but the noise is measured between several. "
        yield Violation("batch.micro_sequences", f"{text}Use a smaller divisor of the rank's share, {NONE}.")


def require_micro_batches(micro_batches: int, batch: BatchConfig) -> str:
    """Check that the last step has more than one micro-batch per rank.

    Args:
        micro_batches: micro-batches per rank in the last step.
        batch: the batch section, named in the error message.

    Returns:
        The number of micro-batches as text for the log.

    Raises:
        ConfigError: there is one micro-batch.
    """
    if micro_batches > 1:
        return f"{micro_batches} micro-batches"
    raise ConfigError(
        "train.noise_scale_every_steps compares micro-batches, but "
        f"batch.micro_sequences={batch.micro_sequences} gives each rank only one. Use a smaller "
        f"batch.micro_sequences or fewer processes, {NONE}."
    )


def find_generation_violations(generation: GenerationConfig, model: ModelConfig) -> Iterator[Violation]:
    """Yield the violations between `generation:` and the model."""
    # Only decoders generate from prompts; other families ignore the section.
    if not generation.prompts or model.family != "decoder":
        return
    if model.moe is not None and model.moe.routing.kind == "expert_choice":
        yield Violation(
            "generation.prompts",
            f"{len(generation.prompts)} prompts cannot be completed with model.moe.routing.kind=expert_choice: "
            "experts choose among all tokens of a sequence, later ones included. Use generation.prompts=[], "
            "or model.moe.routing.kind=token_choice or capacity.",
        )


FSDP = "engine.data_parallel=fsdp"


def find_torch_violations(
    engine: EngineConfig, layout: ParallelLayout, train: TrainConfig, model: ModelConfig
) -> Iterator[Violation]:
    """Yield the violations of the torch and accelerate engines that hold for every number of ranks."""
    if is_replicated(engine):
        yield from _find_replica_violations(engine, layout)
    moe = model.moe
    reads_counts = moe is not None and (layout.expert > 1 or moe.routing.kind != "token_choice")
    if train.compile == "block" and train.activation_checkpoint != "none" and reads_counts:
        yield Violation(
            "train.activation_checkpoint",
            f"{train.activation_checkpoint} cannot be compiled where the host reads counts inside a block, as for "
            "layout.expert > 1 and routing by capacity or expert choice. "
            "Use train.compile=none or train.activation_checkpoint=none.",
        )
    if engine.kind == "torch" and engine.gradient_accumulation == "whole" and train.reproducibility == "bitwise":
        yield Violation(
            "engine.gradient_accumulation",
            "whole sums over micro-batches before ranks, but train.reproducibility=bitwise needs its own "
            "order. Use engine.gradient_accumulation=sharded, or train.reproducibility=fast.",
        )
    if train.matmul_dtype == "fp8":
        yield from _find_fp8_violations(engine, layout, train)


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


def resolve_layout(layout: ParallelLayout, engine: EngineConfig, model: ModelConfig, ranks: int) -> ParallelLayout:
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
            f"replicate={layout.replicate} replicas do not fit {ranks} ranks: with {copies} every rank holds "
            f"one replica. Leave layout.replicate out, start {layout.replicate} processes, or use {shards}."
        )
    return layout.model_copy(update={"replicate": ranks, "shard": 1}).resolve(ranks, model)


def _find_replica_violations(engine: EngineConfig, layout: ParallelLayout) -> Iterator[Violation]:
    copies, shards = _get_replication_settings(engine)
    if layout.shard not in (-1, 1):
        yield Violation(
            "layout.shard",
            f"{layout.shard} ranks cannot shard a replica that {copies} keeps unsharded on every rank. Use "
            f"layout.shard=1, or {shards}.",
        )
    if layout.expert > 1:
        yield Violation(
            "layout.expert",
            f"{layout.expert} ranks cannot shard the experts of a replica that {copies} keeps unsharded on "
            f"every rank. Use layout.expert=1, or {shards}.",
        )
    if engine.kind == "torch" and engine.cpu_offload != "none":
        yield Violation(
            "engine.cpu_offload",
            f"{engine.cpu_offload} needs FSDP: engine.data_parallel=ddp keeps master weights and gradients on "
            f"the compute device. Use engine.cpu_offload=none, or {FSDP}.",
        )


def _find_fp8_violations(engine: EngineConfig, layout: ParallelLayout, train: TrainConfig) -> Iterator[Violation]:
    reason = None
    if engine.kind != "torch":
        reason = f"engine.kind={engine.kind} does not support fp8 layers. Use engine.kind=torch"
    elif is_replicated(engine):
        reason = f"engine.data_parallel=ddp casts weights itself. Use {FSDP}"
    elif train.precision not in ("auto", "bf16"):
        reason = f"train.precision={train.precision} is not the output dtype of fp8 matmuls. Use train.precision=bf16"
    elif train.reproducibility == "bitwise":
        reason = "train.reproducibility=bitwise does not support fp8 matmuls. Use fast"
    elif layout.tensor > 1:
        reason = f"layout.tensor={layout.tensor} shards matrices that fp8 scales unsharded. Use layout.tensor=1"
    if reason is not None:
        yield Violation("train.matmul_dtype", f"fp8 is not available: {reason}, or train.matmul_dtype=compute.")


def find_deepspeed_violations(
    engine: EngineConfig, *, replicate: int, expert: int, recurrence: str | None
) -> Iterator[Violation]:
    """Yield the violations of the DeepSpeed engine; none for other engines.

    Args:
        engine: the `engine:` section.
        replicate: size of the replicate axis.
        expert: size of the expert axis.
        recurrence: kind of `model.recurrence`, if any.
    """
    if engine.kind != "deepspeed":
        return
    if engine.zero_stage == 3 and recurrence is not None:
        # DeepSpeed 0.19.8 puts the gradient of each use into one bucket, and asserts that they are different weights.
        yield Violation(
            "engine.zero_stage",
            f"3 reduces the gradient of a block after each of its uses, but model.recurrence.kind={recurrence} repeats "
            "one. Use zero_stage=2, or engine.kind=torch.",
        )
    if engine.zero_stage == 3 and expert > 1:
        yield Violation(
            "engine.zero_stage",
            f"3 shards every expert over all ranks and cannot assign experts to layout.expert={expert}. Use "
            "engine.kind=torch, which does both, or zero_stage=2, or layout.expert=1.",
        )
    if engine.zero_stage == 0 and engine.cpu_offload == "optimizer":
        yield Violation(
            "engine.cpu_offload",
            "optimizer offloads the shards of a rank, but zero_stage=0 shards nothing. Use zero_stage=1, 2 or "
            "3, or cpu_offload=none.",
        )
    if engine.zero_stage > 0 and replicate > 1:
        yield Violation(
            "layout.replicate",
            f"{replicate} replicas are not supported by DeepSpeed: zero_stage={engine.zero_stage} shards over "
            "all ranks. Use layout.replicate=1, or engine.kind=torch.",
        )
