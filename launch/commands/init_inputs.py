"""Find out what folders hold: input files by format, a prepared dataset, or a Hugging Face model.

Reads names and sizes, and the first row of one file with columns.
"""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsys.config.loading.config_files import MANIFEST, RUN_CONFIG, find_folder_config
from llmsys.errors import ConfigError

if TYPE_CHECKING:
    from llmsys.data_pipeline.readers.dataset_folders import DatasetFolder

CSV = "CSV"
HTML = "HTML"
FORMATS = {
    "WARC": (".warc.gz", ".warc", ".warc.zst", ".wet.gz", ".wet", ".arc.gz", ".arc"),
    "JSON lines": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json", ".json.gz"),
    "parquet": (".parquet",),
    "Arrow": (".arrow", ".feather"),
    CSV: (".csv", ".csv.gz", ".csv.zst", ".tsv", ".tsv.gz", ".tab"),
    "text": (".txt", ".md"),
    HTML: (".html", ".htm"),
}
# Files about the data of a folder, which are not data.
CONFIG_FILES = ("dataset_info.json", "state.json", "dataset_infos.json", "README.md")
MAX_FILES = 200_000
HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class FoundContents:
    """Contents of folders. `patterns` name the input files; `text_field` is that of files with
    columns; `text_share` is the measured bytes of kept text per byte of the files.
    """

    patterns: tuple[str, ...] = ()
    formats: tuple[tuple[str, int], ...] = ()
    num_bytes: int = 0
    text_share: float | None = None
    text_field: str = ""
    other_fields: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    other_splits: tuple[str, ...] = ()
    dataset: Path | None = None
    model: Path | None = None

    @property
    def has_html(self) -> bool:
        """True for crawl files and saved pages, which have boilerplate; other formats come as
        text.
        """
        return self.has_crawl or any(name == HTML for name, _ in self.formats)

    @property
    def has_crawl(self) -> bool:
        """True for crawl files, most of whose pages nobody wants; others are somebody's choice."""
        return any(name == "WARC" for name, _ in self.formats)

    @property
    def num_documents(self) -> int | None:
        """Documents, where each file is one; None where their number is not known."""
        counts = [count for name, count in self.formats if name in ("text", HTML)]
        return sum(counts) if len(counts) == len(self.formats) else None

    def describe(self) -> list[str]:
        """Return a line for each thing that was found."""
        lines = [f"a Hugging Face model in {self.model}"] if self.model else []
        lines += [f"a prepared dataset in {self.dataset}"] if self.dataset else []
        if self.formats:
            counts = ", ".join(_format_count(name, count) for name, count in self.formats)
            lines.append(f"{counts}, {self.num_bytes / 1e6:,.1f} MB: {' '.join(self.patterns)}")
        if self.left_out:
            lines.append(
                f"but left out {', '.join(self.left_out)}: of a folder's formats the one with "
                "most bytes is read"
            )
        if self.other_splits:
            known = ", ".join(self.other_splits)
            lines.append(
                f"splits that are not read: {known} (data.inputs and data.heldout_inputs take "
                "{path: …, split: …})"
            )
        if self.text_field:
            others = (
                f" (other columns with text: {', '.join(self.other_fields)})"
                if self.other_fields
                else ""
            )
            lines.append(f"text in the column {self.text_field!r}{others}")
        return lines


def _format_count(name: str, count: int) -> str:
    return f"{count:,} {name} file{'s' * (count > 1)}"


def find_contents(folders: Sequence[Path]) -> FoundContents:
    """Return what the folders hold together.

    Args:
        folders: at least one path.

    Raises:
        ConfigError: a path is no folder, or holds nothing that llmsys reads, or two hold the same
            sort of thing.
    """
    found = FoundContents()
    for folder in folders:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(
                f"{folder} {what} (in {Path.cwd()}). Give a folder of crawl files or of a model."
            )
        config = find_folder_config(folder)
        if config is None:
            found = _add_inputs(found, folder)
        elif config.name == RUN_CONFIG:
            raise ConfigError(
                f"{folder} is a run folder, which is a config already. Use it: llmsys train "
                f"{folder}"
            )
        elif config.name == MANIFEST:
            found = replace(found, dataset=_require_first(found.dataset, folder, "datasets"))
        else:
            found = replace(found, model=_require_first(found.model, folder, "models"))
    if found.dataset and found.patterns:
        raise ConfigError(
            f"{found.dataset} is a prepared dataset, and {found.patterns[0]} are input files. "
            "Give one of the two."
        )
    return found


