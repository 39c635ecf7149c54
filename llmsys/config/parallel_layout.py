"""The `layout:` section: sizes of the parallel axes, and the constraints that model and run put on
them.

`ParallelLayout.resolve` computes `shard: -1` for a world size and a model. RunConfig checks the
same constraints, so that an illegal config fails before a process starts.

Invariants:
- Every message gives the value, the rule, and legal values.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import Field

from llmsys.config.combinations import find_refused_combinations
from llmsys.config.model import ModelConfig
from llmsys.config.pipeline import (
    OneForwardOneBackwardConfig,
    PipelineScheduleConfig,
    find_stage_violations,
)
from llmsys.config.section import Section, list_divisors
from llmsys.errors import LayoutError, Violation, format_choices


def find_model_sharding_violations(
    tensor: int, context: int, model: ModelConfig, ring: int = 1
) -> Iterator[Violation]:
    """Yield the violations of tensor and context sizes that follow from the model alone.

    Args:
        tensor: size of the tensor axis.
        context: size of the context axis.
        model: the architecture.
        ring: ranks of the context axis that share heads, `ParallelLayout.ring_size`.

    Returns:
        An iterator over violations; keys are relative to `layout`.
    """
    if tensor * context == 1:
        return
    yield from _find_head_violations(tensor, context // ring, model)
    for key, width in iter_sharded_widths(model):
        if width % tensor:
            legal = [n for n in list_divisors(width) if model.num_attention_heads % n == 0]
            yield Violation(
                "tensor",
                f"model.{key}={width} channels cannot be split over tensor={tensor} ranks. Use "
                f"tensor={format_choices(legal)}, "
                f"or make it a multiple of {tensor}.",
            )


def find_expert_violations(expert: int, model: ModelConfig) -> Iterator[str]:
    """Yield messages if the experts of a model cannot be distributed over `expert` ranks.

    Args:
        expert: size of the expert axis.
        model: the architecture.

    Returns:
        An iterator over messages, for `layout.expert`.
    """
    if model.moe is None:
        if expert > 1:
            yield (
                f"A dense model has no experts to split over expert={expert}. Use expert=1, or "
                "add model.moe."
            )
    elif model.moe.num_experts % expert:
        experts = model.moe.num_experts
        yield (
            f"{experts} experts cannot be split over expert={expert}. Use "
            f"expert={format_choices(list_divisors(experts))}, "
            f"or set model.moe.num_experts to a multiple of {expert}."
        )


def find_sequence_violations(
    tensor: int, context: int, sequence_length: int
) -> Iterator[Violation]:
    """Yield a violation unless the positions of a sequence divide over the ranks that share it.

    Args:
        tensor: size of the tensor axis.
        context: size of the context axis.
        sequence_length: positions of a sequence.

    Returns:
        An iterator over violations; keys are relative to `layout`.
    """
    parts = tensor * context
    if sequence_length % parts:
        near = max(1, round(sequence_length / parts)) * parts
        yield Violation(
            "tensor" if tensor > 1 else "context",
            f"batch.sequence_length={sequence_length} positions cannot be divided over "
            f"context={context} × tensor={tensor} ranks. Use batch.sequence_length={near}, or "
            f"another multiple of {parts}.",
        )


def find_ring_violations(layout: "ParallelLayout", sequence_length: int) -> Iterator[Violation]:
    """Yield the violations of a ring of context ranks.

    Args:
        layout: the `layout:` section, with a ring.
        sequence_length: positions of a sequence.

    Returns:
        An iterator over violations; keys are relative to `layout`.
    """
    ring = layout.ring_size
    if layout.context % ring:
        yield Violation(
            "ring",
            f"{ring} members cannot share context={layout.context} ranks equally. Use "
            f"ring={format_choices(list_divisors(layout.context)[1:])}, or context_kind=ring.",
        )
    if sequence_length % (2 * ring):
        near = max(1, round(sequence_length / (2 * ring))) * 2 * ring
        yield Violation(
            "context_kind",
            f"{layout.context_kind} deals two chunks of a sequence to each of {ring} members, and "
            f"batch.sequence_length={sequence_length} cannot be divided by {2 * ring}. Use "
            f"batch.sequence_length={near}.",
        )


def _find_head_violations(tensor: int, context: int, model: ModelConfig) -> Iterator[Violation]:
    heads, parts = model.num_attention_heads, tensor * context
    if heads % parts:
        key = "tensor" if heads % tensor else "context"
        more = (
            "" if heads % tensor else ", or use layout.context_kind=ring, whose ranks share heads"
        )
        yield Violation(
            key,
            f"{heads} attention heads cannot be divided over context={context} × tensor={tensor} "
            f"ranks. Their product must be {format_choices(list_divisors(heads))}{more}.",
        )
        return
    yield from _find_linear_violations(context, model)
    # every query head has its own key there
    if model.attention.kind == "latent":
        return
    groups = model.num_key_value_heads
    if not _can_share_heads(groups, tensor):
        yield _build_head_violation("tensor", tensor, groups, "key-value heads")
    elif not _can_share_heads(per_rank := max(1, groups // tensor), context):
        yield _build_head_violation(
            "context", context, per_rank, "key-value heads of a tensor rank"
        )


def _find_linear_violations(context: int, model: ModelConfig) -> Iterator[Violation]:
    """Yield the heads of linear attention that context ranks cannot divide."""
    linear = model.linear_attention
    if linear is None:
        return
    heads = linear.num_value_heads
    if heads % context:
        yield Violation(
            "context",
            f"{heads} value heads of linear_attention cannot be divided over context={context} "
            f"ranks. Use context={format_choices(list_divisors(heads))}, or "
            "layout.context_kind=ring, whose ranks share heads.",
        )
    elif linear.kind == "mamba2" and linear.num_key_heads % context:
        groups = linear.num_key_heads
        yield Violation(
            "context",
            f"{groups} key heads of linear_attention.kind=mamba2, over each of which outputs have "
            f"a norm, cannot be divided over context={context} ranks. Use "
            f"context={format_choices(list_divisors(groups))}, or layout.context_kind=ring, whose "
            "ranks share heads.",
        )
    elif not _can_share_heads(linear.num_key_heads, context):
        what = "key heads of linear_attention"
        yield _build_head_violation("context", context, linear.num_key_heads, what)


def _can_share_heads(groups: int, ranks: int) -> bool:
    """Return whether each rank gets equally many heads, or each head equally many ranks."""
    return groups % ranks == 0 or ranks % groups == 0


def _build_head_violation(axis: str, ranks: int, groups: int, what: str) -> Violation:
    return Violation(
        axis,
        f"{groups} {what} cannot be divided over {axis}={ranks} ranks: one number must divide the "
        f"other. Use {axis}={format_choices(list_divisors(groups))}, or a multiple of {groups}.",
    )


def iter_sharded_widths(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield config key and inner width of all sharded feed-forwards: dense layers and shared
    experts.

    Args:
        model: the architecture.
    """
    if model.num_dense_layers:
        yield "intermediate_size", model.intermediate_size
    if model.moe is not None and model.moe.shared_expert_size and model.num_moe_layers:
        key = (
            "shared_intermediate_size"
            if model.moe.shared_intermediate_size
            else "num_shared_experts"
        )
        yield f"moe.{key}", model.moe.shared_expert_size


