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
from tools.bench import published_megatron, published_runs, published_torch
from tools.bench.published_setup import DATA, Setup

RUNS = DATA / "published_runs.json"
READERS: dict[str, Callable[[str, Any], Iterator[Setup]]] = {
    "full_runs": published_runs.iter_full_run_setups,
    "megatron_sep2020": published_megatron.iter_september_2020_setups,
    "megatron_jan2021": published_megatron.iter_january_2021_setups,
    "megatron_sc21": published_megatron.iter_april_2021_setups,
    "mtnlg530b": published_megatron.iter_mtnlg_setups,
    "korthikanti2022": published_megatron.iter_korthikanti_setups,
    "deepspeed_azure": published_torch.iter_azure_setups,
    "megatron_h100": published_megatron.iter_h100_setups,
    "llama3_table4": published_megatron.iter_llama3_setups,
    "torchtitan": published_torch.iter_titan_setups,
    "torchtitan_graph_trainer": published_torch.iter_graph_trainer_setups,
    "estimator_bar_runtime": published_torch.iter_roofline_setups,
    "megatron_bridge": published_megatron.iter_bridge_setups,
}


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be priced, and why: a model or a device that nobody described."""

    table: str
    row: str
    reason: str


def read_setups(path: Path = RUNS) -> Iterator[Setup | SkippedRow]:
    """Yield every row with a measured time: as a setup, or with the reason why it is none."""
    truth = json.loads(path.read_text(encoding="utf-8"))
    for table, reader in READERS.items():
        for row in list_rows(truth.get(table, [])):
            try:
                yield from list(reader(table, row))
            except (LlmsysError, KeyError, ValidationError) as error:
                name = str(row.get("id") or row.get("model") or row)
                yield SkippedRow(table, name, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")


def list_rows(truth: Any) -> list[dict[str, Any]]:
    """Return the rows of a table."""
    if isinstance(truth, list):
        return truth
    return [*truth.get("rows", []), *truth.get("time", [])]
