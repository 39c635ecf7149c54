"""Read whole published runs as command lines: accelerator-hours for a number of tokens.

Few reports name a layout. Where one does not, `--layout auto` takes the fastest that fits.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from tools.bench.fits.published_row import (
    PublishedRow,
    Row,
    find_model_words,
    list_run_words,
    resolve_device_name,
)

# of the years before fused attention and large batches
OLD = ("A100", "V100", "TPUv3", "TPUv4", "P100fp32")


def iter_full_run_rows(table: str, row: Row) -> Iterator[PublishedRow]:
    """Yield the hours of a run, and the seconds per step where the row has them."""
    if row.get("tokens") and row.get("accel_hours"):
        run = build_full_run(table, row)
        yield run
        if row.get("step_time_s"):
            yield replace(
                run, name=f"{run.name} step", kind="step", measured=float(row["step_time_s"])
            )


def build_full_run(table: str, row: Row) -> PublishedRow:
    """Return a run. Defaults, by size: 256 to 2,048 devices, and 2 to 32 million tokens a step.

    Args:
        table: name of the table, part of the row's name.
        row: tokens, hours, hardware and parameters of the run.

    Returns:
        The command and the measured accelerator-hours.
    """
    model = find_model_words(row.get("truth_model") or row["id"], row)
    device = "a100-40gb" if "40GB" in row.get("gpu", "") else resolve_device_name(row["hardware"])
    total, length = (
        row["params_total"],
        row.get("seq") or (2048 if row["hardware"] in OLD else 4096),
    )
    ranks = row.get("n_accelerators") or (256 if total < 10e9 else 1024 if total < 50e9 else 2048)
    layout = _find_layout(row, ranks)
    multiple = ranks if layout == "auto" else int(re.findall(r"dp=(\d+)", layout)[0])
    # No number of sequences that all layouts divide is far from the batch where ranks are many.
    sequences = max(1, round(_choose_batch_tokens(row) / length / multiple)) * multiple
    precision = "fp16" if row["hardware"] == "V100" else "bf16"
    words = list_run_words(model, length, sequences, precision=precision, tokens=row["tokens"])
    words += [
        "--program",
        choose_program(row),
        "--layout",
        layout,
        "--device",
        device,
        "--gpus",
        str(ranks),
    ]
    words += ["--matmul-dtype", row["matmul_dtype"]] if "matmul_dtype" in row else []
    source = re.split(r"[-.\d]", row["id"])[0]
    return PublishedRow(
        f"{table} {row['id']}", f"run of {source}", tuple(words), float(row["accel_hours"]), "run"
    )


def _find_layout(row: Row, ranks: int) -> str:
    """Return the axes that a report names, or auto."""
    found = {
        key.lower(): int(size)
        for key, size in re.findall(r"(TP|PP|EP)(\d+)", row.get("layout", ""))
    }
    if not found:
        return "auto"
    axes = {"tp": 1, "pp": 1} | found
    axes["dp"] = max(1, ranks // (axes["tp"] * axes["pp"]))
    return ",".join([*(f"{key}={size}" for key, size in axes.items()), "auto"])


def _choose_batch_tokens(row: Row) -> float:
    if row.get("global_batch_tokens"):
        return float(row["global_batch_tokens"])
    if row["params_total"] < 10e9:
        return float(2**21)
    if row["hardware"] in OLD or row["params_total"] < 100e9:
        return float(2**22)
    return float(2**24 if row["params_active"] == row["params_total"] else 2**25)


def choose_program(row: Row) -> str:
    """Return the program of a run. TPU, V100 and pipelined A100 runs predate fused attention."""
    if "program" in row:
        return str(row["program"])
    if row["hardware"] == "A100":
        return "megatron-2021" if row.get("layout") else "pytorch-2022"
    if row["hardware"].startswith("TPU"):
        return "xla"
    if row["hardware"] == "H800":
        return "hai-llm"
    return "megatron-2021" if row["hardware"] in OLD else "megatron"