class ParallelLayout(Section):
    """Axes of the device mesh: pipeline × replicate × shard × context × tensor = world size;
    expert: of the last 3.

    - Ranks that differ in `pipeline` alone run other layers on the same sequences.
    - Ranks that differ in `replicate` or `shard` train on different sequences.
    - Ranks of a context group share sequences. Ranks of a tensor group share sequences and
      matrices.
    - Dense parameters are sharded over shard · context ranks, and within a layer over `tensor`.
    - Routed experts are distributed over `expert` ranks and sharded over the remaining ranks of the
      replica. `tensor` never splits a single expert.
    """

    replicate: int = Field(
        1, ge=1, description="Number of replicas of the sharded model (dp_replicate)."
    )
    shard: int = Field(
        -1,
        description="Ranks that shard a replica and read different data (dp_shard). -1: all ranks "
        "that the other axes leave.",
    )
    expert: int = Field(
        1,
        ge=1,
        description="Ranks over which the routed experts are sharded (ep); divides shard · "
        "context · tensor.",
    )
    context: int = Field(
        1,
        ge=1,
        description="Ranks that shard a sequence (cp).",
    )
    context_kind: Literal["ulysses", "ring", "ulysses_ring"] = Field(
        "ulysses",
        description="Exchange of the context axis in attention. ulysses: heads for positions. "
        "ring: keys and values go round, so context may exceed the number of heads. "
        "ulysses_ring: ulysses inside of each member of a ring.",
    )
    ring: int = Field(
        2,
        ge=2,
        description="Members of a ring under context_kind=ulysses_ring; context / ring ranks "
        "exchange heads.",
    )
    tensor: int = Field(
        1,
        ge=1,
        description="Ranks that shard the matrices of a layer, and the positions between layers "
        "(tp with sequence parallelism).",
    )

    pipeline: int = Field(
        1, ge=1, description="Ranks that share the layers of a replica (pp): groups of stages."
    )
    pipeline_schedule: PipelineScheduleConfig = Field(
        OneForwardOneBackwardConfig(),
        validate_default=False,
        description="Order of forward and backward passes in a pipeline.",
    )
    layers_per_stage: tuple[int, ...] | None = Field(
        None,
        description="Layers of each stage, first to last. null: cut so that the costliest stage "
        "costs least.",
    )

    @property
    def world_size(self) -> int:
        """Number of ranks. Requires a resolved layout."""
        return self.pipeline * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """Ranks with the same layers: all, without a pipeline. Requires a resolved layout."""
        return self.replicate * self.ranks_per_replica

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one model replica; in a pipeline, of one index on it. Requires a resolved
        layout.
        """
        return self.shard * self.context * self.tensor

    @property
    def data_parallel_size(self) -> int:
        """Number of groups with different sequences. Requires a resolved layout."""
        return self.replicate * self.shard

    @property
    def ring_size(self) -> int:
        """Ranks of the context axis between which keys and values go round."""
        return {"ulysses": 1, "ring": self.context, "ulysses_ring": min(self.ring, self.context)}[
            self.context_kind
        ]

    def to_settings(self) -> dict[str, Any]:
        """Return the axes, and what belongs to a ring or a pipeline where there is one."""
        hidden = {
            "ulysses": {"context_kind", "ring"},
            "ring": {"ring"},
            "ulysses_ring": set[str](),
        }[self.context_kind]
        optional = ("pipeline", "pipeline_schedule", "layers_per_stage")
        hidden |= {
            name
            for name in optional
            if getattr(self, name) == type(self).model_fields[name].default
        }
        return self.model_dump(mode="json", exclude=hidden)

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share each sequence."""
        return self.context * self.tensor

    def get_data_rank(self, rank: int) -> int:
        """Return the index of the data-parallel group of a global rank: ranks with the same index
        read the
        same sequences.

        Args:
            rank: global rank, below `world_size`.
        """
        # Tensor is the innermost axis, then context; the pipeline is the outermost one.
        return rank % self.ranks_per_stage // self.sequence_parallel_size

    def has_own_rows(self, rank: int) -> bool:
        """Return whether a rank counts for all that hold the same sequences, in sums over ranks.

        Args:
            rank: global rank, below `world_size`.
        """
        return rank < self.ranks_per_stage and rank % self.sequence_parallel_size == 0

    def resolve(self, world_size: int, model: ModelConfig) -> "ParallelLayout":
        """Return the layout with `shard` resolved.

        Args:
            world_size: number of ranks.
            model: the `model:` section, whose heads, layers and experts the axes must divide.

        Returns:
            A copy whose axes multiply to `world_size`.

        Raises:
            LayoutError: an axis does not divide the ranks, the model or its experts.
        """
        for problem in self._find_axis_violations(world_size):
            raise LayoutError(problem)
        fitted = self.model_copy(update={"shard": world_size // self._non_shard_ranks})
        for problem in find_expert_violations(self.expert, model):
            raise LayoutError(problem)
        for broken in find_refused_combinations(SimpleNamespace(model=model, layout=self)):
            raise LayoutError(broken.message)
        for broken in find_model_sharding_violations(
            self.tensor, self.context, model, self.ring_size
        ):
            raise LayoutError(broken.message)
        for broken in self.find_stage_violations(model):
            raise LayoutError(broken.message)
        if fitted.ranks_per_replica % self.expert:
            legal = [
                n
                for n in list_divisors(fitted.ranks_per_replica)
                if model.moe and model.moe.num_experts % n == 0
            ]
            raise LayoutError(
                f"expert={self.expert} does not divide {fitted._replica_text}, the ranks of one "
                f"replica of the model. Use expert={format_choices(legal)}, or a number of ranks "
                f"that is a multiple of {self.pipeline * self.replicate * self.expert}."
            )
        return fitted

    def find_stage_violations(self, model: ModelConfig) -> Iterator[Violation]:
        """Yield the violations of the pipeline axis that follow from the model alone.

        Args:
            model: the `model:` section.
        """
        if self.pipeline > 1 or self.layers_per_stage is not None:
            yield from find_stage_violations(
                self.pipeline, self.pipeline_schedule, self.layers_per_stage, model
            )

    @property
    def _non_shard_ranks(self) -> int:
        return self.pipeline * self.replicate * self.context * self.tensor

    @property
    def _replica_text(self) -> str:
        axes = {"shard": self.shard, "context": self.context, "tensor": self.tensor}
        return " × ".join(
            f"{name}={size}" for name, size in axes.items() if name == "shard" or size > 1
        )

    def _find_axis_violations(self, world_size: int) -> Iterator[str]:
        if world_size < 1:
            yield f"{world_size} ranks cannot hold a model. Start at least one process."
        elif self.shard != -1 and self.shard < 1:
            yield (
                f"layout.shard={self.shard} is not a number of ranks. Use 1 or more, or -1 for "
                "all remaining ranks."
            )
        elif self.context % self.ring_size:
            yield (
                f"layout.ring={self.ring} members cannot share context={self.context} ranks "
                f"equally. Use ring={format_choices(list_divisors(self.context)[1:])}, or "
                "context_kind=ring."
            )
        elif world_size % self._non_shard_ranks:
            names = [
                name
                for name in ("pipeline", "replicate", "context", "tensor")
                if getattr(self, name) > 1
            ]
            wanted = " × ".join(f"{name}={getattr(self, name)}" for name in names)
            parts = "copies" if names == ["replicate"] else "parts"
            choices = format_choices(list_divisors(world_size))
            remedy = f"Use replicate={choices}, or start" if names == ["replicate"] else "Start"
            yield (
                f"{world_size} ranks cannot be split into {wanted} equal {parts}. "
                f"{remedy} a multiple of {self._non_shard_ranks} processes."
            )
        elif self.shard not in (-1, world_size // self._non_shard_ranks):
            sizes = {
                name: getattr(self, name)
                for name in ("pipeline", "replicate", "shard", "context", "tensor")
            }
            product = " × ".join(
                f"{name}={size}"
                for name, size in sizes.items()
                if name in ("replicate", "shard") or size > 1
            )
            yield (
                f"{product} is {self._non_shard_ranks * self.shard}, but there are {world_size} "
                f"ranks. Use shard={world_size // self._non_shard_ranks}, or shard=-1, or start "
                f"{self._non_shard_ranks * self.shard} processes."
            )
