"""Megatron-LM's published tables, from September 2020 to the H100, and those of papers that used it.

What a table does not say: the micro-batch (see `choose_micro_batch`), and two parts for each stage from April 2021 on.

Megatron-Bridge's tables and Llama 3's: pipelines of modern kernels, dense models and mixtures of experts.
"""

import re
from collections.abc import Iterator

from llmsys.estimate.flops import count_flops
from tools.bench.published_setup import (
    MEGATRON,
    MEGATRON_2020,
    MEGATRON_2021,
    MEGATRON_2022,
    Row,
    Setup,
    build_gpt_model,
    build_layout,
    build_run_config,
    load_published_model,
    resolve_device_name,
)


def compute_megatron_flops(row: Row, length: int, vocabulary: int, batch: int, *, passes: int) -> float:
    """Operations of one step as Megatron reported them; passes is 4 with full recomputation, else 3.

    Narayanan 2021, section 5.1: 24·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)) for each of four passes.
    """
    hidden, layers = int(row["hidden"]), int(row["layers"])
    inside = 24 * batch * length * layers * hidden**2 * (1 + length / (6 * hidden))
    return passes * inside + 6 * batch * length * hidden * vocabulary


def iter_april_2021_setups(table: str, row: Row) -> Iterator[Setup]:
    """Narayanan 2021, table 1: TFLOP/s that count recomputation."""
    seconds = row.get("derived_iter_s") or (
        compute_megatron_flops(row, row["seq"], row["vocab"], row["global_batch_seqs"], passes=4)
        / (row["gpus"] * row["tflops_per_gpu_reported"] * 1e12)
    )
    model = build_gpt_model(row["hidden"], row["layers"], row["heads"], row["vocab"], row["seq"])
    share = row["global_batch_seqs"] // row["dp"]
    config = build_run_config(
        model,
        row["seq"],
        row["global_batch_seqs"],
        choose_micro_batch(row["pp"], share),
        recompute="block",
        precision="fp16",
    )
    parts = 2 if row["pp"] > 1 else 1
    yield Setup(
        f"{table} {row['params']}", table, config, build_layout(row["dp"], row["tp"]), "a100-80gb", MEGATRON_2021,
        seconds, pipeline=row["pp"], interleave=parts,
    )  # fmt: skip


def choose_micro_batch(pipeline: int, share: int) -> int:
    """Sequences of one pass where a table does not say: few under a pipeline, up to four without one."""
    return 1 if pipeline > 1 else min(4, share)


