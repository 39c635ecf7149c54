"""Compare with Korthikanti 2022 (arXiv:2205.05198), figures 1 and 7: state and activations of four
models, by formulas.

The paper's numbers are analytical, not measured: equality shows that both count the same tensors.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.memory_timeline import GIB
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.rank_parameters import count_full_elements, is_in_block, list_pipeline_stages
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import compute_state_bytes, get_compute_dtype_bytes
from tools.bench.fits.published_row import DATA, Row, build_gpt_model, load_shapes

MEGATRON = MemoryProfile(
    evaluation="none",
    masks="none", attention="explicit", selective="attention", gathered="again", loss="whole",
    head="columns",
    measured="allocated",
)  # fmt: skip
POLICIES: dict[str, tuple[str, Literal["divided", "whole"]]] = {
    "none": ("none", "whole"),
    "seq": ("none", "divided"),
    "sel": ("selective", "whole"),
    "seqsel": ("selective", "divided"),
    "full": ("full", "whole"),
}


def iter_analytical_rows() -> Iterator[tuple[str, float, float]]:
    """Yield (quantity, the paper's value, ours); GiB, or per cent."""
    table: Row = json.loads((DATA / "published_runs.json").read_text(encoding="utf-8"))[
        "korthikanti2022"
    ]["memory"]
    for name in load_shapes():
        yield f"state of blocks, {name}", table["states_gib"][name], estimate_state_gib(name)
        whole = estimate_activations_gib(name, "none")
        yield f"activations, {name}", table["activations_gib_none"][name], whole
        ours = estimate_activations_gib(name, "seqsel")
        yield f"activations, {name}, selective", table["activations_gib_selective_sp"][name], ours
        for policy, percent in table["relative_pct"][name].items():
            yield (
                f"{policy} in % of none, {name}",
                percent,
                100 * estimate_activations_gib(name, policy) / whole,
            )


def estimate_activations_gib(name: str, policy: str) -> float:
    """Return the activations that the first stage saves for all micro-batches in flight, in GiB."""
    shape = load_shapes()[name]
    recompute, stream = POLICIES[policy]
    system = replace(
        MEGATRON, pipeline=shape["stages"], pipeline_chunks=shape["chunks"], residual_dtype=stream
    )
    ledger = estimate_peak_memory(
        build_megatron_config(name, recompute), ParallelLayout(shard=1, tensor=8), system=system
    )
    forward = next(one for one in ledger.instants if one.name == "at the end of forward")
    return (
        next(item.bytes for item in forward.items if item.name == "activations saved by blocks")
        / GIB
    )


def estimate_state_gib(name: str) -> float:
    """Return the state of the blocks of one stage, in GiB.

    16-bit weights, float32 gradients, master weights and moments: 18 bytes a parameter.
    """
    config, layout = build_megatron_config(name, "none"), ParallelLayout(shard=1, tensor=8)
    stage = list_pipeline_stages(
        config.model, replace(MEGATRON, pipeline=load_shapes()[name]["stages"])
    )[0]
    rows = [row for row in stage.iter_parameters(config.model) if is_in_block(row)]
    weights = get_compute_dtype_bytes(config) * sum(
        count_full_elements(row, layout, config.model) * row.num_copies for row in rows
    )
    return (compute_state_bytes(config, layout, rows).total + weights) / GIB


def build_megatron_config(name: str, recompute: str) -> RunConfig:
    """Return the run of one column of the figures."""
    shape = load_shapes()[name]
    sequences, stages = shape["micro"], shape["stages"]
    model = build_gpt_model(shape["hidden"], shape["layers"], shape["heads"], 51_200)
    dropout = {"residual": 0.1, "attention": 0.1, "embedding": 0.1}
    model = type(model).model_validate(model.model_dump() | {"dropout": dropout})
    return RunConfig.model_validate(
        {
            "model": model,
            "batch": {
                "sequence_length": 2048,
                "sequences": 64 * stages * sequences,
                "micro_sequences": sequences,
            },
            "engine": {"kind": "deepspeed", "zero_stage": 0},
            "train": {"precision": "fp16", "activation_checkpoint": recompute},
        }
    )
