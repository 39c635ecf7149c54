"""What the torch engine cannot do with the rest of a config, and what DDP makes of a layout.

Each problem says value, rule and remedy. What the axes forbid is in axes.py.

What DeepSpeed cannot do with the rest of a config. Each problem says value, rule and remedy.

Axes that only the torch engine has, `tensor` and `context`, are refused in axes.py.
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
    """What forbids these choices together, whatever the number of ranks."""
    if is_replicated(engine):
        yield from _find_replica_violations(engine, layout)
    if train.compile == "block" and train.activation_checkpoint != "none" and model.moe is not None:
        yield Violation(
            "train.activation_checkpoint",
            f"{train.activation_checkpoint} with experts cannot be compiled: torch.compile gives such blocks up whole. "
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
    """Whether every rank keeps everything: DDP, which is accelerate's way too."""
    return engine.kind == "accelerate" or (engine.kind == "torch" and engine.data_parallel == "ddp")


def _get_replication_settings(engine: EngineConfig) -> tuple[str, str]:
    """What in the config asks for copies, and what asks for shards instead."""
    if engine.kind == "accelerate":
        return "engine.kind=accelerate", "engine.kind=torch"
    return "engine.data_parallel=ddp", FSDP


def resolve_layout(layout: ParallelLayout, engine: EngineConfig, model: ModelConfig, ranks: int) -> ParallelLayout:
    """`layout` resolved for a number of ranks. Under DDP those that no axis asks for hold copies, not shards.

    Raises LayoutError with the value, the rule and the values that would do.
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
    why = None
    if engine.kind != "torch":
        why = f"engine.kind={engine.kind} does not know its layers. Use engine.kind=torch"
    elif is_replicated(engine):
        why = f"engine.data_parallel=ddp casts every weight by itself. Use {FSDP}"
    elif train.precision not in ("auto", "bf16"):
        why = f"train.precision={train.precision} is not what its products come in. Use train.precision=bf16"
    elif train.reproducibility == "bitwise":
        why = "train.reproducibility=bitwise needs sums that are rounded in one way. Use fast"
    elif layout.tensor > 1:
        why = f"layout.tensor={layout.tensor} splits the matrices that it scales as wholes. Use layout.tensor=1"
    if why is not None:
        yield Violation("train.matmul_dtype", f"fp8 cannot be had: {why}, or train.matmul_dtype=compute.")


def find_deepspeed_violations(engine: EngineConfig, *, replicate: int, expert: int) -> Iterator[Violation]:
    """What forbids this engine, if it is DeepSpeed, with these axes of the layout."""
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