def _require_first(first: Path | None, folder: Path, sort: str) -> Path:
    if first is not None:
        raise ConfigError(
            f"{first} and {folder} are two {sort}, and a run has one. Give one of them."
        )
    return folder


def _add_inputs(found: FoundContents, folder: Path) -> FoundContents:
    from llmsys.data_pipeline.readers.dataset_folders import ABOUT, open_local_folder

    if (
        any((folder / name).is_file() for name in ABOUT)
        and (dataset := open_local_folder(str(folder))).is_dataset()
    ):
        return _add_dataset_folder(found, folder, dataset)
    files = list(_iter_input_files(folder))
    indexes = [path for path in folder.glob("*.idx") if path.with_suffix(".bin").is_file()]
    if indexes:
        largest = max(indexes, key=lambda path: path.stat().st_size)
        raise ConfigError(
            f"{folder} holds token ids of Megatron-LM, and llmsys init writes configs for texts. "
            f"Read them with data: {{kind: tokens, inputs: [{largest}]}}, and tokenizer: {{kind: "
            "file, path: FOLDER} for the tokenizer that made them."
        )
    if not files:
        known = ", ".join(f"{name} ({', '.join(ends[:2])})" for name, ends in FORMATS.items())
        raise ConfigError(
            f"{folder} has no files that llmsys reads: {known}, a prepared dataset or a Hugging "
            "Face model. Give the folder of such files, or begin with a shipped config: llmsys "
            "list configs"
        )
    sizes = Counter[str]()
    for name, path, _ in files:
        sizes[name] += path.stat().st_size
    # of several formats the one with most bytes: a page may come as WARC and as text, and a dataset
    # has a README.md
    chosen = sizes.most_common(1)[0][0]
    paths = [(path, end) for name, path, end in files if name == chosen]
    others = Counter(name for name, _, _ in files if name != chosen)
    is_deep = any(path.parent != folder for path, _ in paths)
    patterns = sorted(
        {str(folder / "**" / f"*{end}") if is_deep else str(folder / f"*{end}") for _, end in paths}
    )
    found = replace(
        found,
        patterns=(*found.patterns, *patterns),
        formats=(*found.formats, (chosen, len(paths))),
        num_bytes=found.num_bytes + sizes[chosen],
        left_out=(
            *found.left_out,
            *(f"{_format_count(*one)} in {folder}" for one in others.items()),
        ),
    )
    if chosen not in ("JSON lines", "parquet", "Arrow", CSV) or found.text_field:
        return found
    return _add_text_field(found, paths[0][0], chosen)


def _add_dataset_folder(
    found: FoundContents, folder: Path, dataset: "DatasetFolder"
) -> FoundContents:
    """Add the training split of a folder of Hugging Face's datasets, or its only one."""
    from llmsys.data_pipeline.readers.dataset_folders import list_split_files, list_splits

    where = "llmsys init"
    names = list_split_files(
        dataset, "", "", where, [end for name in FORMATS if name != CSV for end in FORMATS[name]]
    )
    forms = Counter(known[0] for name in names if (known := _find_format(name)) is not None)
    form = forms.most_common(1)[0][0]
    splits = list_splits(dataset, "", where)
    found = replace(
        found,
        patterns=(*found.patterns, str(folder)),
        formats=(*found.formats, (form, len(names))),
        num_bytes=found.num_bytes + sum((folder / name).stat().st_size for name in names),
        other_splits=(
            *found.other_splits,
            *(name for name in splits if not {*splits[name]} & {*names}),
        ),
    )
    return found if found.text_field else _add_text_field(found, folder / names[0], form)


