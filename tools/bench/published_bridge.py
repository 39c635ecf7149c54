"""Megatron-Bridge's tables and Llama 3's: pipelines of modern kernels, dense models and mixtures of experts."""

from collections.abc import Iterator

from llmsys.estimate.flops import count_flops
from tools.bench.published_setup import MEGATRON, Row, Setup, build_layout, build_run_config, resolve_device_name, load_published_model


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
