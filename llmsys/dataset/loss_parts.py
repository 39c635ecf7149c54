"""The record of losses by document in a run folder: Arrow files that every rank writes for itself.

Reads/Writes: `document_losses/step-FIRST-LAST.rank-RANK.arrow`, rows of the steps FIRST to LAST,
counted from 1, that this rank computed. A document of a step has several rows where several
windows, micro-batches or ranks had a part of it.

Invariants:
- A file under its final name is complete and is never changed: it is written under a temporary
  name, synced and renamed.
- Every step is in a file before a checkpoint after it is saved. A run that resumes from one removes
  what comes after it, so no step is there twice and none is missing.
- The number of files follows from the rows and the starts of a run, not from its checkpoints: the
  newest file of a rank is written again, with the rows after it, while it is short.
- Documents have the numbers of the training split of their dataset, whose fingerprint is in the
  schema's metadata.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from llmsys.errors import DataError
from llmsys.storage.arrow_file import ARROW_ERRORS, ArrowFileWriter
from llmsys.storage.stored_formats import DOCUMENT_LOSSES, LOSSES_FOLDER, require_arrow_version

# Key of the fingerprints of the run's sources in the metadata of the schema, as a list in JSON.
FINGERPRINTS_KEY = b"llmsys.fingerprints"

LOSS_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # counted from 1, as in the log
        ("source", pa.int16()),  # of a mixture, in the order of the config; else 0
        ("epoch", pa.int32()),  # of the source, from 0
        ("document", pa.int64()),  # its number in the training split of the source
        ("tokens", pa.int32()),  # targets with a loss
        ("nats", pa.float32()),  # their loss, summed
        ("applied", pa.bool_()),  # False: the step was skipped and changed no weight
    ],
    DOCUMENT_LOSSES.arrow_metadata,
)

_NAME = re.compile(r"step-(\d+)-(\d+)\.rank-(\d+)\.arrow")


@dataclass(frozen=True)
class LossPart:
    """One file of the record: the steps `first` to `last` of a rank, counted from 1."""

    path: Path
    first: int
    last: int
    rank: int


def list_loss_parts(run_folder: Path) -> list[LossPart]:
    """List the files of a run's record.

    Args:
        run_folder: Folder of the run.

    Returns:
        Files by step and rank; none where losses were not recorded. One whose steps are all in
        another of its rank is left out: a kill came before it was removed.
    """
    return _select_longest_parts(_find_loss_parts(run_folder))


def _select_longest_parts(parts: Sequence[LossPart]) -> list[LossPart]:
    """Return the parts without those that were written again with further rows."""
    last: dict[tuple[int, int], int] = {}
    for part in parts:
        key = (part.rank, part.first)
        last[key] = max(part.last, last.get(key, 0))
    return [part for part in parts if part.last == last[part.rank, part.first]]


def _find_loss_parts(run_folder: Path) -> list[LossPart]:
    folder = run_folder / LOSSES_FOLDER
    found = (
        (path, _NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ())
    )
    parts = [LossPart(path, *map(int, match.groups())) for path, match in found if match]
    return sorted(parts, key=lambda part: (part.first, part.rank))


def extend_loss_part(
    part: LossPart | None,
    run_folder: Path,
    rank: int,
    rows: pa.RecordBatch,
    fingerprints: Sequence[str],
    max_rows: int,
) -> LossPart:
    """Write the rows of some steps of a rank, in one file with those before if both fit into it.

    Args:
        part: The file that this process has written before; None: none.
        run_folder: Folder of the run.
        rank: The rank.
        rows: One row or more with the columns of `LOSS_SCHEMA`, ordered by step, after those of
            `part`.
        fingerprints: Fingerprint of the dataset of each source.
        max_rows: Most rows of a file that is written from two.

    Returns:
        The file with the rows.

    Raises:
        DataError: The disk refuses the file, or the one before is damaged.
    """
    if part is None or not part.path.is_file():
        return write_loss_part(run_folder, rank, rows, fingerprints)
    before, _ = _read_part(part.path)
    if rows.num_rows + sum(batch.num_rows for batch in before) > max_rows:
        return write_loss_part(run_folder, rank, rows, fingerprints)
    joined = write_loss_part(run_folder, rank, pa.concat_batches([*before, rows]), fingerprints)
    part.path.unlink(missing_ok=True)
    return joined


def write_loss_part(
    run_folder: Path, rank: int, rows: pa.RecordBatch, fingerprints: Sequence[str]
) -> LossPart:
    """Write the rows of some steps of a rank. When it returns they survive a power failure.

    Args:
        run_folder: Folder of the run.
        rank: The rank.
        rows: One row or more with the columns of `LOSS_SCHEMA`, ordered by step.
        fingerprints: Fingerprint of the dataset of each source.

    Returns:
        The file.

    Raises:
        DataError: The disk refuses the file.
    """
    steps = rows.column("step")
    first, last = steps[0].as_py(), steps[-1].as_py()
    name = f"step-{first:08d}-{last:08d}.rank-{rank:05d}.arrow"
    metadata = DOCUMENT_LOSSES.arrow_metadata | {
        FINGERPRINTS_KEY: json.dumps(list(fingerprints)).encode()
    }
    schema = LOSS_SCHEMA.with_metadata(metadata)
    path = run_folder / LOSSES_FOLDER / name
    with ArrowFileWriter(path, schema, compression="zstd") as writer:
        writer.write(pa.RecordBatch.from_arrays(rows.columns, schema=schema))
    return LossPart(path, first, last, rank)


def truncate_loss_parts(run_folder: Path, steps: int, rank: int, ranks: int) -> None:
    """Remove the rows after a step, before the steps after it are trained again.

    Every rank calls it: rank r of R removes the files of the ranks r, R + r, 2R + r, … of the
    process group that wrote them, so that no file is missed or removed twice.

    Args:
        run_folder: Folder of the run.
        steps: The last step to keep.
        rank: This rank.
        ranks: Number of ranks.
    """
    found = _find_loss_parts(run_folder)
    kept = _select_longest_parts(found)
    for part in set(found) - set(kept):
        if part.rank % ranks == rank:
            part.path.unlink()
    for part in kept:
        if part.rank % ranks != rank or part.last <= steps:
            continue
        if part.first <= steps:
            batches, fingerprints = _read_part(part.path)
            rows = pa.Table.from_batches(batches, LOSS_SCHEMA)
            kept = rows.filter(pc.less_equal(rows.column("step"), steps)).combine_chunks()
            write_loss_part(run_folder, part.rank, kept.to_batches()[0], fingerprints)
        part.path.unlink()
    folder = run_folder / LOSSES_FOLDER
    for aside in folder.glob(".*.tmp") if folder.is_dir() else ():
        match = _NAME.search(aside.name)
        if match and int(match[3]) % ranks == rank:  # of a rank that was killed
            aside.unlink()


def read_loss_parts(run_folder: Path, fingerprints: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read the record of a run, file by file.

    Args:
        run_folder: Folder of the run.
        fingerprints: Fingerprint of the dataset of each source, as they are now.

    Yields:
        Rows of `LOSS_SCHEMA`.

    Raises:
        DataError: The run has no record, a file is damaged, or a dataset has changed since.
    """
    parts = list_loss_parts(run_folder)
    if not parts:
        raise DataError(
            f"{run_folder} has no losses by document. Train with "
            "train.record_document_losses=true; the record begins with the next checkpoint or end "
            "of the run."
        )
    _require_separate_steps(parts)
    for part in parts:
        batches, recorded = _read_part(part.path)
        if list(fingerprints) != recorded:
            raise DataError(
                f"{part.path} was recorded with the dataset {', '.join(recorded)}, and that of the "
                f"run is {', '.join(fingerprints)} now: its documents have other numbers. Give the "
                "dataset that the run was trained on: data.folder=FOLDER."
            )
        yield from batches


