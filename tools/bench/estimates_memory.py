"""Compare the memory estimate with published measurements; `read_memory_rows()` gives one comparison per number.

Reads tests/data/estimate/published_runs.json (public facts; each table names its source). What a row does not say is
filled in by its table, never by the row. As a script it prints the table of llmsys/estimate/README.md.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmsys.config.run import RunConfig
from llmsys.errors import LlmsysError
from llmsys.estimate.memory_timeline import GIB, MemoryTimeline
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.software_profile import MemoryProfile
from tools.bench.memory_korthikanti import iter_analytical_rows
from tools.bench.published_setup import DATA, Row, build_layout, build_run_config, load_published_model

ROWS = DATA / "published_runs.json"
GB = 10**9
PEAKS = ("peak_mem_gib", "peak_gib", "peak_gb")
TITAN = MemoryProfile(evaluation="none", masks="none", selective="alternate", head="columns", loss="fused")
# Its report of December 2024 (tables T1 to T6) compiled blocks and not the loss.
TITAN_2024 = replace(TITAN, loss="whole")
# Its notes on traced graphs say less: a loss by chunks and no fusion agree with the rows on one GPU, and those on
# several need weights that stay gathered from the forward on and block inputs that wait on the host.
GRAPH = replace(TITAN, loss="chunked")
GRAPH_SHARDED = replace(GRAPH, weights="whole", activations="host")
# Allocator slack (T1 eager and T3), that of pipelines (T5), the float32 gradient of a compiled loss (H200), and the
# settings of traced graphs.
CALIBRATED = ("T1 llama3.1-8b eager", "T3 llama3.1-8b compile,", "T5 llama3.1-405b", "H200-trainy", "graph ")


@dataclass(frozen=True)
class MemoryRow:
    """One measured number and its prediction, in GiB per rank."""

    id: str
    source: str
    measured: float
    predicted: float
    instant: str

    @property
    def error(self) -> float:
        """Signed relative error; below zero, a run would meet an out-of-memory error that was not predicted."""
        return self.predicted / self.measured - 1

    @property
    def is_calibration(self) -> bool:
        """True where a constant or a setting was chosen by this row."""
        return self.id.startswith(CALIBRATED)


def read_memory_rows(path: Path = ROWS) -> list[MemoryRow]:
    """Return every measured row of a file that says enough to be predicted."""
    return [row for row in read_published_rows(path) if isinstance(row, MemoryRow)]


def read_published_rows(path: Path) -> Iterator[MemoryRow | str]:
    """Yield each row, or the reason why it cannot be predicted."""
    tables = json.loads(path.read_text(encoding="utf-8"))
    readers: dict[str, Callable[[Row], MemoryRow]] = {
        "torchtitan": build_titan_row,
        "torchtitan_graph_trainer": build_graph_trainer_row,
    }
    for table, reader in readers.items():
        for row in tables.get(table, {}).get("rows", []):
            if not any(row.get(key) for key in PEAKS):
                continue
            try:
                yield reader(row)
            except (KeyError, TypeError, ValueError, LlmsysError) as reason:
                yield f"{table} {row.get('model')}: {reason!r}"
    for row in tables.get("other_measured_memory", []):
        yield f"{row.get('source')}: gives neither batch nor sequence length, or no measurement"


def build_titan_row(row: Row) -> MemoryRow:
    """Return a row of torchtitan's tables, which report max_memory_reserved."""
    parallel, local, options = row["parallel"], row["local_batch"], row["options"]
    tensor, context, pipeline = (parallel.get(key) or 1 for key in ("tp", "cp", "pp"))
    shard = max(1, row["gpus"] // (tensor * context * pipeline))
    parts = 2 if "interleaved" in options.lower() else 1
    micro = local if pipeline == 1 else max(1, local // (pipeline * parts))  # as many micro-batches as stages
    model, policy = load_published_model(row["model"], row), parse_policy(row["ac"])
    config = build_run_config(model, row["seq"], local * shard, micro, recompute=policy, engine="fsdp")
    system = TITAN_2024 if re.fullmatch(r"T\d", row["table"]) else TITAN
    if pipeline > 1:
        system = replace(system, pipeline=pipeline, pipeline_chunks=parts, weights="whole", gradients="whole")
    ledger = estimate_peak_memory(
        set_compile(config, "compile" in options), build_layout(shard, tensor, context), system=system
    )
    ranks = " ".join(f"{key} {value}" for key, value in parallel.items())
    name = f"{row['table']} {row['model']} {options}, {row['gpus']} of {ranks}, {local} of {row['seq']}"
    return build_memory_row(name, "torchtitan", row["peak_mem_gib"], ledger)


def build_graph_trainer_row(row: Row) -> MemoryRow:
    """Return a row of torchtitan's notes on traced graphs. Rows in GB are decimal."""
    gpus, local, policy = row["gpus"], row["local_batch"], row["policy"]
    model = load_published_model(row["model"], row)
    if row["model"].startswith("llama3-1B"):  # Llama 3.2 1B ties its head; untied, its state alone is above the row
        model = model.model_copy(update={"tie_word_embeddings": True})
    config = build_run_config(model, row["seq"], local * gpus, local, recompute=parse_policy(policy), engine="fsdp")
    system = GRAPH_SHARDED if gpus > 1 else replace(GRAPH, activations="host" if "offload" in policy else "device")
    measured = row["peak_gib"] if "peak_gib" in row else row["peak_gb"] * GB / GIB
    name = f"graph {row['model']} {policy}, {gpus} GPUs, {local} of {row['seq']}"
    return build_memory_row(
        name, "torchtitan graph trainer", measured, estimate_peak_memory(config, build_layout(gpus), system=system)
    )


def parse_policy(words: str) -> str:
    """Return our name of a recomputation policy."""
    return {"full": "full", "full recompute": "full", "none": "none"}.get(words, "selective")


def set_compile(config: RunConfig, yes: bool) -> RunConfig:
    """Return the config with compiled blocks, or with eager ones."""
    train = config.train.model_copy(update={"compile": "block" if yes else "none"})
    return config.model_copy(update={"train": train})


def build_memory_row(name: str, source: str, measured: float, ledger: MemoryTimeline) -> MemoryRow:
    """Return the row of a measured peak in GiB."""
    return MemoryRow(name, source, measured, ledger.peak_bytes / GIB, ledger.peak_instant)


def iter_memory_lines(path: Path = ROWS) -> Iterator[str]:
    """Yield the tables of the README: measured peaks, and a paper's analytical numbers."""
    rows = read_memory_rows(path)
    yield "### Memory"
    yield ""
    yield "| row | measured, GiB | predicted | error | fullest | |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        mark = "calibration" if row.is_calibration else ""
        numbers = f"{row.measured:.1f} | {row.predicted:.1f} | {row.error:+.1%}"
        yield f"| {row.id} | {numbers} | {row.instant} | {mark} |"
    for one in read_published_rows(path):
        if isinstance(one, str):
            yield f"| {one} | not predicted | | | | |"
    yield ""
    held = [one for one in rows if not one.is_calibration]
    for name, group in (("All rows", rows), ("Rows not used for calibration", held)):
        errors = [one.error for one in group]
        if errors:
            middle = median(abs(error) for error in errors)
            yield f"{name}: {len(errors)}, median error {middle:.1%}, from {min(errors):+.1%} to {max(errors):+.1%}."
    errors = [ours / paper - 1 for _, paper, ours in iter_analytical_rows()]
    yield (
        f"Korthikanti 2022, figures 1 and 7 (state and activations of 22B to 1T by its formulas): {len(errors)} "
        f"numbers, from {min(errors):+.1%} to {max(errors):+.1%}."
    )
    yield ""


if __name__ == "__main__":
    print("\n".join(iter_memory_lines(Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS)))
