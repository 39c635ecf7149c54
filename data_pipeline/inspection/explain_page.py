"""Explain what every stage did with one page, with the measured values.

Reads work/extracted.packs, documents/ and dropped/ of a prepared dataset, and applies language
identification and rules to the page again, by the config of the dataset and not by that of a file.
Returns a step per stage, for every capture of the URL. Changes nothing.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.core.document_schema import select_heldout
from llmsys.data_pipeline.core.funnel import format_measured_value
from llmsys.data_pipeline.core.staging import is_change_unfinished
from llmsys.data_pipeline.core.task_record import list_extracted_texts
from llmsys.data_pipeline.graph.resource_files import require_resource_files
from llmsys.data_pipeline.inspection.dataset_config import read_dataset_config
from llmsys.data_pipeline.language.rules_by_language import serialize_rules_by_language
from llmsys.data_pipeline.readers.input_files import find_heldout_files
from llmsys.data_pipeline.stages.apply_rules import explain_one_page
from llmsys.data_pipeline.stages.near_thresholds import LanguageThresholds
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.manifest_section import format_record_place
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import DataError

EXCERPT_CHARACTERS = 1_000


@dataclass
class CaptureExplanation:
    """One capture of the page; `steps` are stage, verdict and details, in the order of the
    stages.
    """

    id: str
    url: str
    date: str
    file: str
    offset: int
    steps: list[tuple[str, str, str]] = field(default_factory=list)
    excerpt: str = ""


def explain_url(data: CrawlConfig, url: str) -> list[CaptureExplanation]:
    """Explain every capture of a URL.

    Args:
        data: only its folder is used: all else is taken from the dataset's own config.
        url: the address as the crawl has it.

    Returns:
        A list of captures, not empty.

    Raises:
        DataError: if the dataset does not exist, is being changed, or has no such page.
    """
    manifest = load_manifest(data.folder)
    if is_change_unfinished(data.folder):
        raise DataError(
            f"{data.folder} cannot be explained now: an unfinished preparation with other "
            "settings or inputs has replaced a part of work/, which no longer matches the "
            "published dataset. Finish llmsys prepare CONFIG first."
        )
    data = read_dataset_config(manifest, data)
    require_resource_files(data)
    rules = serialize_rules_by_language(data)
    limits = LanguageThresholds(data.language, rules)
    captures = []
    for page in _iter_matching_pages(list_extracted_texts(data.folder), "url", url):
        captures.append(_explain_capture(page, data, rules, limits))
    if not captures:
        skipped = sum(skip.count for skip in manifest.read.skipped)
        raise DataError(
            f"{url} is not among the pages of {data.folder}. Write the URL as in the crawl. "
            f"{skipped:,} records could not be used (see llmsys report), and nothing can be shown "
            "without work/."
        )
    for capture in captures:
        _add_dataset_steps(capture, data)
    return captures


def _explain_capture(
    page: pa.RecordBatch, data: CrawlConfig, rules: str, limits: LanguageThresholds
) -> CaptureExplanation:
    row = page.to_pylist()[0]
    capture = CaptureExplanation(*(row[name] for name in ("id", "url", "date", "file", "offset")))
    stages, left, drops = explain_one_page(page, data, rules)
    capture.steps.append(
        (
            "read",
            "read",
            f"{row['bytes_html']:,} bytes of {format_record_place(row['file'], row['offset'])}",
        )
    )
    for stage, counts in stages.items():
        if not counts["documents_in"]:
            break
        if not counts["documents_out"]:
            capture.steps.append((stage, "dropped", drops[0]["reason"]))
            break
        capture.steps.append(
            (stage, "stays", _format_stage_details(stage, counts, left.get(stage, {}), limits))
        )
    last = next(reversed(left.values()), row)
    capture.excerpt = (last["text"] or "")[:EXCERPT_CHARACTERS]
    return capture


def _format_stage_details(
    stage: str, counts: dict[str, int], left: dict[str, Any], limits: LanguageThresholds
) -> str:
    """Format the values that a stage measured, with their allowed ranges; otherwise the bytes in
    and out.
    """
    ranges = _format_ranges(limits, left["language"]) if "language" in left else {}
    if stage == "language" and left:
        return (
            f"{left['language']}, score "
            f"{left['language_score']:.3f}{ranges.get('language_score', '')}"
        )
    own = {
        name: value
        for name, value in left.items()
        if name.startswith(f"{stage}.") and value is not None
    }
    if own:
        measured = (
            f"{name.partition('.')[2]} {_format_cell(value)}{ranges.get(name, '')}"
            for name, value in own.items()
        )
        return ", ".join(measured)
    return f"{counts['bytes_in']:,} bytes in, {counts['bytes_out']:,} bytes out"


def _format_cell(value: Any) -> str:
    """Format a number as reasons do, and what an annotator gave as text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return format_measured_value(value) if is_number else f"{value!s:.80}"


def _format_ranges(limits: LanguageThresholds, code: str) -> dict[str, str]:
    """Format the allowed ranges for a language by column: ` [50 to 100000]`, ` [to 0.1]`, `
    [from 2]`.
    """
    ends: dict[str, dict[str, str]] = {}
    for (_, _, drops), column, threshold in limits.get_thresholds(code):
        ends.setdefault(column, {})["to" if drops == "above" else "from"] = f"{threshold:.10g}"
    return {
        column: f" [{own['from']} to {own['to']}]"
        if len(own) == 2
        else f" [{' '.join(*own.items())}]"
        for column, own in ends.items()
    }


def _add_dataset_steps(capture: CaptureExplanation, data: CrawlConfig) -> None:
    """Add the steps of the stages that compare documents, as the dataset records them."""
    if capture.steps[-1][1] == "dropped":
        return
    folder = data.folder
    for page in _iter_matching_pages(
        sorted((folder / "dropped").glob("*.arrow")), "id", capture.id
    ):
        row = page.to_pylist()[0]
        capture.steps.append((row["stage"], "dropped", row["reason"]))
        return
    for path in sorted((folder / "documents").glob("part-*.arrow")):
        if (page := next(_iter_matching_pages([path], "id", capture.id), None)) is not None:
            heldout = select_heldout(page, data.split, find_heldout_files(data))[0]
            split = "held out for evaluation" if heldout else "for training"
            capture.steps.append(("documents", "kept", f"{path.name}, {split}"))
            return
    capture.steps.append(
        ("documents", "missing", "documents/ and dropped/ lack it; run llmsys inspect")
    )


def _iter_matching_pages(
    paths: Sequence[Path], column: str, value: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with a value in a column, each as a batch of one."""
    for path in paths:
        for batch in read_batches(path):
            found = batch.filter(pc.equal(batch.column(column), value))
            for number in range(found.num_rows):
                yield found.slice(number, 1)


def format_explanation(captures: Sequence[CaptureExplanation]) -> str:
    """Format captures for the terminal.

    Args:
        captures: the captures.

    Returns:
        Lines of text.
    """
    return "\n\n".join(map(_format_capture, captures))


def _format_capture(capture: CaptureExplanation) -> str:
    lines = [
        capture.url,
        f"  captured {capture.date}, {format_record_place(capture.file, capture.offset)}, id "
        f"{capture.id}",
    ]
    lines += [_format_step(*step) for step in capture.steps]
    return "\n".join([*lines, *(f"    {line}" for line in capture.excerpt.splitlines())])


def _format_step(stage: str, verdict: str, details: str) -> str:
    head = f"  {stage:<21} {verdict:<8} "
    return textwrap.fill(
        details, 120, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False
    )
