"""Published measurements of step and run times as setups that the estimate can price.

Reads the rows of tests/estimate/data/published_runs.json (public facts; each table names its source) and gives one
`Setup` for each measured number. What a row does not say is filled in by rules, by table and never by row.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmsys.errors import LlmsysError
from tools.bench import published_bridge, published_megatron, published_runs, published_torch
from tools.bench.published_setup import DATA, Setup

RUNS = DATA / "published_runs.json"
READERS: dict[str, Callable[[str, Any], Iterator[Setup]]] = {
    "full_runs": published_runs.full_runs,
    "megatron_sep2020": published_megatron.september_2020,
    "megatron_jan2021": published_megatron.january_2021,
    "megatron_sc21": published_megatron.april_2021,
    "mtnlg530b": published_megatron.mtnlg,
    "korthikanti2022": published_megatron.korthikanti,
    "deepspeed_azure": published_torch.azure,
    "megatron_h100": published_megatron.h100,
    "llama3_table4": published_bridge.llama3,
    "torchtitan": published_torch.titan,
    "torchtitan_graph_trainer": published_torch.graph_trainer,
    "estimator_bar_runtime": published_torch.runtime,
    "megatron_bridge": published_bridge.bridge,
}


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be priced, and why: a model or a device that nobody described."""

    table: str
    row: str
    reason: str


def read_all(path: Path = RUNS) -> Iterator[Setup | Skipped]:
    """Every row with a measured time: as a setup, or with the reason why it is none."""
    truth = json.loads(path.read_text(encoding="utf-8"))
    for table, reader in READERS.items():
        for row in rows_of(truth.get(table, [])):
            try:
                yield from list(reader(table, row))
            except (LlmsysError, KeyError, ValidationError) as error:
                name = str(row.get("id") or row.get("model") or row)
                yield Skipped(table, name, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")


def rows_of(truth: Any) -> list[dict[str, Any]]:
    """The rows of a table."""
    if isinstance(truth, list):
        return truth
    return [*truth.get("rows", []), *truth.get("time", [])]
