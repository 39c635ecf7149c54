"""Losses by host and column: against sums in plain Python, and joins by other libraries."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from llmsys.data_pipeline.inspection.loss_groups import (
    LossGroup,
    export_losses,
    format_loss_groups,
    group_losses,
)
from llmsys.data_pipeline.rules.derived_columns import NO_VALUE
from llmsys.dataset.document_losses import DocumentLosses, load_document_losses
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.errors import ConfigError, DataError
from llmsys.launch.main import main
from tests.helpers.recorded_losses import HOSTS, RecordedLosses, write_recorded_losses

NAMES = ("",)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedLosses:
    return write_recorded_losses(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def sources(recorded: RecordedLosses) -> tuple[TokenShards, ...]:
    return (open_tokens(recorded.data, "train"),)


@pytest.fixture(scope="module")
def losses(recorded: RecordedLosses, sources: tuple[TokenShards, ...]) -> DocumentLosses:
    return load_document_losses(recorded.run, sources)


def compute_groups(
    recorded: RecordedLosses, label: Callable[[dict[str, Any]], str]
) -> dict[str, dict[str, float]]:
    """Sum the record by a label of its documents, one row after the other."""
    rows = [row for row in recorded.rows if row["applied"]]
    steps: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        steps[row["step"]][0] += row["nats"]
        steps[row["step"]][1] += row["tokens"]
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = f"{row['document']:032x}"
        group = found.setdefault(
            label(recorded.documents[name]),
            {"documents": set(), "tokens": 0, "nats": 0.0, "expected": 0.0},
        )
        nats, tokens = steps[row["step"]]
        group["documents"].add(name)
        group["tokens"] += row["tokens"]
        group["nats"] += row["nats"]
        group["expected"] += row["tokens"] * nats / tokens
    return {
        key: {
            "documents": len(group["documents"]),
            "tokens": group["tokens"],
            "loss": group["nats"] / group["tokens"],
            "excess": (group["nats"] - group["expected"]) / group["tokens"],
        }
        for key, group in found.items()
    }


def check_groups(found: list[LossGroup], expected: dict[str, dict[str, float]]) -> None:
    assert {group.value for group in found} == expected.keys()
    assert [group.tokens for group in found] == sorted((g.tokens for g in found), reverse=True)
    total = sum(one["tokens"] for one in expected.values())
    for group in found:
        values = expected[group.value]
        assert (group.documents, group.tokens) == (values["documents"], values["tokens"])
        assert group.loss == pytest.approx(values["loss"], rel=1e-6)
        assert group.excess == pytest.approx(values["excess"], abs=1e-6)
        assert group.share == pytest.approx(values["tokens"] / total)


LABELS: dict[str, Callable[[dict[str, Any]], str]] = {
    "host": lambda row: row["url"].split("/")[2],
    "domain": lambda row: "example.co.uk" if ".co.uk/" in row["url"] else "example.com",
    "month": lambda row: row["date"][:7],
    "year": lambda row: "2024",
    "date": lambda row: row["date"],
    "language": lambda row: row["language"] or NO_VALUE,
    "id": lambda row: row["id"],
    "file": lambda row: "toy.warc.gz",
    "source": lambda row: NO_VALUE,
}


@pytest.mark.parametrize("column", LABELS)
def test_groups_are_sums_over_the_rows_of_their_documents(
    recorded: RecordedLosses,
    sources: tuple[TokenShards, ...],
    losses: DocumentLosses,
    column: str,
) -> None:
    check_groups(
        group_losses(losses, NAMES, sources, column), compute_groups(recorded, LABELS[column])
    )


def test_numbers_are_grouped_by_tenths_of_the_documents(
    recorded: RecordedLosses, sources: tuple[TokenShards, ...], losses: DocumentLosses
) -> None:
    found = group_losses(losses, NAMES, sources, "gopher_quality.words")
    ranges = {group.value: [float(edge) for edge in group.value.split(" to ")] for group in found}
    assert len(found) == 10
    assert {group.documents for group in found} <= {5, 6}

    def label(row: dict[str, Any]) -> str:
        words = row["gopher_quality.words"]
        inside = [name for name, (low, high) in ranges.items() if low <= words < high]
        return inside[0] if inside else max(ranges, key=lambda name: ranges[name][1])

    check_groups(found, compute_groups(recorded, label))


def test_the_table_says_what_it_leaves_out(
    sources: tuple[TokenShards, ...], losses: DocumentLosses
) -> None:
    groups = group_losses(losses, NAMES, sources, "host")
    lines = format_loss_groups(losses, "host", groups, 2).splitlines()
    assert lines[0].split() == [
        "host", "documents", "tokens", "share", "loss", "excess", "first", "last",
    ]  # fmt: skip
    shown = sorted(groups[:2], key=lambda group: -group.excess)
    assert [line.split()[0] for line in lines[1:3]] == [group.value for group in shown]
    assert any(line.startswith("the 2 of 3 with the most tokens") for line in lines)
    assert lines[-1] == "1 skipped steps, which changed no weight, are left out"


def test_an_unknown_column_and_missing_documents_are_errors(
    tmp_path: Path, losses: DocumentLosses, sources: tuple[TokenShards, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"--by-loss hots is no column of documents/\. Use host,"):
        group_losses(losses, NAMES, sources, "hots")
    other = write_recorded_losses(tmp_path)
    for path in (other.data / "documents").iterdir():
        path.unlink()
    shards = (open_tokens(other.data, "train"),)
    with pytest.raises(DataError, match="has no documents/, which have the columns"):
        group_losses(load_document_losses(other.run, shards), NAMES, shards, "host")


# --- Joins ---


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory,
    losses: DocumentLosses,
    sources: tuple[TokenShards, ...],
) -> Path:
    path = tmp_path_factory.mktemp("exported") / "losses.parquet"
    assert export_losses(losses, NAMES, sources, path) == len(losses.tokens_D)
    return path


def check_joined(rows: list[dict[str, Any]], recorded: RecordedLosses) -> None:
    """Check mean excess by host, weighted by tokens, of joined rows."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        sums[row["url"].split("/")[2]][0] += row["excess"] * row["tokens"]
        sums[row["url"].split("/")[2]][1] += row["tokens"]
    expected = compute_groups(recorded, LABELS["host"])
    assert sums.keys() == set(HOSTS) == expected.keys()
    for host, (excess, tokens) in sums.items():
        assert excess / tokens == pytest.approx(expected[host]["excess"], abs=1e-5)


