"""Read the rows of a published table as command lines, by the fields that
data/published_tables.yaml gives for it.

Reads tools/bench/fits/data/published_tables.yaml. A row is a mapping of columns from
published_runs.json.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from llmsys.config.model import ModelConfig
from llmsys.estimate.flops import count_flops
from tools.bench.fits.published_row import (
    PublishedRow,
    Row,
    find_model_words,
    list_gpt_words,
    list_run_words,
    load_shapes,
    load_words_model,
    read_tables,
    resolve_device_name,
)

Value = int | str  # a number, or the name of a column
TENSOR_RANKS = 8  # Megatron's tensor axis stays inside a node of eight


class TableRule(BaseModel):
    """Fields to set where a column has a word (without spaces, in lower case) or is above a number.

    `pattern` is searched in `text`, a template of columns.
    """

    model_config = ConfigDict(extra="forbid")
    column: str = ""
    text: str = ""
    pattern: str | None = None
    has: str | None = None
    without: str | None = None
    above: int | None = None
    set: dict[str, Any]

    def is_match(self, row: Row) -> bool:
        """Return whether the rule applies to a row."""
        if self.pattern is not None:
            return re.search(self.pattern, self.text.format(**row)) is not None
        value = row.get(self.column)
        if self.above is not None:
            return (value or 0) > self.above
        text = str(value).lower().replace(" ", "")
        return str(self.has) in text and (self.without is None or self.without not in text)


class PublishedTable(BaseModel):
    """The fields of one table. A string that names a column of the row means the value of that
    column.
    """

    model_config = ConfigDict(extra="forbid")
    name: str  # template of the setup's name
    # pattern of columns with one time each: its groups and `value` become columns
    each: str | None = None
    shape: str | None = None  # a model of `shapes`; else the row has hidden, layers and heads
    published: str | None = None  # a published model, instead of a GPT of that shape
    vocabulary: Value = 0
    length: Value
    sequences: Value = 0  # of a step
    sequences_per_rank: Value = 0  # of a step, on each data-parallel rank
    # few: 1 under a pipeline, else up to 4; per_stage: a rank's batch over its stages
    micro: Value = "few"
    devices: Value = "gpus"
    model_parallel: Value = 0  # tensor ranks up to 8, then pipeline ranks
    tensor: Value = 1
    pipeline: Value = 1
    context: Value = 1
    context_kind: str | None = None  # layout.context_kind, where context is above 1
    expert: Value = 1
    interleave: Value = 1  # stages per pipeline rank
    recompute: str = "none"
    precision: str = "bf16"
    device: str
    program: str
    matmul_dtype: str | None = None
    source: str = ""  # template of the report's name; empty: the table's
    memory: str = ""  # the column with GiB of the fullest rank
    memory_gb: str = ""  # or with 10⁹ bytes
    # The measured time: the first of these that the row has.
    seconds: str = ""
    milliseconds: str = ""
    tokens_per_second: str = ""  # of one device
    tflops: str = ""  # of one device, by `operations`
    operations: Literal["megatron", "four_forwards", "full", "causal"] = "full"
    rules: list[TableRule] = []

    def apply_rules(self, row: Row) -> "PublishedTable":
        """Return the table with the fields that its rules set for a row."""
        changes = {
            key: value
            for rule in self.rules
            if rule.is_match(row)
            for key, value in rule.set.items()
        }
        # Validated, because model_copy accepts names that are no fields.
        return PublishedTable.model_validate(self.model_dump() | changes)


@cache
def load_tables() -> dict[str, PublishedTable]:
    """Return the tables by name."""
    return TypeAdapter(dict[str, PublishedTable]).validate_python(read_tables()["tables"])


def iter_table_rows(name: str, row: Row) -> Iterator[PublishedRow]:
    """Yield the numbers of one row: a time and a memory, or one time for each column that `each`
    matches.
    """
    table = load_tables()[name]
    if table.each is None:
        yield from _iter_row_numbers(name, table, row)
        return
    for column, value in row.items():
        if (found := re.fullmatch(table.each, column)) and value:
            yield from _iter_row_numbers(name, table, row | found.groupdict() | {"value": value})


def _iter_row_numbers(name: str, table: PublishedTable, row: Row) -> Iterator[PublishedRow]:
    row = row | row.get("parallel", {})
    table = table.apply_rules(row)
    model, length = _list_model_words(table, row), _get_count(row, table.length)
    tensor, pipeline, context, expert = (
        _get_count(row, axis, default=1)
        for axis in (table.tensor, table.pipeline, table.context, table.expert)
    )
    if table.model_parallel:
        ranks = _get_count(row, table.model_parallel)
        tensor, pipeline = min(TENSOR_RANKS, ranks), ranks // min(TENSOR_RANKS, ranks)
    devices = _get_count(row, table.devices)
    shard = max(1, devices // (tensor * pipeline * context))
    local = _get_count(row, table.sequences_per_rank, default=0)
    sequences = local * shard or _get_count(row, table.sequences)
    interleave = _get_count(row, table.interleave, default=1) if pipeline > 1 else 1
    micro = {
        "few": 1 if pipeline > 1 else min(4, sequences // shard),
        "per_stage": local if pipeline == 1 else max(1, local // (pipeline * interleave)),
    }
    one = micro[table.micro] if table.micro in micro else _get_count(row, table.micro)
    run = list_run_words(
        model, length, sequences, micro=one, recompute=table.recompute, precision=table.precision
    )
    if table.context_kind is not None and context > 1:
        run.append(f"layout.context_kind={table.context_kind}")
    axes = {
        "tp": tensor,
        "cp": context,
        "pp": pipeline,
        "vp": interleave,
        "ep": expert,
        "dp": shard,
    }
    layout = ",".join(f"{key}={size}" for key, size in axes.items() if size > 1 or key == "dp")
    words = [*run, "--program", table.program, "--layout", layout]
    words += ["--device", resolve_device_name(str(row.get(table.device, table.device)))]
    words += ["--matmul-dtype", table.matmul_dtype] if table.matmul_dtype else []
    ranks_text = " ".join(f"{key} {value}" for key, value in row.get("parallel", {}).items())
    named = {"table": name} | row | {"axes": ranks_text, "recompute": table.recompute}
    title, source = table.name.format(**named), table.source.format(**named) or name
    seconds = _find_seconds(table, row, model, length, sequences, devices)
    if seconds is not None:
        yield PublishedRow(title, source, tuple(words), seconds)
    gib = row.get(table.memory) or (row.get(table.memory_gb) or 0) * 10**9 / 2**30
    if gib:
        yield PublishedRow(title, source, tuple(words), float(gib), "memory")


def _get_count(row: Row, value: Value, *, default: int | None = None) -> int:
    """Return a number, or that of a column; `default` where the row has none."""
    found = row.get(value) if isinstance(value, str) else value
    if found is None and default is None:
        raise KeyError(value)
    return int(found or default or 0)


def _list_model_words(table: PublishedTable, row: Row) -> list[str]:
    if table.published is not None:
        return find_model_words(str(row.get(table.published, table.published)), row)
    shape = row if table.shape is None else load_shapes()[row.get(table.shape, table.shape)]
    return list_gpt_words(
        shape["hidden"], shape["layers"], shape["heads"], _get_count(row, table.vocabulary)
    )


def _find_seconds(
    table: PublishedTable, row: Row, words: list[str], length: int, sequences: int, devices: int
) -> float | None:
    """Return the measured seconds per step, from the first column that the row has."""
    if row.get(table.seconds):
        return float(row[table.seconds])
    if row.get(table.milliseconds):
        return float(row[table.milliseconds]) / 1e3
    if row.get(table.tokens_per_second):
        return float(sequences * length / (devices * row[table.tokens_per_second]))
    if not row.get(table.tflops):
        return None
    model, rate = load_words_model(words), float(devices * row[table.tflops] * 1e12)
    if table.operations == "megatron":
        return compute_megatron_flops(model, length, sequences) / rate
    if table.operations == "four_forwards":
        return 4 * count_flops(model, length, sequences, "full").forward / rate
    return count_flops(model, length, sequences, table.operations).forward_backward / rate


def compute_megatron_flops(model: ModelConfig, length: int, sequences: int) -> float:
    """Return the FLOPs of one step with full recomputation, as Megatron reported them.

    Narayanan 2021, section 5.1: 24·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)) for each of four passes.
    """
    hidden, layers = model.hidden_size, model.num_hidden_layers
    inside = 24 * sequences * length * layers * hidden**2 * (1 + length / (6 * hidden))
    return 4 * inside + 6 * sequences * length * hidden * model.vocab_size