def _require_separate_steps(parts: Sequence[LossPart]) -> None:
    newest: dict[int, LossPart] = {}
    for part in parts:
        before = newest.get(part.rank)
        if before is not None and before.last >= part.first:
            raise DataError(
                f"{before.path} and {part.path.name} both have step {part.first} of rank "
                f"{part.rank}, which would count twice. Delete the one that no run resumes from: "
                "the older one, by its time."
            )
        newest[part.rank] = part


def _read_part(path: Path) -> tuple[list[pa.RecordBatch], list[str]]:
    """Return the rows of a file, and the fingerprints of its sources."""
    try:
        with pa.memory_map(str(path)) as data:
            arrow = pa.ipc.open_file(data)
            metadata = arrow.schema.metadata or {}
            require_arrow_version(DOCUMENT_LOSSES, metadata, path)
            plain = [
                pa.RecordBatch.from_arrays(arrow.get_batch(index).columns, schema=LOSS_SCHEMA)
                for index in range(arrow.num_record_batches)
            ]
            return plain, json.loads(metadata[FINGERPRINTS_KEY])
    except (*ARROW_ERRORS, KeyError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({error}). Delete it, and read the losses without its steps, or "
            "train in a new folder: llmsys train CONFIG run.folder=FOLDER"
        ) from error
