"""Changes of a config that may lower a rank's peak, from the cheapest in time to the dearest."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llmsys.config.layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation import compute_micro_batch
from llmsys.estimate.system import MemoryProfile

Change = tuple[str, RunConfig, ParallelLayout, MemoryProfile]


def iter_config_changes(config: RunConfig, layout: ParallelLayout, system: MemoryProfile) -> Iterator[Change]:
    """What a person would change, as text and as what `estimate_peak_memory` takes."""
    if system.loss != "chunked":
        yield "chunking the loss", config, layout, replace(system, loss="chunked")
    for policy in ("selective", "block")[("none", "selective", "block").index(config.train.recompute) :]:
        yield f"train.recompute={policy}", _update_section(config, "train", recompute=policy), layout, system
    sequences = compute_micro_batch(config, layout)[0]
    if sequences > 1:
        half = sequences // 2
        yield f"batch.micro_sequences={half}", _update_section(config, "batch", micro_sequences=half), layout, system
    if config.evaluation_sequences > 1 and system.evaluation == "logits":
        fewer = config.evaluation_sequences // 2
        text = f"evaluation.micro_sequences={fewer}"
        yield text, _update_section(config, "evaluation", micro_sequences=fewer), layout, system
    if layout.replicate > 1 and config.engine.kind == "torch" and config.engine.data_parallel == "fsdp":
        more = layout.model_copy(update={"replicate": 1, "shard": layout.shard * layout.replicate})
        yield f"layout.replicate=1 with layout.shard={more.shard}", config, more, system
    yield from _iter_engine_changes(config, layout, system)


def _iter_engine_changes(config: RunConfig, layout: ParallelLayout, system: MemoryProfile) -> Iterator[Change]:
    engine = config.engine
    if engine.kind == "deepspeed":
        if engine.zero_stage < 3:
            yield "engine.zero_stage=3", _update_section(config, "engine", zero_stage=3), layout, system
        if engine.offload == "none" and engine.zero_stage:
            yield "engine.offload=optimizer", _update_section(config, "engine", offload="optimizer"), layout, system
    elif engine.kind == "torch":
        if engine.data_parallel == "ddp":
            shards = layout.model_copy(update={"replicate": 1, "shard": layout.data_parallel_size})
            text = f"engine.data_parallel=fsdp with layout.replicate=1 and layout.shard={shards.shard}"
            yield text, _update_section(config, "engine", data_parallel="fsdp"), shards, system
        elif engine.offload == "none":
            yield "engine.offload=state", _update_section(config, "engine", offload="state"), layout, system


def _update_section(config: RunConfig, section: str, **values: Any) -> RunConfig:
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})
