"""A layout as people write it: tp=8,cp=16,pp=16,dp=8, in one line, with a pipeline as any trainer
may run it.

Axes are tensor, context, pipeline, data (ep for experts, vp for stages on each rank of a pipeline).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from llmsys.config.combinations import find_refused_combinations
from llmsys.config.expert_sharding import find_expert_violations
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout, find_model_sharding_violations
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.errors import ConfigError, format_choices

NAMES = {
    "tp": "tensor",
    "tensor": "tensor",
    "cp": "context",
    "context": "context",
    "pp": "pipeline",
    "pipeline": "pipeline",
    "dp": "data",
    "data": "data",
    "ep": "expert",
    "expert": "expert",
    "replicate": "replicate",
    "shard": "shard",
    "fsdp": "shard",
    "vp": "interleave",
    "interleave": "interleave",
}
KNOWN = (
    "tp, cp, pp, vp, dp, ep, replicate, shard (or tensor, context, pipeline, interleave, data, "
    "expert)"
)


@dataclass(frozen=True)
class NamedLayout:
    """A layout as somebody wrote it; `data` ranks are replicate · shard."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    replicate: int = 1
    shard: int = 1
    interleave: int = 1  # stages on each rank of the pipeline

    @property
    def num_devices(self) -> int:
        """The product of its axes; experts are dealt inside of them."""
        return self.tensor * self.context * self.pipeline * self.replicate * self.shard

    @property
    def layout(self) -> ParallelLayout:
        """The axes of one stage."""
        return ParallelLayout(
            replicate=self.replicate,
            shard=self.shard,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
        )

    def build_layout(self, given: ParallelLayout) -> ParallelLayout:
        """Build the axes of one stage with the kind of context parallelism that a config gives."""
        return self.layout.model_copy(
            update={"context_kind": given.context_kind, "ring": given.ring}
        )


def parse_layout(text: str) -> NamedLayout:
    """Parse a layout such as `tp=8,pp=16,dp=64`.

    Args:
        text: axis=size pairs, separated by commas.

    Returns:
        The named sizes.

    Raises:
        ConfigError: an unknown axis, a repeated one, or a size below 1.
    """
    axes: dict[str, int] = {}
    for word in re.split(r"\s*[,×*]\s*|\s+x\s+|\s+", text.strip()):
        name, _, size = word.partition("=")
        axis = NAMES.get(name.strip().lower())
        if axis is None or not size.isdigit() or int(size) < 1:
            raise ConfigError(
                f"{word!r} is not an axis of a layout. Write, for example, tp=8,pp=16,dp=64. "
                f"Known: {KNOWN}."
            )
        if axis in axes:
            raise ConfigError(f"{text!r} says {axis} twice. Give it once.")
        axes[axis] = int(size)
    if "data" in axes:
        if axes.keys() & {"replicate", "shard"}:
            raise ConfigError(
                f"{text!r} gives dp and also replicate or shard, whose product it is. Give one or "
                "the other."
            )
        axes["shard"] = axes.pop("data")
    return NamedLayout(**axes)


def find_layout_violations(
    config: RunConfig, named: NamedLayout, devices: int | None, *, with_batch: bool
) -> Iterator[str]:
    """Yield every violation of a layout on a number of devices.

    Args:
        config: resolved config of a run.
        named: layout that `parse_layout` returned.
        devices: devices in use; None: the product of the axes.
        with_batch: check that the batch divides over the layout.

    Yields:
        One sentence per violation.
    """
    if devices is not None and named.num_devices != devices:
        yield format_device_mismatch(named, devices)
    yield from _find_pipeline_violations(config.model, named)
    ring = named.build_layout(config.layout).ring_size
    axes = SimpleNamespace(tensor=named.tensor, context=named.context)
    for broken in (
        *find_refused_combinations(SimpleNamespace(model=config.model, layout=axes)),
        *find_model_sharding_violations(named.tensor, named.context, config.model, ring),
    ):
        yield broken.message
    yield from find_expert_violations(named.expert, config.model)
    copy = named.shard * named.context * named.tensor
    ranks = copy * named.replicate
    if config.model.moe is not None and ranks % named.expert:
        yield f"expert={named.expert} does not divide the {ranks} ranks of a stage."
    length, parts = config.batch.sequence_length, named.context * named.tensor
    if with_batch and length % parts:
        yield (
            f"batch.sequence_length={length} positions cannot be divided over "
            f"context={named.context} × tensor={named.tensor} ranks."
        )
    sequences, ranks = config.batch.sequences_per_step, named.replicate * named.shard
    if with_batch and sequences % ranks:
        near = max(1, round(sequences / ranks)) * ranks
        rule = f"{sequences} sequences of a step cannot be divided evenly over {ranks} data ranks"
        yield f"{rule}. Use batch.sequences={near}."


def format_device_mismatch(named: NamedLayout, devices: int) -> str:
    """Return a sentence on a layout whose axes do not multiply to a number of devices, with what
    would.

    Args:
        named: the layout.
        devices: devices in use.

    Returns:
        One or two sentences.
    """
    axes = {"tensor": named.tensor, "context": named.context, "pipeline": named.pipeline}
    axes |= (
        {"replicate": named.replicate, "data": named.shard}
        if named.replicate > 1
        else {"data": named.shard}
    )
    product = " × ".join(
        f"{name}={size}" for name, size in axes.items() if size > 1 or name == "data"
    )
    others = named.num_devices // named.shard
    remedy = (
        f"With the other axes unchanged, data={devices // others} uses all of them."
        if devices % others == 0
        else f"The other axes multiply to {others}, which does not divide {devices}."
    )
    return f"{product} is {named.num_devices} devices, and there are {devices}. {remedy}"


def _find_pipeline_violations(model: ModelConfig, named: NamedLayout) -> Iterator[str]:
    if named.interleave > 1 and named.pipeline == 1:
        yield (
            f"vp={named.interleave} stages on each rank need a pipeline. Add pp=2 or more, or "
            "remove vp."
        )
    if named.pipeline > model.num_hidden_layers:
        legal = [n for n in list_divisors(model.num_hidden_layers) if n <= named.pipeline]
        yield (
            f"{model.num_hidden_layers} blocks cannot be divided over pipeline={named.pipeline} "
            f"stages. Use pipeline={format_choices(legal[-4:])}."
        )
