"""Compare parameters and FLOPs with counts on the models' own implementations, which should be
equal.
"""

import json
from collections.abc import Iterator
from typing import Any

from llmsys.config.loading.load import build_model_config, load_model_config
from llmsys.estimate.flops import count_flops
from llmsys.estimate.model_tensors import count_parameters
from tools.bench.fits.published_row import DATA


def list_count_lines() -> list[str]:
    """Return two tables, of parameters and of FLOPs."""
    return [*_iter_parameter_lines(), "", *_iter_operation_lines(), ""]


def _read_counted(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def _iter_parameter_lines() -> Iterator[str]:
    yield "### Parameters"
    yield ""
    rows = [(row["id"], row["total"],
        count_parameters(load_model_config(f"model/{row['id']}")).total)
            for row in _read_counted("counted_parameters.json")]  # fmt: skip
    yield from _iter_table_lines(rows, "parameters")


def _iter_operation_lines() -> Iterator[str]:
    yield "### Operations"
    yield ""
    rows = []
    for row in _read_counted("counted_flops.json"):
        model = build_model_config(row["config"])
        counted = count_flops(model, row["sequence_length"], row["sequences"], "full")
        rows.append((row["case"], row["forward_backward"], counted.forward_backward))
    yield from _iter_table_lines(rows, "FLOPs forward and backward")


def _iter_table_lines(rows: list[tuple[str, int, int]], what: str) -> Iterator[str]:
    """Yield a sentence with the number of equal rows, and every row."""
    equal = sum(counted == ours for _, counted, ours in rows)
    yield f"{equal} of {len(rows)} rows are equal to the last digit."
    yield ""
    yield f"| row | counted {what} | estimated | error |"
    yield "|---|---|---|---|"
    for name, counted, ours in rows:
        error = "0" if counted == ours else f"{ours / counted - 1:+.3%}"
        yield f"| {name} | {counted:,} | {ours:,} | {error} |"
