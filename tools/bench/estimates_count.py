"""Parameters and operations against what was counted on the models' own implementations: equal, or an error here."""

import json
from collections.abc import Iterator
from typing import Any

from llmsys.config.hugging_face.model import model_from_hugging_face
from llmsys.config.load import load_model
from llmsys.estimate.flops import count_flops
from llmsys.estimate.parameters import count_parameters
from tools.bench.published_setup import DATA


def count_lines() -> list[str]:
    """Two tables, of parameters and of operations."""
    return [*_parameters(), "", *_operations(), ""]


def _read(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def _parameters() -> Iterator[str]:
    yield "### Parameters"
    yield ""
    rows = [(row["id"], row["total"], count_parameters(load_model(f"model/{row['id']}")).total)
            for row in _read("counted_parameters.json")]  # fmt: skip
    yield from _table(rows, "parameters")


def _operations() -> Iterator[str]:
    yield "### Operations"
    yield ""
    rows = []
    for row in _read("counted_flops.json"):
        model = model_from_hugging_face(row["config"])
        counted = count_flops(model, row["sequence_length"], row["sequences"], "full")
        rows.append((row["case"], row["forward_backward"], counted.forward_backward))
    yield from _table(rows, "FLOPs forward and backward")


def _table(rows: list[tuple[str, int, int]], what: str) -> Iterator[str]:
    """A sentence with how many are equal, and every row."""
    equal = sum(counted == ours for _, counted, ours in rows)
    yield f"{equal} of {len(rows)} rows are equal to the last digit."
    yield ""
    yield f"| row | counted {what} | estimated | error |"
    yield "|---|---|---|---|"
    for name, counted, ours in rows:
        error = "0" if counted == ours else f"{ours / counted - 1:+.3%}"
        yield f"| {name} | {counted:,} | {ours:,} | {error} |"
