"""Whole published runs: accelerator-hours for a number of tokens, with whatever else the report says."""

import re
from collections.abc import Iterator
from dataclasses import replace

from llmsys.estimate.software import Software
from tools.bench.published_setup import (
    MEGATRON,
    MEGATRON_2021,
    PYTORCH_2022,
    Row,
    Setup,
    axes,
    config_of,
    published_device,
    published_model,
)


def full_runs(table: str, row: Row) -> Iterator[Setup]:
    """Whole runs. What a row does not say is filled in by size and age of the device.

    Layout: FSDP below 13 billion parameters, then eight ranks of tensor parallelism, above 100 billion a pipeline too.
    Devices: 256, 1,024 or 2,048. A step: 2 or 4 million tokens, 16 for what is larger than 100 billion on an H100.
    """
    if row.get("tokens") and row.get("accel_hours"):
        run = _full_run(table, row)
        yield run
        if row.get("step_time_s"):
            yield replace(run, name=f"{run.name} step", kind="step", measured=float(row["step_time_s"]))


def _full_run(table: str, row: Row) -> Setup:
    total, length = row["params_total"], row.get("seq") or (2048 if row["hardware"] in OLD else 4096)
    device = "a100-40gb" if "40GB" in row.get("gpu", "") else published_device(row["hardware"])
    ranks = row.get("n_accelerators") or (256 if total < 13e9 else 1024 if total < 100e9 else 2048)
    tensor, pipeline, expert = run_axes(row, total)
    shard = max(1, ranks // (tensor * pipeline))
    usual = 2**21 if total < 13e9 else 2**22 if total < 100e9 or row["hardware"] in OLD else 2**24
    wanted = row.get("global_batch_tokens") or usual
    sequences = max(1, round(wanted / length / shard)) * shard
    micro = 1 if pipeline > 1 else min(4, sequences // shard)
    whole = total > 60e9 or (device in ("a100-40gb", "v100") and total > 5e9)
    config = config_of(
        published_model(row.get("truth_model") or row["id"], row), length, sequences, micro,
        recompute="block" if whole and row["hardware"] in OLD else "selective",
        precision="fp16" if row["hardware"] == "V100" else "bf16",
        engine="fsdp" if pipeline * tensor == 1 else "zero1", tokens=row["tokens"],
    )  # fmt: skip
    return Setup(
        f"{table} {row['id']}", table, config, axes(shard, tensor, 1, expert), device, run_software(row),
        float(row["accel_hours"]), "run", pipeline, 2 if pipeline > 1 else 1,
    )  # fmt: skip


OLD = ("A100", "V100", "TPUv3", "TPUv4", "P100fp32")


def run_software(row: Row) -> Software:
    """Pipelines on A100s and all runs on TPUs and V100s are of before fused attention."""
    if row["hardware"] == "A100":
        return MEGATRON_2021 if row.get("layout") else PYTORCH_2022
    return MEGATRON_2021 if row["hardware"] in OLD else MEGATRON


def run_axes(row: Row, total: float) -> tuple[int, int, int]:
    """Ranks of tensor, pipeline and expert axis, as the row's layout says, or else by size."""
    if layout := row.get("layout"):
        found = {key: int(size) for key, size in re.findall(r"(TP|PP|EP)(\d+)", layout)}
        return found.get("TP", 1), found.get("PP", 1), found.get("EP", 1)
    if row["hardware"].startswith("TPU"):
        return (1 if total < 13e9 else 8), 1, 1
    if row["params_active"] < total:
        return 1, 1 if total < 60e9 else 16, 8
    return (1 if total < 13e9 else 8), (1 if total < 100e9 else 8 if total < 300e9 else 16), 1
