"""The parallel layout: how the ranks of a run share the model.

A section of the config says what is wanted (`shard: -1` takes the ranks that are left); `resolve` resolves it for a world
size and a model, or says which number does not divide and which would.
"""

from collections.abc import Iterator

from pydantic import Field

from llmsys.config.axes import find_model_sharding_violations
from llmsys.config.base import Section
from llmsys.config.model import ModelConfig
from llmsys.config.rule import list_divisors, format_choices
from llmsys.errors import LayoutError


class ParallelLayout(Section):
    """Axes of the mesh: replicate × shard × context × tensor = ranks; experts are carved out of the last three.

    Ranks of different `replicate` or `shard` train on different sequences; those of one `context` share sequences
    between them, and those of one `tensor` matrices too. Dense parameters are split over shard · context ranks, and
    within a layer over `tensor`. Experts are dealt over `expert` of the shard · context · tensor ranks of one copy, and
    what each of those holds is split over the rest; a single expert is never split by `tensor`.
    """

    replicate: int = Field(1, ge=1, description="Copies of the sharded model.")
    shard: int = Field(-1, description="Ranks of one copy with data of their own; -1 takes all that the others leave.")
    expert: int = Field(
        1, ge=1, description="Ranks over which the routed experts are dealt; divides shard · context · tensor."
    )
    context: int = Field(
        1, ge=1, description="Ranks that share a sequence and exchange heads for positions around attention (Ulysses)."
    )
    tensor: int = Field(
        1, ge=1, description="Ranks that split the matrices of a layer, and the positions between layers."
    )

    @property
    def world_size(self) -> int:
        """Ranks of a resolved layout."""
        return self.replicate * self.ranks_per_replica

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one copy of the model together, of a resolved layout."""
        return self.shard * self.context * self.tensor

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks with sequences of their own, of a resolved layout."""
        return self.replicate * self.shard

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that hold parts of the same sequences."""
        return self.context * self.tensor

    def get_data_rank(self, rank: int) -> int:
        """Which of the `data_parallel_size` a rank belongs to: tensor is the innermost axis, then context."""
        return rank // self.sequence_parallel_size

    def resolve(self, world_size: int, model: ModelConfig) -> "ParallelLayout":
        """This layout with `shard` resolved for `world_size` ranks.

        Raises LayoutError with the value, the rule and the values that would do.
        """
        for problem in self._find_axis_violations(world_size):
            raise LayoutError(problem)
        fitted = self.model_copy(update={"shard": world_size // self._non_shard_ranks})
        for problem in find_expert_violations(self.expert, model):
            raise LayoutError(problem)
        for broken in find_model_sharding_violations(self.tensor, self.context, model):
            raise LayoutError(broken.message)
        if fitted.ranks_per_replica % self.expert:
            legal = [n for n in list_divisors(fitted.ranks_per_replica) if model.moe and model.moe.num_experts % n == 0]
            raise LayoutError(
                f"expert={self.expert} does not divide {fitted._replica_text}, the ranks that split one copy of the "
                f"model. Use expert={format_choices(legal)}, or a number of ranks that is a multiple of "
                f"{self.replicate * self.expert}."
            )
        return fitted

    @property
    def _non_shard_ranks(self) -> int:
        return self.replicate * self.context * self.tensor

    @property
    def _replica_text(self) -> str:
        axes = {"shard": self.shard, "context": self.context, "tensor": self.tensor}
        return " × ".join(f"{name}={size}" for name, size in axes.items() if name == "shard" or size > 1)

    def _find_axis_violations(self, world_size: int) -> Iterator[str]:
        if world_size < 1:
            yield f"{world_size} ranks cannot hold a model. Start at least one process."
        elif self.shard != -1 and self.shard < 1:
            yield f"layout.shard={self.shard} is not a number of ranks. Use 1 or more, or -1 for all that are left."
        elif world_size % self._non_shard_ranks:
            names = [name for name in ("replicate", "context", "tensor") if getattr(self, name) > 1]
            wanted = " × ".join(f"{name}={getattr(self, name)}" for name in names)
            parts = "copies" if names == ["replicate"] else "parts"
            remedy = f"Use replicate={format_choices(list_divisors(world_size))}, or start" if names == ["replicate"] else "Start"
            yield (
                f"{world_size} ranks cannot be split into {wanted} equal {parts}. "
                f"{remedy} a multiple of {self._non_shard_ranks} processes."
            )
        elif self.shard not in (-1, world_size // self._non_shard_ranks):
            sizes = {"replicate": self.replicate, "shard": self.shard, "context": self.context, "tensor": self.tensor}
            product = " × ".join(
                f"{name}={size}" for name, size in sizes.items() if name in ("replicate", "shard") or size > 1
            )
            yield (
                f"{product} is {self._non_shard_ranks * self.shard}, but there are {world_size} ranks. "
                f"Use shard={world_size // self._non_shard_ranks}, or shard=-1, or start {self._non_shard_ranks * self.shard} processes."
            )


def find_expert_violations(expert: int, model: ModelConfig) -> Iterator[str]:
    """What forbids dealing this model's experts over `expert` ranks, whatever the number of ranks."""
    if model.moe is None:
        if expert > 1:
            yield f"A dense model has no experts to split over expert={expert}. Use expert=1, or add model.moe."
    elif model.moe.num_experts % expert:
        experts = model.moe.num_experts
        yield (
            f"{experts} experts cannot be split over expert={expert}. Use expert={format_choices(list_divisors(experts))}, "
            f"or set model.moe.num_experts to a multiple of {expert}."
        )
