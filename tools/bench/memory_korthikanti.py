"""Korthikanti 2022 (arXiv:2205.05198), figures 1 and 7: state and activations of four models, by its own formulas.

Analytical numbers, no readings of an allocator: they hold that the ledger counts the same tensors.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmsys.config.run import RunConfig
from llmsys.estimate.memory_timeline import GIB
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.pipeline_stages import list_pipeline_stages
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import compute_state_bytes, count_full_elements, get_compute_dtype_bytes, is_in_block
from tools.bench.published_megatron import KORTHIKANTI
from tools.bench.published_setup import DATA, Row, build_gpt_model, build_layout, build_run_config

MEGATRON = MemoryProfile(
    evaluation="none",
    masks="none", attention="explicit", selective="attention", gathered="again", loss="whole", head="columns",
    measured="allocated",
)  # fmt: skip
# Sequences of a micro-batch, stages, chunks of a stage (the paper's table 3); 8 tensor ranks each.
SETTINGS = {"22B": (4, 1, 1), "175B": (1, 8, 3), "530B": (1, 35, 3), "1T": (1, 64, 1)}
POLICIES: dict[str, tuple[str, Literal["divided", "whole"]]] = {
    "none": ("none", "whole"),
    "seq": ("none", "divided"),
    "sel": ("selective", "whole"),
    "seqsel": ("selective", "divided"),
    "full": ("block", "whole"),
}


def iter_analytical_rows() -> Iterator[tuple[str, float, float]]:
    """Yield (what, the paper's GiB, ours)."""
    table: Row = json.loads((DATA / "published_runs.json").read_text(encoding="utf-8"))["korthikanti2022"]["memory"]
    for name in SETTINGS:
        yield f"state of blocks, {name}", table["states_gib"][name], estimate_state_gib(name)
        whole = estimate_activations_gib(name, "none")
        yield f"activations, {name}", table["activations_gib_none"][name], whole
        ours = estimate_activations_gib(name, "seqsel")
        yield f"activations, {name}, selective", table["activations_gib_selective_sp"][name], ours
        for policy, percent in table["relative_pct"][name].items():
            yield f"{policy} in % of none, {name}", percent, 100 * estimate_activations_gib(name, policy) / whole


def estimate_activations_gib(name: str, policy: str) -> float:
    """What the first stage keeps of all micro-batches in flight."""
    _, stages, chunks = SETTINGS[name]
    recompute, stream = POLICIES[policy]
    system = replace(MEGATRON, pipeline=stages, pipeline_chunks=chunks, residual_dtype=stream)
    ledger = estimate_peak_memory(build_megatron_config(name, recompute), build_layout(1, 8), system=system)
    forward = next(one for one in ledger.instants if one.name == "at the end of the forward")
    return next(item.bytes for item in forward.items if item.name == "activations kept by blocks") / GIB


def estimate_state_gib(name: str) -> float:
    """16-bit weights, float32 gradients, masters and moments of the blocks of one stage: 18 bytes a parameter."""
    config, layout = build_megatron_config(name, "none"), build_layout(1, 8)
    stage = list_pipeline_stages(config.model, replace(MEGATRON, pipeline=SETTINGS[name][1]))[0]
    rows = [row for row in stage.iter_parameters(config.model) if is_in_block(row)]
    weights = get_compute_dtype_bytes(config) * sum(
        count_full_elements(row, layout, config.model) * row.num_copies for row in rows
    )
    return (compute_state_bytes(config, layout, rows).total + weights) / GIB


def build_megatron_config(name: str, recompute: str) -> RunConfig:
    """Return the run of one column of the figures."""
    hidden, layers, heads = KORTHIKANTI[name]
    dropout = {"residual": 0.1, "attention": 0.1, "embedding": 0.1}
    shape = build_gpt_model(hidden, layers, heads, 51_200, 2048).model_dump() | {"dropout": dropout}
    sequences, stages, _ = SETTINGS[name]
    model = type(build_gpt_model(8, 1, 1, 8, 8)).model_validate(shape)
    config = build_run_config(model, 2048, 64 * stages * sequences, sequences, recompute=recompute, precision="fp16")
    engine = {"kind": "deepspeed", "zero_stage": 0}
    return RunConfig.model_validate(config.model_dump() | {"engine": engine, "model": model})


if __name__ == "__main__":
    for what, paper, ours in iter_analytical_rows():
        print(f"{what:<40} {paper:8.2f} {ours:8.2f} {ours / paper - 1:+.2%}")