def _find_format(name: str) -> tuple[str, str] | None:
    """Return the format and the ending of a file name; of several endings the longest: .warc.gz
    before .gz.
    """
    endings = (
        (form, end) for form, ends in FORMATS.items() for end in ends if name.lower().endswith(end)
    )
    return max(endings, key=lambda pair: len(pair[1]), default=None)


def _iter_input_files(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield (format, path, ending) of the input files below a folder, in the order of their
    names.
    """
    seen = 0
    for parent, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            seen += 1
            if seen > MAX_FILES:  # enough to know the formats; patterns name the others too
                return
            if name.startswith(".") or name in CONFIG_FILES:
                continue
            if best := _find_format(name):
                yield best[0], Path(parent) / name, best[1]


def _add_text_field(found: FoundContents, path: Path, form: str) -> FoundContents:
    """Return the contents with the column of the documents: `text`, or the one whose first value
    is longest.
    """
    from llmsys.data_pipeline.readers.row_fields import get_field
    from llmsys.data_pipeline.readers.row_reader import find_text_fields

    if form == "JSON lines":
        row = _read_first_json(path)
    elif form == CSV:
        row = _read_first_csv_row(path)
    else:
        row = _read_first_row(path, form)
    names = find_text_fields(row)
    if not names:
        columns = ", ".join(row) or "none"
        raise ConfigError(
            f"the first row of {path} has no column with text (columns: {columns}). Give files "
            "with one document or one list of messages per row; of token ids only Megatron's are "
            "read (data.kind=tokens)."
        )
    # a chat before text: the other columns are about it
    chats = [name for name in names if isinstance(get_field(row, name), list)]
    best = (
        "text"
        if "text" in names
        else max(chats or names, key=lambda name: len(get_field(row, name)))
    )
    return replace(
        found, text_field=best, other_fields=tuple(name for name in names if name != best)[:8]
    )


def _read_first_json(path: Path) -> dict[str, Any]:
    import pyarrow as pa

    try:
        with pa.input_stream(str(path), compression="detect") as file:
            line = file.read(HEAD_BYTES).lstrip().partition(b"\n")[0]
        row = json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} has no JSON object on its first line: {error}. Give JSON lines: one object "
            "per line."
        ) from None
    if not isinstance(row, dict):
        kind = "one JSON array" if isinstance(row, list) else f"a {type(row).__name__}"
        raise ConfigError(
            f"{path} holds {kind}, but JSON lines are needed. Write one object per line."
        )
    return row


def _read_first_csv_row(path: Path) -> dict[str, Any]:
    import pyarrow as pa

    from llmsys.data_pipeline.readers.csv_rows import DELIMITERS

    try:
        with pa.input_stream(str(path), compression="detect") as file:
            head = file.read(HEAD_BYTES).decode("utf-8-sig", "replace")
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path} cannot be read as CSV: {error}. Remove it, or write it again."
        ) from None
    csv.field_size_limit(HEAD_BYTES)
    # The delimiter is the one with most columns. Later rows may hold it in texts.
    tables = []
    for delimiter in DELIMITERS:
        with suppress(csv.Error):  # a quoted field that ends beyond the head
            tables.append(list(islice(csv.reader(StringIO(head), delimiter=delimiter), 2)))
    header, *rows = max(tables, key=lambda table: len(table[0]) if table else 0, default=[]) or [[]]
    first = [value or None for value in (rows[0] if rows else [])]  # an empty field is absent
    return dict(zip(header, first, strict=False)) if first else dict.fromkeys(header)


def _read_first_row(path: Path, form: str) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if form == "parquet":
            batch = next(pq.ParquetFile(path).iter_batches(batch_size=1), None)
        else:
            batch = _read_arrow_batch(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path} cannot be read as {form}: {error}. Remove it, or write it again."
        ) from None
    rows = [] if batch is None else batch.slice(0, 1).to_pylist()
    return rows[0] if rows else {}


def _read_arrow_batch(path: Path) -> Any:
    """Return the first record batch of a file or, as Hugging Face's datasets are stored, of a
    stream.
    """
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_file(source)
            return reader.get_batch(0) if reader.num_record_batches else None
        except pa.ArrowInvalid:
            source.seek(0)
            return next(iter(pa.ipc.open_stream(source)), None)
