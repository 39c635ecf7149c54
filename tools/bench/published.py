"""Published measurements of step and run times as setups that the estimate can price.

Reads the rows of tests/estimate/data/published_runs.json (public facts; each table names its source) and gives one
`Setup` for each measured number: a config, a layout, a device, a generation of software and what was measured. What a
row does not say is filled in by the rules below, by table and never by row.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmsys.config.layout import Layout
from llmsys.config.load import load_model
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.errors import LlmsysError
from llmsys.estimate.flops import count_flops
from llmsys.estimate.software import COMPILED, EAGER, Software

DATA = Path(__file__).resolve().parents[2] / "tests" / "estimate" / "data"
RUNS, SHAPES = DATA / "published_runs.json", DATA / "published_models.json"
Row = dict[str, Any]

MEGATRON_2020 = Software(name="Megatron 2020", attention="unfused", traffic=1.4, loss_bytes=28, data_overlap=0.0)
MEGATRON_2021 = MEGATRON_2020.model_copy(update={"name": "Megatron 2021", "traffic": 1.15})
MEGATRON_2022 = MEGATRON_2021.model_copy(update={"name": "Megatron 2022", "traffic": 1.0, "data_overlap": 0.5})
PYTORCH_2022 = EAGER.model_copy(update={"name": "PyTorch 2022", "data_overlap": 0.6})
MEGATRON = Software(
    name="Megatron since 2023", attention="native", data_overlap=0.8, tensor_overlap=0.4, expert_overlap=0.2
)
TITAN_EAGER = EAGER.model_copy(update={"name": "torchtitan eager", "repeated_products": 0.5, "context": "ring"})
TITAN = COMPILED.model_copy(update={"name": "torchtitan compiled", "repeated_products": 0.5, "context": "ring"})
# A traced graph whose norms, rotations and activations are run piece by piece.
TITAN_GRAPH = TITAN_EAGER.model_copy(update={"name": "torchtitan graph trainer", "traffic": 4.0, "loss_bytes": 40})
ZERO_3_2022 = MEGATRON_2022.model_copy(update={"name": "DeepSpeed ZeRO-3 2022", "data_overlap": 0.3, "traffic": 1.4})


@dataclass(frozen=True)
class Setup:
    """One measured number and all that is needed to predict it: seconds of a step, or accelerator-hours of a run."""

    name: str
    table: str
    config: RunConfig
    layout: Layout
    device: str
    software: Software
    measured: float
    kind: Literal["step", "run"] = "step"
    pipeline: int = 1
    interleave: int = 1

    @property
    def ranks(self) -> int:
        """Devices."""
        return self.layout.world_size * self.pipeline


def read_setups(path: Path = RUNS) -> list[Setup]:
    """Every measured time of the file."""
    truth = json.loads(path.read_text(encoding="utf-8"))
    return [setup for table, reader in READERS.items() if table in truth for setup in reader(table, truth[table])]


def published_model(name: str, row: Row) -> ModelConfig:
    """The model of that name: one of ours, one of the shapes kept for this table, or a dense one of that many."""
    shapes: dict[str, Row] = json.loads(SHAPES.read_text(encoding="utf-8"))
    plain = re.sub(r"\(.*\)| .*", "", name).lower()
    if plain in shapes:
        return ModelConfig.model_validate({key: value for key, value in shapes[plain].items() if key != "source"})
    try:
        return load_model(f"model/{plain}")
    except LlmsysError:
        if "params_active" not in row:
            raise
        return dense_of(float(row["params_active"]))


def dense_of(parameters: float) -> ModelConfig:
    """A plain decoder of about that many parameters, 128 channels of width for each layer (Kaplan 2020, figure 5)."""
    layers = max(2, round((parameters / (12 * 128**2)) ** (1 / 3)))
    return gpt(128 * layers, layers, layers, 50_304, 2048)


def gpt(hidden: int, layers: int, heads: int, vocabulary: int, length: int) -> ModelConfig:
    """GPT-2's architecture in that size, as Megatron's tables have it."""
    return ModelConfig.model_validate(
        {
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": length,
            "tie_word_embeddings": True,
            "norm": {"kind": "layernorm"},
            "position": {"kind": "learned"},
            "attention": {"kind": "multi_head", "qkv_bias": True, "output_bias": True},
            "feed_forward": {"kind": "gelu_tanh", "bias": True},
        }
    )


def config_of(
    model: ModelConfig,
    length: int,
    sequences: int,
    micro: int,
    *,
    recompute: str = "none",
    precision: str = "bf16",
    engine: str = "zero1",
    tokens: float = 0,
) -> RunConfig:
    """A run of that model; its engine is FSDP, or ZeRO-1 as pipelines have it."""
    model = model.model_copy(update={"max_position_embeddings": max(length, model.max_position_embeddings)})
    engines: dict[str, Row] = {"fsdp": {"kind": "torch"}, "zero1": {"kind": "deepspeed", "zero_stage": 1}}
    train = {"precision": precision, "recompute": recompute, "tokens": max(int(tokens), length * sequences)}
    return RunConfig.model_validate(
        {
            "model": model,
            "batch": {"sequence_length": length, "sequences": sequences, "micro_sequences": micro},
            "engine": engines[engine],
            "train": train,
            "schedule": {"kind": "cosine", "warmup_tokens": 0},
        }
    )


def axes(shard: int, tensor: int = 1, context: int = 1, expert: int = 1) -> Layout:
    """A resolved layout."""
    return Layout(shard=max(1, shard), tensor=tensor, context=context, expert=expert)


def megatron_flops(row: Row, length: int, vocabulary: int, batch: int, *, passes: int) -> float:
    """Operations of one step as Megatron reported them; passes is 4 with full recomputation, else 3.

    Narayanan 2021, section 5.1: 24·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)) for each of four passes.
    """
    hidden, layers = row["hidden"], row["layers"]
    inside = 24 * batch * length * layers * hidden**2 * (1 + length / (6 * hidden))
    return passes * inside + 6 * batch * length * hidden * vocabulary


def _sc21(table: str, truth: Row) -> Iterator[Setup]:
    for row in truth["rows"]:
        seconds = row.get("derived_iter_s") or (
            megatron_flops(row, row["seq"], row["vocab"], row["global_batch_seqs"], passes=4)
            / (row["gpus"] * row["tflops_per_gpu_reported"] * 1e12)
        )
        model = gpt(row["hidden"], row["layers"], row["heads"], row["vocab"], row["seq"])
        share = row["global_batch_seqs"] // row["dp"]
        config = config_of(
            model, row["seq"], row["global_batch_seqs"], micro_of(row["pp"], share), recompute="block", precision="fp16"
        )
        parts = 2 if row["pp"] > 1 else 1
        yield Setup(
            f"{table} {row['params']}", table, config, axes(row["dp"], row["tp"]), "a100-80gb", MEGATRON_2021,
            seconds, pipeline=row["pp"], interleave=parts,
        )  # fmt: skip


def micro_of(pipeline: int, share: int) -> int:
    """Sequences of one pass where a table does not say: few under a pipeline, up to four without one."""
    return 1 if pipeline > 1 else min(4, share)


def _jan2021(table: str, truth: Row) -> Iterator[Setup]:
    for row in truth["rows"]:
        tensor = min(8, row["mp"])
        pipeline = row["mp"] // tensor
        shard = row["gpus"] // row["mp"]
        model = gpt(row["hidden"], row["layers"], row["heads"], 51_200, 2048)
        flops = megatron_flops(row, 2048, 51_200, row["batch"], passes=4)
        micro = micro_of(pipeline, row["batch"] // shard)
        config = config_of(model, 2048, row["batch"], micro, recompute="block", precision="fp16")
        seconds = flops / (row["gpus"] * row["tflops_gpu"] * 1e12)
        software = MEGATRON_2020
        name = f"{table} {row['case']}"
        yield Setup(name, table, config, axes(shard, tensor), "a100-80gb", software, seconds, pipeline=pipeline)


def _sep2020(table: str, truth: Row) -> Iterator[Setup]:
    for row in truth["rows"]:
        model = gpt(row["hidden"], row["layers"], row["heads"], 51_200, 1024)
        for key, value in row.items():
            if (found := re.fullmatch(r"(v100|a100)_iter_ms_b(\d+)", key)) and value:
                device = {"v100": "v100", "a100": "a100-40gb"}[found[1]]
                sequences = int(found[2])
                config = config_of(model, 1024, sequences, sequences, recompute="block", precision="fp16")
                name = f"{table} {row['case']} {found[1]}"
                yield Setup(name, table, config, axes(1, row["mp"]), device, MEGATRON_2020, value / 1e3)


def _h100(table: str, truth: Row) -> Iterator[Setup]:
    for row in truth["rows"]:
        model = gpt(row["hidden"], row["layers"], row["heads"], 131_072, 4096)
        flops = count_flops(model, 4096, row["batch"], "full").forward_backward
        micro = micro_of(row["pp"], row["batch"] // row["dp"])
        config = config_of(model, 4096, row["batch"], micro)
        seconds = flops / (row["gpus"] * row["tflops_gpu"] * 1e12)
        interleave = 2 if row["pp"] > 1 else 1
        name = f"{table} {row['model']}"
        yield Setup(
            name, table, config, axes(row["dp"], row["tp"]), "h100-sxm", MEGATRON, seconds,
            pipeline=row["pp"], interleave=interleave,
        )  # fmt: skip


KORTHIKANTI = {"22B": (6144, 48, 64), "175B": (12288, 96, 96), "530B": (20480, 105, 128), "1T": (25600, 128, 160)}


def _korthikanti(table: str, truth: Row) -> Iterator[Setup]:
    for row in truth["time"]:
        hidden, layers, heads = KORTHIKANTI[row["model"]]
        model = gpt(hidden, layers, heads, 51_200, 2048)
        shard = row["gpus"] // (row["tp"] * row["pp"])
        for key, recompute in (("iter_s_full_recompute", "block"), ("iter_s_selective_sp", "selective")):
            if row.get(key):
                config = config_of(model, 2048, row["batch"], row["mbs"], recompute=recompute, precision="fp16")
                name = f"{table} {row['model']} {recompute}"
                yield Setup(
                    name, table, config, axes(shard, row["tp"]), "a100-80gb", MEGATRON_2022, row[key],
                    pipeline=row["pp"], interleave=row["interleave"],
                )  # fmt: skip


def _titan(table: str, truth: Row) -> Iterator[Setup]:
    for row in truth["rows"]:
        parallel, local = row["parallel"], row["local_batch"]
        tensor, context, pipeline = (parallel.get(key) or 1 for key in ("tp", "cp", "pp"))
        shard = max(1, row["gpus"] // (tensor * context * pipeline))
        recompute = {"full": "block", "none": "none"}.get(row["ac"], "selective")
        parts = 2 if "interleaved" in row["options"].lower() else 1
        # Its default cuts a rank's batch into as many micro-batches as there are stages.
        micro = local if pipeline == 1 else max(1, local // (pipeline * parts))
        config = config_of(
            published_model(row["model"], row), row["seq"], local * shard, micro,
            recompute=recompute, engine="fsdp" if pipeline == 1 else "zero1",
        )  # fmt: skip
        tokens = row["seq"] * local * shard
        name = f"{row['table']} {row['model']} {row['options']}, {row['gpus']} of {_text(parallel)}, {row['seq']}"
        device = "h200" if row.get("hardware") == "H200" else "h100-sxm-96gb-500w"
        yield Setup(
            name, table, config, axes(shard, tensor, context), device, titan_software(row["options"]),
            tokens / row["gpus"] / row["tok_s_gpu"], pipeline=pipeline, interleave=parts,
        )  # fmt: skip


def titan_software(options: str) -> Software:
    """From the words of the options column."""
    words = options.lower().replace(" ", "")
    changes: Row = {}
    if "fp8" in words and "fp8all-gatheronly" not in words:
        changes["products"] = "fp8"
        changes["scales"] = "row" if "rowwise" in words else "tensor"
    if "asynctp" in words:
        changes["tensor_overlap"] = 0.6
    return (TITAN if "compile" in words else TITAN_EAGER).model_copy(update=changes)


def _text(parallel: Row) -> str:
    return " ".join(f"{key} {value}" for key, value in parallel.items())


def _graph_trainer(table: str, truth: Row) -> Iterator[Setup]:
    for row in truth["rows"]:
        recompute = {"none": "none", "full recompute": "block"}.get(row["policy"], "selective")
        local, gpus = row["local_batch"], row["gpus"]
        config = config_of(
            published_model(row["model"], row), row["seq"], local * gpus, local, recompute=recompute, engine="fsdp"
        )
        seconds = row.get("step_s") or row["seq"] * local / row["tok_s_gpu"]
        name = f"{table} {row['model']} {row['policy']}, {row['seq']}"
        offload = "offload" in row["policy"]
        software = TITAN_GRAPH if "graph_trainer" in row["model"] else TITAN_EAGER
        software = software.model_copy(update={"activations": "host"}) if offload else software
        yield Setup(name, table, config, axes(gpus), "h100-sxm-96gb-500w", software, seconds)


def _runtime(table: str, truth: Row) -> Iterator[Setup]:
    for row in truth["rows"]:
        config = config_of(published_model(row["model"], row), row["seq"], row["bs"], row["bs"], engine="fsdp")
        name = f"{table} {row['model']} {row['bs']} of {row['seq']}"
        yield Setup(name, table, config, axes(1), "h100-sxm-96gb-500w", TITAN, row["real_ms"] / 1e3)


def _llama3(table: str, truth: Row) -> Iterator[Setup]:
    model = published_model("llama3.1-405b", {})
    for row in truth["rows"]:
        shard = row["gpus"] // (row["tp"] * row["cp"] * row["pp"])
        sequences = row["batch_per_dp"] * shard
        config = config_of(model, row["seq"], sequences, 1)
        counted = count_flops(model, row["seq"], sequences, "causal").forward_backward
        seconds = counted / (row["gpus"] * row["tflops_gpu"] * 1e12)
        name = f"{table} {row['gpus']} at {row['seq']}"
        yield Setup(
            name, table, config, axes(shard, row["tp"], row["cp"]), "h100-sxm", MEGATRON, seconds,
            pipeline=row["pp"], interleave=4,
        )  # fmt: skip


def _mtnlg(table: str, truth: Row) -> Iterator[Setup]:
    hidden, layers, heads = KORTHIKANTI["530B"]
    for row in truth["rows"]:
        shard = row["gpus"] // (row["tp"] * row["pp"])
        config = config_of(
            gpt(hidden, layers, heads, 51_200, row["seq"]), row["seq"], row["batch"], 1,
            recompute="block", precision="bf16",
        )  # fmt: skip
        name = f"{table} {row['gpus']}"
        yield Setup(
            name, table, config, axes(shard, row["tp"]), "a100-80gb", MEGATRON_2021, row["step_s"], pipeline=row["pp"]
        )


def _azure(table: str, truth: Row) -> Iterator[Setup]:
    shapes = {"175B": KORTHIKANTI["175B"], "530B": KORTHIKANTI["530B"], "1T": KORTHIKANTI["1T"]}
    for row in truth["rows"]:
        hidden, layers, heads = shapes[row["model"]]
        model = gpt(hidden, layers, heads, 51_200, row["seq"])
        counted = 4 * count_flops(model, row["seq"], row["mbs"], "full").forward
        config = config_of(
            model, row["seq"], row["mbs"] * row["gpus"], row["mbs"], recompute="block", engine="fsdp", precision="fp16"
        )
        seconds = counted / (row["tflops_gpu"] * 1e12)
        yield Setup(f"{table} {row['model']} {row['gpus']}", table, config, axes(row["gpus"]), "a100-80gb",
                    ZERO_3_2022, seconds)  # fmt: skip


BRIDGE_DEVICES = {"H100": "h100-sxm", "B200": "b200", "GB200": "gb200", "GB300": "gb300", "H200": "h200"}


def _bridge(table: str, truth: Row) -> Iterator[Setup]:
    for row in truth["rows"]:
        tensor, pipeline, context = (row.get(key) or 1 for key in ("tp", "pp", "cp"))
        expert, parts = row.get("ep") or 1, row.get("vp") or 1
        shard = row["gpus"] // (tensor * pipeline * context)
        sharded = "fsdp" if (row.get("fsdp") or 0) > 1 and pipeline == 1 else "zero1"
        config = config_of(
            published_model(row["model"], row), row["seq"], row["gbs"], row["mbs"],
            engine=sharded, recompute="selective" if (row.get("ep") or 1) > 1 else "none",
        )  # fmt: skip
        software = MEGATRON.model_copy(update={"products": "fp8"}) if "FP8" in row["precision"] else MEGATRON
        name = f"{row['release']} {row['system']} {row['model']} {row['precision']} {row['gpus']} of gbs {row['gbs']}"
        seconds = row["gbs"] * row["seq"] / (row["gpus"] * row["tok_s_gpu"])
        yield Setup(
            name, table, config, axes(shard, tensor, context, expert), BRIDGE_DEVICES[row["system"]],
            software, seconds, pipeline=pipeline, interleave=parts,
        )  # fmt: skip


RUN_DEVICES = {"A100": "a100-80gb", "H100": "h100-sxm", "H800": "h800", "H200": "h200", "V100": "v100",
               "TPUv3": "tpu-v3", "TPUv4": "tpu-v4", "P100fp32": "p100"}  # fmt: skip


def _full_runs(table: str, truth: list[Row]) -> Iterator[Setup]:
    """Whole runs. What a row does not say is filled in by size and age of the device.

    Layout: FSDP below 13 billion parameters, then eight ranks of tensor parallelism, above 100 billion a pipeline too.
    Devices: 256, 1,024 or 2,048. A step: 2 or 4 million tokens, 16 for what is larger than 100 billion on an H100.
    """
    for row in truth:
        if not row.get("tokens") or not row.get("accel_hours"):
            continue
        yield _full_run(table, row)


def _full_run(table: str, row: Row) -> Setup:
    total, length = row["params_total"], row.get("seq") or (2048 if row["hardware"] in OLD else 4096)
    device = "a100-40gb" if "40GB" in row.get("gpu", "") else RUN_DEVICES[row["hardware"]]
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


READERS = {
    "full_runs": _full_runs,
    "megatron_sep2020": _sep2020,
    "megatron_jan2021": _jan2021,
    "megatron_sc21": _sc21,
    "mtnlg530b": _mtnlg,
    "korthikanti2022": _korthikanti,
    "deepspeed_azure": _azure,
    "megatron_h100": _h100,
    "llama3_table4": _llama3,
    "torchtitan": _titan,
    "torchtitan_graph_trainer": _graph_trainer,
    "estimator_bar_runtime": _runtime,
    "megatron_bridge": _bridge,
}
