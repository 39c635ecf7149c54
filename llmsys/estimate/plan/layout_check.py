"""Check a named layout: ours, or a published one with a pipeline.

Published layouts are written as tp=8,cp=16,pp=16,dp=8 (tensor, context, pipeline, data; ep for experts). Their stages
are checked and priced as other trainers run them.

What a legal layout takes: whether its fullest rank fits, and the time of a step.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmsys.config.engine import DeepSpeedEngineConfig
from llmsys.config.expert_sharding import find_expert_violations
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout, find_model_sharding_violations
from llmsys.config.run import RunConfig
from llmsys.config.section import format_choices, list_divisors
from llmsys.errors import ConfigError
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.software_profile import (
    COMPILED,
    OURS,
    MemoryProfile,
    build_software_profile,
    resolve_compile_for_profile,
    resolve_for_profile,
)
from llmsys.estimate.step_time import estimate_step_time

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
}
KNOWN = "tp, cp, pp, dp, ep, replicate, shard (or tensor, context, pipeline, data, expert)"


@dataclass(frozen=True)
class NamedLayout:
    """A layout as somebody wrote it; `data` ranks are replicate · shard."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    replicate: int = 1
    shard: int = 1

    @property
    def num_devices(self) -> int:
        """The product of its axes; experts are dealt inside of them."""
        return self.tensor * self.context * self.pipeline * self.replicate * self.shard

    @property
    def layout(self) -> ParallelLayout:
        """The axes of one stage."""
        return ParallelLayout(
            replicate=self.replicate, shard=self.shard, context=self.context, tensor=self.tensor, expert=self.expert
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
                f"{word!r} is not an axis of a layout. Write, for example, tp=8,pp=16,dp=64. Known: {KNOWN}."
            )
        if axis in axes:
            raise ConfigError(f"{text!r} says {axis} twice. Give it once.")
        axes[axis] = int(size)
    if "data" in axes:
        if axes.keys() & {"replicate", "shard"}:
            raise ConfigError(
                f"{text!r} gives dp and also replicate or shard, whose product it is. Give one or the other."
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
        yield _format_device_mismatch(named, devices)
    yield from _find_pipeline_violations(config.model, named)
    yield from (broken.message for broken in find_model_sharding_violations(named.tensor, named.context, config.model))
    yield from find_expert_violations(named.expert, config.model)
    copy = named.shard * named.context * named.tensor
    if config.model.moe is not None and (copy * named.replicate) % named.expert:
        yield f"expert={named.expert} does not divide the {copy * named.replicate} ranks of a stage."
    length, parts = config.batch.sequence_length, named.context * named.tensor
    if with_batch and length % parts:
        yield (
            f"batch.sequence_length={length} positions cannot be divided over context={named.context} × "
            f"tensor={named.tensor} ranks."
        )
    sequences, ranks = config.batch.sequences_per_step, named.replicate * named.shard
    if with_batch and sequences % ranks:
        near = max(1, round(sequences / ranks)) * ranks
        yield f"{sequences} sequences of a step cannot be divided evenly over {ranks} data ranks. Use {near}."


def _format_device_mismatch(named: NamedLayout, devices: int) -> str:
    axes = {"tensor": named.tensor, "context": named.context, "pipeline": named.pipeline}
    axes |= {"replicate": named.replicate, "data": named.shard} if named.replicate > 1 else {"data": named.shard}
    product = " × ".join(f"{name}={size}" for name, size in axes.items() if size > 1 or name == "data")
    others = named.num_devices // named.shard
    remedy = (
        f"With the other axes unchanged, data={devices // others} uses all of them."
        if devices % others == 0
        else f"The other axes multiply to {others}, which does not divide {devices}."
    )
    return f"{product} is {named.num_devices} devices, and there are {devices}. {remedy}"


def _find_pipeline_violations(model: ModelConfig, named: NamedLayout) -> Iterator[str]:
    if named.pipeline > model.num_hidden_layers:
        legal = [n for n in list_divisors(model.num_hidden_layers) if n <= named.pipeline]
        yield (
            f"{model.num_hidden_layers} blocks cannot be divided over pipeline={named.pipeline} stages. Use "
            f"pipeline={format_choices(legal[-4:])}."
        )


def iter_remarks(config: RunConfig, named: NamedLayout) -> Iterator[str]:
    """Yield remarks on a legal layout.

    Args:
        config: resolved config of a run.
        named: layout that `parse_layout` returned.

    Yields:
        One sentence per remark.
    """
    if named.pipeline > 1:
        yield f"pipeline={named.pipeline} is estimated as other trainers run it; layout.pipeline as llmsys train does"
        if config.model.num_hidden_layers % named.pipeline:
            yield f"{config.model.num_hidden_layers} blocks make stages of unequal length"


PIPELINED = MemoryProfile(
    evaluation="none", loss="fused", head="columns", masks="none", selective="attention", gathered="again"
)


def estimate_layout_fit(config: RunConfig, named: NamedLayout, cluster: ClusterCosts) -> dict[str, Any]:
    """Estimate memory and step time of a layout.

    A pipeline is estimated as another trainer's: state sharded as in ZeRO-1,
    since every stage runs many times in a step, and fused kernels.

    Args:
        config: resolved config of a run.
        named: layout that `parse_layout` returned.
        cluster: devices and their profile.

    Returns:
        Keys: fits, memory (a sentence), time (a sentence), step_seconds, peak_bytes.
    """
    device = load_device_profile(cluster.device)
    config = resolve_compile_for_profile(resolve_for_profile(config, device), device, named.layout)
    system, software = OURS, build_software_profile(config)
    if named.pipeline > 1:
        config = config.model_copy(update={"engine": DeepSpeedEngineConfig(zero_stage=1)})
        system, software = replace(PIPELINED, pipeline=named.pipeline), COMPILED
    ledger = estimate_peak_memory(config, named.layout, system=system)
    found = ledger.compute_fit_result(int(device.memory_bytes))
    step = estimate_step_time(config, named.layout, device, pipeline=named.pipeline, software=software)
    seconds = step.seconds
    return {
        "fits": found.fits,
        "peak_bytes": ledger.peak_bytes + ledger.driver_bytes,
        "memory": found.text,
        "step_seconds": seconds.to_dict(),
        "time": (
            f"a step takes {seconds.p50:.3g} s ({seconds.p10:.3g} to {seconds.p90:.3g}), "
            f"{step.tokens_per_second_per_device:,.0f} tokens/s/device, utilisation {step.mfu:.1%}"
        ),
    }
