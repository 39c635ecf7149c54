"""torchtitan's tables and DeepSpeed's ZeRO-3: weights split over the ranks that train on different sequences."""

from collections.abc import Iterator

from llmsys.estimate.flops import count_flops
from llmsys.estimate.software_profile import SoftwareProfile
from tools.bench.published_megatron import KORTHIKANTI
from tools.bench.published_setup import (
    TITAN,
    TITAN_EAGER,
    TITAN_GRAPH,
    ZERO_3_2022,
    Row,
    Setup,
    build_gpt_model,
    build_layout,
    build_run_config,
    load_published_model,
)


def iter_titan_setups(table: str, row: Row) -> Iterator[Setup]:
    """torchtitan: tokens per second and GPU, on H100s capped at 500 W unless the row says otherwise."""
    parallel, local = row["parallel"], row["local_batch"]
    tensor, context, pipeline = (parallel.get(key) or 1 for key in ("tp", "cp", "pp"))
    shard = max(1, row["gpus"] // (tensor * context * pipeline))
    recompute = {"full": "block", "none": "none"}.get(row["ac"], "selective")
    parts = 2 if "interleaved" in row["options"].lower() else 1
    # Its default cuts a rank's batch into as many micro-batches as there are stages.
    micro = local if pipeline == 1 else max(1, local // (pipeline * parts))
    config = build_run_config(
        load_published_model(row["model"], row), row["seq"], local * shard, micro,
        recompute=recompute, engine="fsdp" if pipeline == 1 else "zero1",
    )  # fmt: skip
    tokens = row["seq"] * local * shard
    name = (
        f"{row['table']} {row['model']} {row['options']}, {row['gpus']} of {_format_parallel(parallel)}, {row['seq']}"
    )
    device = "h200" if row.get("hardware") == "H200" else "h100-sxm-96gb-500w"
    yield Setup(
        name, table, config, build_layout(shard, tensor, context), device, parse_titan_software(row["options"]),
        tokens / row["gpus"] / row["tok_s_gpu"], pipeline=pipeline, interleave=parts,
    )  # fmt: skip


def parse_titan_software(options: str) -> SoftwareProfile:
    """From the words of the options column."""
    words = options.lower().replace(" ", "")
    changes: Row = {}
    if "fp8" in words and "fp8all-gatheronly" not in words:
        changes["matmul_dtype"] = "fp8"
        changes["scales"] = "row" if "rowwise" in words else "tensor"
    if "asynctp" in words:
        changes["tensor_overlap"] = 0.6
    return (TITAN if "compile" in words else TITAN_EAGER).model_copy(update=changes)


def _format_parallel(parallel: Row) -> str:
    return " ".join(f"{key} {value}" for key, value in parallel.items())


def iter_graph_trainer_setups(table: str, row: Row) -> Iterator[Setup]:
    """torchtitan with a traced graph, and plain rows of the same notes."""
    recompute = {"none": "none", "full recompute": "block"}.get(row["policy"], "selective")
    local, gpus = row["local_batch"], row["gpus"]
    config = build_run_config(
        load_published_model(row["model"], row), row["seq"], local * gpus, local, recompute=recompute, engine="fsdp"
    )
    seconds = row.get("step_s") or row["seq"] * local / row["tok_s_gpu"]
    name = f"{table} {row['model']} {row['policy']}, {row['seq']}"
    offload = "offload" in row["policy"]
    software = TITAN_GRAPH if "graph_trainer" in row["model"] else TITAN_EAGER
    software = software.model_copy(update={"activations": "host"}) if offload else software
    yield Setup(name, table, config, build_layout(gpus), "h100-sxm-96gb-500w", software, seconds)


def iter_roofline_setups(table: str, row: Row) -> Iterator[Setup]:
    """The three rows that roofline and kernel benchmarks were compared on."""
    config = build_run_config(load_published_model(row["model"], row), row["seq"], row["bs"], row["bs"], engine="fsdp")
    name = f"{table} {row['model']} {row['bs']} of {row['seq']}"
    yield Setup(name, table, config, build_layout(1), "h100-sxm-96gb-500w", TITAN, row["real_ms"] / 1e3)


def iter_azure_setups(table: str, row: Row) -> Iterator[Setup]:
    """DeepSpeed ZeRO-3: TFLOP/s that count recomputation."""
    shapes = {"175B": KORTHIKANTI["175B"], "530B": KORTHIKANTI["530B"], "1T": KORTHIKANTI["1T"]}
    hidden, layers, heads = shapes[row["model"]]
    model = build_gpt_model(hidden, layers, heads, 51_200, row["seq"])
    counted = 4 * count_flops(model, row["seq"], row["mbs"], "full").forward
    config = build_run_config(
        model, row["seq"], row["mbs"] * row["gpus"], row["mbs"], recompute="block", engine="fsdp", precision="fp16"
    )
    seconds = counted / (row["tflops_gpu"] * 1e12)
    yield Setup(f"{table} {row['model']} {row['gpus']}", table, config, build_layout(row["gpus"]), "a100-80gb",
                ZERO_3_2022, seconds)  # fmt: skip
