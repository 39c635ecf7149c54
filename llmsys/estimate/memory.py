"""Bytes of training state on the fullest rank, exactly: weights, fp32 masters, gradients, moments.

State lives as long as the run, split as the engine splits it; what a forward pass keeps is in `activation`.
"""

from dataclasses import dataclass
from math import prod

from llmsys.config.layout import Layout
from llmsys.config.run import RunConfig
from llmsys.estimate.rows import TensorRow
from llmsys.estimate.tensors import model_tensors

FP32, MOMENTS = 4, 8  # bytes of one fp32 value, and of Adam's two


@dataclass(frozen=True)
class StateBytes:
    """Bytes on rank 0, which never holds less than another rank. `weights` are copies beside the masters."""

    weights: int
    masters: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.masters + self.gradients + self.moments


def planned_layout(config: RunConfig) -> Layout:
    """The layout for the processes that the config starts; a fixed `shard` says how many ranks there are."""
    fixed = config.layout.shard != -1
    world_size = config.layout.world_size if fixed else max(1, config.launch.processes)
    return config.layout.fit(world_size, config.model)


def state_bytes(config: RunConfig, layout: Layout) -> StateBytes:
    """State of the configured engine under a resolved layout."""
    if config.engine.kind == "deepspeed":
        return _zero_bytes(config, layout, config.engine.zero_stage)
    local = sum(_shard_elements(row, layout) * row.copies for row in model_tensors(config.model))
    # FSDP2: the shards are the fp32 masters; whole weights exist only while they are used.
    return StateBytes(weights=0, masters=FP32 * local, gradients=FP32 * local, moments=MOMENTS * local)


def compute_bytes(config: RunConfig) -> int:
    """Bytes of one weight or activation inside products."""
    return 2 if config.train.precision == "bf16" else FP32


def _shard_elements(row: TensorRow, layout: Layout) -> int:
    """Elements of one copy on rank 0: its part of the first dim.

    Experts dealt first and split then come to the same: (E / expert) / (shard / expert), rounded up once.
    """
    return -(-row.shape[0] // layout.shard) * prod(row.shape[1:])


def _zero_bytes(config: RunConfig, layout: Layout, stage: int) -> StateBytes:
    """ZeRO flattens each parameter group, pads it to twice the number of ranks, and splits it evenly over them.

    Groups: with and without weight decay; experts, embeddings, the rest. Dealt experts are split over their own
    replicas only.
    """
    whole = split = 0
    groups: dict[tuple[str, bool], int] = {}
    for row in model_tensors(config.model):
        role = "experts" if row.routed else "embedding" if row.name in ("embed.weight", "head.weight") else "dense"
        key = (role, len(row.shape) >= 2 and not row.name.endswith("_bias"))
        groups[key] = groups.get(key, 0) + row.count
    for (role, _), elements in groups.items():
        dealt = layout.expert if role == "experts" else 1
        local, ranks = elements // dealt, layout.world_size // dealt
        whole += local
        split += -(-local // (2 * ranks)) * 2
    gradients = split if stage >= 2 else whole
    return StateBytes(compute_bytes(config) * whole, FP32 * split, FP32 * gradients, MOMENTS * split)
