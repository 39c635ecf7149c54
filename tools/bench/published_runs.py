"""Read whole published runs as setups: accelerator-hours for a number of tokens.

Few reports name a layout. Where one does not, the run gets the fastest layout that fits, over sizes of the tensor and
pipeline axes, micro-batches and recomputation policies.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from llmsys.config.model import ModelConfig
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.software_profile import SoftwareProfile
from llmsys.estimate.step_time import estimate_step_time
from tools.bench.published_setup import (
    Row,
    Setup,
    build_layout,
    build_run_config,
    load_published_model,
    load_software,
    resolve_device_name,
)

OLD = ("A100", "V100", "TPUv3", "TPUv4", "P100fp32")  # of the years before fused attention and large batches
MEMORY_USED = 0.85  # of a device, by state and activations


@dataclass(frozen=True)
class LayoutChoice:
    """One candidate layout of a run."""

    tensor: int
    pipeline: int
    expert: int
    micro: int
    recompute: str


def iter_full_run_setups(table: str, row: Row) -> Iterator[Setup]:
    """Yield the hours of a run, and the seconds per step where the row has them."""
    if row.get("tokens") and row.get("accel_hours"):
        run = _build_full_run(table, row)
        yield run
        if row.get("step_time_s"):
            yield replace(run, name=f"{run.name} step", kind="step", measured=float(row["step_time_s"]))


def _build_full_run(table: str, row: Row) -> Setup:
    model = load_published_model(row.get("truth_model") or row["id"], row)
    device = "a100-40gb" if "40GB" in row.get("gpu", "") else resolve_device_name(row["hardware"])
    setups = [_build_setup(table, row, model, device, choice) for choice in _list_choices(row)]
    fitting = [
        one for one in setups if _estimate_bytes(row, one) <= MEMORY_USED * load_device_profile(device).memory_bytes
    ]
    return min(fitting or setups[-1:], key=_estimate_seconds)


def _build_setup(table: str, row: Row, model: ModelConfig, device: str, choice: LayoutChoice) -> Setup:
    """Return the run in one layout. Defaults, by size: 256 to 2,048 devices, and 2 to 32 million tokens a step."""
    total, length = row["params_total"], row.get("seq") or (2048 if row["hardware"] in OLD else 4096)
    ranks = row.get("n_accelerators") or (256 if total < 10e9 else 1024 if total < 50e9 else 2048)
    shard = max(1, ranks // (choice.tensor * choice.pipeline))
    sequences = max(1, round(_choose_batch_tokens(row) / length / shard)) * shard
    split = choice.tensor * choice.pipeline > 1
    config = build_run_config(
        model, length, sequences, min(choice.micro, sequences // shard), recompute=choice.recompute,
        precision="fp16" if row["hardware"] == "V100" else "bf16", engine="zero1" if split else "fsdp",
        tokens=row["tokens"],
    )  # fmt: skip
    return Setup(
        f"{table} {row['id']}", table, config, build_layout(shard, choice.tensor, 1, choice.expert), device,
        choose_software(row), float(row["accel_hours"]), "run", choice.pipeline, 2 if choice.pipeline > 1 else 1,
    )  # fmt: skip


def _choose_batch_tokens(row: Row) -> float:
    if row.get("global_batch_tokens"):
        return float(row["global_batch_tokens"])
    if row["params_total"] < 10e9:
        return float(2**21)
    if row["hardware"] in OLD or row["params_total"] < 100e9:
        return float(2**22)
    return float(2**24 if row["params_active"] == row["params_total"] else 2**25)


def choose_software(row: Row) -> SoftwareProfile:
    """Return the software of a row. TPU, V100 and pipelined A100 runs predate fused attention."""
    if row["hardware"] == "A100":
        return load_software("megatron_2021" if row.get("layout") else "pytorch_2022")
    if row["hardware"].startswith("TPU"):
        return load_software("xla")
    is_mixture = row["params_active"] < row["params_total"]
    return load_software("megatron_2021" if row["hardware"] in OLD else "megatron_moe" if is_mixture else "megatron")


def _list_choices(row: Row) -> list[LayoutChoice]:
    """Return the row's own layout, or every candidate for its size. The last one needs the least memory."""
    tensors, pipelines = _list_axis_sizes(row)
    expert = 8 if row["params_active"] < row["params_total"] else 1
    if layout := row.get("layout"):
        found = {key: int(size) for key, size in re.findall(r"(TP|PP|EP)(\d+)", layout)}
        tensors, pipelines, expert = [found.get("TP", 1)], [found.get("PP", 1)], found.get("EP", 1)
    kept = ["full"] if _must_recompute_all(row) else ["selective", "full"]
    return [
        LayoutChoice(one, two, expert, micro, how) for one, two, micro, how in product(tensors, pipelines, (2, 1), kept)
    ]


def _list_axis_sizes(row: Row) -> tuple[list[int], list[int]]:
    """Return candidate sizes of the tensor axis and of the pipeline axis."""
    if row["hardware"].startswith("TPU"):
        return [1, 2, 4, 8, 16], [1]
    if row["params_total"] < 15e9:
        return [1, 2], [1]
    return [1, 2, 4, 8], [1, 2, 4, 8, 16]


def _must_recompute_all(row: Row) -> bool:
    """Return whether only full recomputation fits: without fused attention, or on 40 GB with a large model."""
    small = row["params_total"] < 5e9
    return choose_software(row).attention == "unfused" or ("40GB" in row.get("gpu", "") and not small)


def _estimate_bytes(row: Row, setup: Setup) -> float:
    """Return a rough memory of state and activations.

    Rajbhandari 2019, section 3.1; Korthikanti 2022, table 2 (34·s·b·h).
    """
    parameters, model, split = float(row["params_total"]), setup.config.model, setup.layout.tensor * setup.pipeline
    whole = max(setup.layout.tensor, setup.layout.expert) * setup.pipeline
    state = 12 * parameters / setup.num_ranks + (
        4 * parameters / setup.num_ranks if split == 1 else 6 * parameters / whole
    )
    sequences = float(setup.config.batch.resolve_micro_sequences(10**9))
    one = 34 if setup.config.train.activation_checkpoint == "selective" else 4
    tokens = sequences * setup.config.batch.sequence_length
    return state + one * tokens * model.hidden_size * model.num_hidden_layers / setup.layout.tensor


def _estimate_seconds(setup: Setup) -> float:
    return estimate_step_time(
        setup.config, setup.layout, load_device_profile(setup.device),
        pipeline=setup.pipeline, interleave=setup.interleave, software=setup.software,
    ).seconds.p50  # fmt: skip