def test_pyarrow_joins_losses_with_documents(exported: Path, recorded: RecordedLosses) -> None:
    documents = ds.dataset(recorded.data / "documents", format="arrow").to_table(["id", "url"])
    joined = pq.read_table(exported).join(documents, "id", join_type="inner")
    check_joined(joined.to_pylist(), recorded)


def test_duckdb_joins_losses_with_documents(exported: Path, recorded: RecordedLosses) -> None:
    duckdb = pytest.importorskip("duckdb")
    documents = ds.dataset(recorded.data / "documents", format="arrow")
    joined = duckdb.sql(f"select * from documents join '{exported}' using (id)")
    assert documents.count_rows() > 0
    rows = [dict(zip(joined.columns, row, strict=True)) for row in joined.fetchall()]
    check_joined(rows, recorded)


def test_polars_joins_losses_with_documents(exported: Path, recorded: RecordedLosses) -> None:
    pl = pytest.importorskip("polars")
    documents = pl.read_ipc(f"{recorded.data}/documents/*.arrow")
    check_joined(documents.join(pl.read_parquet(exported), on="id").to_dicts(), recorded)


# --- Commands ---


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_inspect_prints_groups_and_writes_the_losses(
    tmp_path: Path, recorded: RecordedLosses, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "losses.parquet"
    words = ("inspect", str(recorded.config), "--by-loss", "host", "--output", str(output))
    found = run_json(capsys, *words)
    expected = compute_groups(recorded, LABELS["host"])
    check_groups([LossGroup(**group) for group in found["groups"]], expected)
    assert (found["steps"], found["skipped_steps"], found["column"]) == (29, 1, "host")
    assert found["tokens"] == sum(row["tokens"] for row in recorded.rows if row["applied"])
    assert pq.read_metadata(output).num_rows == found["documents"]
    assert main(["inspect", str(recorded.config), "--by-loss"]) == 0
    assert HOSTS[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by-loss", "--dropped", "all"], "Give it without --dropped and --token."),
        (["--by-loss", "--output", "losses.csv"], "has no known ending with --by-loss"),
        (["--output", "losses.parquet"], "or --by-loss."),
    ],
)
def test_inspect_refuses_what_does_not_fit(
    recorded: RecordedLosses,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert main(["inspect", str(recorded.config), *words]) == 2
    assert message in capsys.readouterr().err


def test_inspect_of_a_dataset_asks_for_a_run(
    tmp_path: Path, recorded: RecordedLosses, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "alone"
    moved.symlink_to(recorded.data)
    assert main(["inspect", str(moved), "--by-loss"]) == 2
    assert "Give the run folder or its config" in capsys.readouterr().err
