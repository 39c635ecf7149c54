"""The parallel layout: how the ranks of a run share the model.

A section of the config says what is wanted (`shard: -1` takes the ranks that are left); `fit` resolves it for a world
size and a model, or says which number does not divide and which would.
"""

from collections.abc import Iterator

from pydantic import Field

from llmsys.config.base import Section
from llmsys.config.model import ModelConfig
from llmsys.config.rule import divisors, listed
from llmsys.errors import LayoutError


class Layout(Section):
    """Axes of the mesh: replicate × shard = ranks; the expert axis is carved out of the shard axis.

    Dense parameters are split over `shard` ranks and copied over `replicate`. Experts are dealt over `expert` ranks,
    and what each of those holds is split over the remaining shard / expert.
    """

    replicate: int = Field(1, ge=1, description="Copies of the sharded model.")
    shard: int = Field(-1, description="Ranks that split one copy; -1 takes all that replicate leaves.")
    expert: int = Field(1, ge=1, description="Ranks over which the routed experts are dealt; divides shard.")

    @property
    def world_size(self) -> int:
        """Ranks of a resolved layout."""
        return self.replicate * self.shard

    def fit(self, world_size: int, model: ModelConfig) -> "Layout":
        """This layout with `shard` resolved for `world_size` ranks.

        Raises LayoutError with the value, the rule and the values that would do.
        """
        for problem in self._axis_problems(world_size):
            raise LayoutError(problem)
        shard = world_size // self.replicate
        for problem in expert_problems(self.expert, model):
            raise LayoutError(problem)
        if shard % self.expert:
            legal = [n for n in divisors(shard) if model.moe and model.moe.num_experts % n == 0]
            raise LayoutError(
                f"expert={self.expert} does not divide shard={shard}, the ranks that split one copy of the model. "
                f"Use expert={listed(legal)}, or a number of ranks that is a multiple of "
                f"{self.replicate * self.expert}."
            )
        return Layout(replicate=self.replicate, shard=shard, expert=self.expert)

    def _axis_problems(self, world_size: int) -> Iterator[str]:
        if world_size < 1:
            yield f"{world_size} ranks cannot hold a model. Start at least one process."
        elif self.shard != -1 and self.shard < 1:
            yield f"layout.shard={self.shard} is not a number of ranks. Use 1 or more, or -1 for all that are left."
        elif world_size % self.replicate:
            yield (
                f"{world_size} ranks cannot be split into replicate={self.replicate} equal copies. "
                f"Use replicate={listed(divisors(world_size))}, or start a multiple of {self.replicate} processes."
            )
        elif self.shard not in (-1, world_size // self.replicate):
            yield (
                f"replicate={self.replicate} × shard={self.shard} is {self.replicate * self.shard}, "
                f"but there are {world_size} ranks. Use shard={world_size // self.replicate}, or shard=-1, "
                f"or start {self.replicate * self.shard} processes."
            )


def expert_problems(expert: int, model: ModelConfig) -> Iterator[str]:
    """What forbids dealing this model's experts over `expert` ranks, whatever the number of ranks."""
    if model.moe is None:
        if expert > 1:
            yield f"A dense model has no experts to split over expert={expert}. Use expert=1, or add model.moe."
    elif model.moe.num_experts % expert:
        experts = model.moe.num_experts
        yield (
            f"{experts} experts cannot be split over expert={expert}. Use expert={listed(divisors(experts))}, "
            f"or set model.moe.num_experts to a multiple of {expert}."
        )
