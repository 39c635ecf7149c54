"""Rules between the engine and the rest of a config, and the layout under DDP.

Each violation names the value, the rule and the remedy. Rules of the axes are in parallel_layout.py.
"""

from collections.abc import Iterator

from llmsys.config.engine import EngineConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.train import TrainConfig
from llmsys.config.violation import Violation
from llmsys.errors import LayoutError

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
            "whole sums micro-batches before ranks, and train.reproducibility=bitwise has an order of its own. "
            "Use engine.gradient_accumulation=sharded, or train.reproducibility=fast.",
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
            f"replicate={layout.replicate} copies cannot be kept by {ranks} ranks: with {copies} every rank has one. "
            f"Leave layout.replicate out, start {layout.replicate} processes, or use {shards}."
        )
    return layout.model_copy(update={"replicate": ranks, "shard": 1}).resolve(ranks, model)


def _find_replica_violations(engine: EngineConfig, layout: ParallelLayout) -> Iterator[Violation]:
    copies, shards = _get_replication_settings(engine)
    if layout.shard not in (-1, 1):
        yield Violation(
            "layout.shard",
            f"{layout.shard} ranks cannot split a copy that {copies} keeps whole on each of them. "
            f"Use layout.shard=1, or {shards}.",
        )
    if layout.expert > 1:
        yield Violation(
            "layout.expert",
            f"{layout.expert} ranks cannot share the experts of a copy that {copies} keeps whole on each of them. "
            f"Use layout.expert=1, or {shards}.",
        )
    if engine.kind == "torch" and engine.cpu_offload != "none":
        yield Violation(
            "engine.cpu_offload",
            f"{engine.cpu_offload} is what FSDP can keep in host memory, and engine.data_parallel=ddp needs masters "
            f"and gradients where it computes. Use engine.cpu_offload=none, or {FSDP}.",
        )


def _find_fp8_violations(engine: EngineConfig, layout: ParallelLayout, train: TrainConfig) -> Iterator[Violation]:
    reason = None
    if engine.kind != "torch":
        reason = f"engine.kind={engine.kind} does not know its layers. Use engine.kind=torch"
    elif is_replicated(engine):
        reason = f"engine.data_parallel=ddp casts every weight by itself. Use {FSDP}"
    elif train.precision not in ("auto", "bf16"):
        reason = f"train.precision={train.precision} is not what its products come in. Use train.precision=bf16"
    elif train.reproducibility == "bitwise":
        reason = "train.reproducibility=bitwise needs sums that are rounded in one way. Use fast"
    elif layout.tensor > 1:
        reason = f"layout.tensor={layout.tensor} splits the matrices that it scales as wholes. Use layout.tensor=1"
    if reason is not None:
        yield Violation("train.matmul_dtype", f"fp8 cannot be had: {reason}, or train.matmul_dtype=compute.")


def find_deepspeed_violations(engine: EngineConfig, *, replicate: int, expert: int) -> Iterator[Violation]:
    """Yield the violations of the DeepSpeed engine; none for other engines.

    Args:
        engine: the `engine:` section.
        replicate: size of the replicate axis.
        expert: size of the expert axis.
    """
    if engine.kind != "deepspeed":
        return
    if engine.zero_stage == 3 and expert > 1:
        yield Violation(
            "engine.zero_stage",
            f"3 splits every expert over all ranks and cannot deal whole ones over layout.expert={expert}. "
            f"Use engine.kind=torch, which does both, or zero_stage=2, or layout.expert=1.",
        )
    if engine.zero_stage == 0 and engine.cpu_offload == "optimizer":
        yield Violation(
            "engine.cpu_offload",
            "optimizer moves what a rank has alone to host memory, and with zero_stage=0 every rank has everything. "
            "Use zero_stage=1, 2 or 3, or cpu_offload=none.",
        )
    if engine.zero_stage > 0 and replicate > 1:
        yield Violation(
            "layout.replicate",
            f"{replicate} copies cannot be kept by DeepSpeed: zero_stage={engine.zero_stage} splits over all ranks. "
            f"Use layout.replicate=1, or engine.kind=torch.",
        )