def iter_january_2021_setups(table: str, row: Row) -> Iterator[Setup]:
    """Yield the same models three months earlier, before interleaved stages."""
    tensor = min(8, row["mp"])
    pipeline = row["mp"] // tensor
    shard = row["gpus"] // row["mp"]
    model = build_gpt_model(row["hidden"], row["layers"], row["heads"], 51_200, 2048)
    flops = compute_megatron_flops(row, 2048, 51_200, row["batch"], passes=4)
    micro = choose_micro_batch(pipeline, row["batch"] // shard)
    config = build_run_config(model, 2048, row["batch"], micro, recompute="block", precision="fp16")
    seconds = flops / (row["gpus"] * row["tflops_gpu"] * 1e12)
    software = MEGATRON_2020
    name = f"{table} {row['case']}"
    yield Setup(name, table, config, build_layout(shard, tensor), "a100-80gb", software, seconds, pipeline=pipeline)


def iter_september_2020_setups(table: str, row: Row) -> Iterator[Setup]:
    """Yield one to eight V100s or A100s, times of one forward and backward."""
    model = build_gpt_model(row["hidden"], row["layers"], row["heads"], 51_200, 1024)
    for key, value in row.items():
        if (found := re.fullmatch(r"(v100|a100)_iter_ms_b(\d+)", key)) and value:
            device = {"v100": "v100", "a100": "a100-40gb"}[found[1]]
            sequences = int(found[2])
            config = build_run_config(model, 1024, sequences, sequences, recompute="block", precision="fp16")
            name = f"{table} {row['case']} {found[1]}"
            yield Setup(name, table, config, build_layout(1, row["mp"]), device, MEGATRON_2020, value / 1e3)


def iter_h100_setups(table: str, row: Row) -> Iterator[Setup]:
    """Model TFLOP/s over all of s², without recomputation."""
    model = build_gpt_model(row["hidden"], row["layers"], row["heads"], 131_072, 4096)
    flops = count_flops(model, 4096, row["batch"], "full").forward_backward
    micro = choose_micro_batch(row["pp"], row["batch"] // row["dp"])
    config = build_run_config(model, 4096, row["batch"], micro)
    seconds = flops / (row["gpus"] * row["tflops_gpu"] * 1e12)
    interleave = 2 if row["pp"] > 1 else 1
    name = f"{table} {row['model']}"
    yield Setup(
        name, table, config, build_layout(row["dp"], row["tp"]), "h100-sxm", MEGATRON, seconds,
        pipeline=row["pp"], interleave=interleave,
    )  # fmt: skip


KORTHIKANTI = {"22B": (6144, 48, 64), "175B": (12288, 96, 96), "530B": (20480, 105, 128), "1T": (25600, 128, 160)}


def iter_korthikanti_setups(table: str, row: Row) -> Iterator[Setup]:
    """Korthikanti 2022, table 5: full against selective recomputation with sequence parallelism."""
    hidden, layers, heads = KORTHIKANTI[row["model"]]
    model = build_gpt_model(hidden, layers, heads, 51_200, 2048)
    shard = row["gpus"] // (row["tp"] * row["pp"])
    for key, recompute in (("iter_s_full_recompute", "block"), ("iter_s_selective_sp", "selective")):
        if row.get(key):
            config = build_run_config(model, 2048, row["batch"], row["mbs"], recompute=recompute, precision="fp16")
            name = f"{table} {row['model']} {recompute}"
            yield Setup(
                name, table, config, build_layout(shard, row["tp"]), "a100-80gb", MEGATRON_2022, row[key],
                pipeline=row["pp"], interleave=row["interleave"],
            )  # fmt: skip


def iter_mtnlg_setups(table: str, row: Row) -> Iterator[Setup]:
    """Smith 2022, section 2.4."""
    hidden, layers, heads = KORTHIKANTI["530B"]
    shard = row["gpus"] // (row["tp"] * row["pp"])
    config = build_run_config(
        build_gpt_model(hidden, layers, heads, 51_200, row["seq"]), row["seq"], row["batch"], 1,
        recompute="block", precision="bf16",
    )  # fmt: skip
    name = f"{table} {row['gpus']}"
    yield Setup(
        name,
        table,
        config,
        build_layout(shard, row["tp"]),
        "a100-80gb",
        MEGATRON_2021,
        row["step_s"],
        pipeline=row["pp"],
    )


def iter_bridge_setups(table: str, row: Row) -> Iterator[Setup]:
    """Megatron-Bridge: tokens per second and GPU; the gather group of its FSDP column is the shard axis."""
    tensor, pipeline, context = (row.get(key) or 1 for key in ("tp", "pp", "cp"))
    expert, parts = row.get("ep") or 1, row.get("vp") or 1
    shard = row["gpus"] // (tensor * pipeline * context)
    sharded = "fsdp" if (row.get("fsdp") or 0) > 1 and pipeline == 1 else "zero1"
    config = build_run_config(
        load_published_model(row["model"], row), row["seq"], row["gbs"], row["mbs"],
        engine=sharded, recompute="selective" if (row.get("ep") or 1) > 1 else "none",
    )  # fmt: skip
    software = MEGATRON.model_copy(update={"matmul_dtype": "fp8"}) if "FP8" in row["precision"] else MEGATRON
    name = f"{row['release']} {row['system']} {row['model']} {row['precision']} {row['gpus']} of gbs {row['gbs']}"
    seconds = row["gbs"] * row["seq"] / (row["gpus"] * row["tok_s_gpu"])
    yield Setup(
        name, table, config, build_layout(shard, tensor, context, expert), resolve_device_name(row["system"]),
        software, seconds, pipeline=pipeline, interleave=parts,
    )  # fmt: skip


def iter_llama3_setups(table: str, row: Row) -> Iterator[Setup]:
    """Llama 3, table 4. Its TFLOP/s are taken as of causal-exact model operations, which the paper does not say."""
    model = load_published_model("llama3.1-405b", {})
    shard = row["gpus"] // (row["tp"] * row["cp"] * row["pp"])
    sequences = row["batch_per_dp"] * shard
    config = build_run_config(model, row["seq"], sequences, 1)
    counted = count_flops(model, row["seq"], sequences, "causal").forward_backward
    seconds = counted / (row["gpus"] * row["tflops_gpu"] * 1e12)
    name = f"{table} {row['gpus']} at {row['seq']}"
    yield Setup(
        name, table, config, build_layout(shard, row["tp"], row["cp"]), "h100-sxm", MEGATRON, seconds,
        pipeline=row["pp"], interleave=4,
    )  # fmt: skip
