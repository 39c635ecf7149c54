"""Render the report of a dataset, a run or both as one HTML file that needs no other file and no
network.

Reads a run folder and a dataset folder; either may be incomplete or absent. Writes the page. The
end of the page is about the origin of the run: starts, checkpoints, environment and config.

Invariants:
- The same folders give the same bytes.
- No content of the page is run as a script: the page's policy names each script by its hash, and
  all text is escaped.
- The file is written atomically.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from llmsys import __version__
from llmsys.config.data import DataConfig
from llmsys.dataset.loss_parts import list_loss_parts
from llmsys.dataset.manifest import MANIFEST_NAME, Manifest, load_manifest
from llmsys.errors import DataError
from llmsys.log import get_logger
from llmsys.report.dataset_sections import (
    build_dataset_numbers,
    build_dataset_origin,
    build_dataset_sections,
    list_missing_notes,
)
from llmsys.report.html_markup import dump_script_json, format_bytes, render_template
from llmsys.report.packed_plotly import load_packed_plotly
from llmsys.report.report_section import Numbers, ReportSection
from llmsys.report.run_record import RunRecord, is_finite, read_run
from llmsys.report.run_sections import build_run_numbers, build_run_sections, describe_run_state
from llmsys.storage.atomic_write import write_bytes_atomically


def build_run_origin(record: RunRecord) -> Markup:
    """Return configuration, environment and starts of the run, for the section on origins."""
    starts = [
        (
            _format_time(start),
            str(start.get("engine", "–")),
            str(start.get("world_size", "–")),
            str(start.get("device", "–")),
            "the beginning"
            if start.get("resumed_from") is None
            else f"step {start['resumed_from']}",
        )
        for start in record.starts[-50:]
    ]
    last = record.checkpoints[max(record.checkpoints)] if record.checkpoints else {}
    return render_template(
        "run_origin.html",
        starts=starts,
        num_checkpoints=len(record.checkpoints),
        last_folder=last.get("folder", "?"),
        environment=_flatten_mapping(record.environment),
        config_text=record.config_text,
    )


def _flatten_mapping(value: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Return a nested mapping as (a.b.c, text) pairs."""
    pairs: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{before}{key}"
        if isinstance(item, dict):
            pairs += _flatten_mapping(item, f"{name}.")
        else:
            pairs.append(
                (name, item if isinstance(item, str) else json.dumps(item, ensure_ascii=False))
            )
    return pairs


def _format_time(event: dict[str, Any]) -> str:
    seconds = event.get("time")
    return (
        f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}" if is_finite(seconds) else "–"
    )


log = get_logger(__name__)


def write_report(
    run_folder: Path | None,
    data_folder: Path | None,
    output: Path | None = None,
    reload_seconds: float | None = None,
    data: DataConfig | None = None,
) -> Path:
    """Write the report of a run, of a dataset, or of both on one page.

    Args:
        run_folder: Folder with config.yaml, environment.json and events.jsonl, or some of them;
            None for a dataset alone.
        data_folder: Folder with manifest.json; None for a run alone.
        output: The HTML file; by default report.html in the run folder, else in the dataset folder.
        reload_seconds: Interval at which an open page loads itself again; None: never.
        data: The `data:` section of the run, for losses by document; None: without them, because
            their documents are read anew for each page.

    Returns:
        Path of the HTML file.

    Raises:
        DataError: There is neither a run nor a dataset, or the file cannot be written.
    """
    run = read_run(run_folder) if run_folder is not None else None
    manifest, data_notes = _read_dataset(data_folder)
    if (run is None or run.is_empty) and manifest is None:
        if data_folder is not None and (data_folder / MANIFEST_NAME).exists():
            load_manifest(data_folder)  # says what is wrong with it
        raise DataError(
            f"Nothing to report: no run in {run_folder or '(no run folder)'} and no "
            f"{MANIFEST_NAME} in {data_folder or '(no dataset folder)'}. Run `llmsys prepare "
            "CONFIG` or `llmsys train CONFIG` first."
        )
    path = (
        output or (run_folder if run_folder is not None else data_folder or Path()) / "report.html"
    )
    losses: list[ReportSection] = []
    if data is not None and run_folder is not None and list_loss_parts(run_folder):
        # Not at the top: the page of a run without losses reads no documents.
        from llmsys.report.losses_section import build_losses_section

        section, notes = build_losses_section(run_folder, data)
        losses = [] if section is None else [section]
        data_notes += notes
    page = render_report(run, manifest, data_notes, reload_seconds, losses).encode(
        "utf-8", errors="replace"
    )
    write_bytes_atomically(path, page)
    log.info("report: %s (%s)", path, format_bytes(len(page)))
    return path


def _read_dataset(folder: Path | None) -> tuple[Manifest | None, list[str]]:
    if folder is None:
        return None, []
    try:
        manifest = load_manifest(folder)
    except DataError as error:
        return None, [f"No dataset on this page: {error}"]
    return manifest, list_missing_notes(manifest)


def render_report(
    run: RunRecord | None,
    manifest: Manifest | None,
    notes: list[str] | None = None,
    reload_seconds: float | None = None,
    further: Sequence[ReportSection] = (),
) -> str:
    """Return the page as text, from a run, a dataset or both, with notes on missing parts.

    `further` sections follow those of the run.
    """
    numbers: Numbers = []
    parts: list[ReportSection] = []
    origin: list[Markup] = []
    notes = list(notes or [])
    if run is not None:
        numbers += build_run_numbers(run)
        parts += build_run_sections(run, _find_tokens_per_byte(run, manifest))
        parts += further
        origin.append(build_run_origin(run))
        notes = run.notes + _list_data_warnings(run, manifest) + notes
    if manifest is not None:
        numbers += build_dataset_numbers(manifest)
        parts += build_dataset_sections(manifest)
        origin.append(build_dataset_origin(manifest))
    parts.append(ReportSection("origin", "Origin", origin))
    return render_document(_build_titles(run, manifest), numbers, notes, parts, reload_seconds)


def _find_tokens_per_byte(run: RunRecord, manifest: Manifest | None) -> float | None:
    """Return tokens per byte of the training split, else of the evaluated text; None where
    neither is known.
    """
    if manifest is not None and "train" in manifest.splits and manifest.splits["train"].bytes:
        return manifest.splits["train"].tokens / manifest.splits["train"].bytes
    evaluation = run.last_evaluation or {}
    tokens, text_bytes = evaluation.get("evaluated_tokens"), evaluation.get("evaluated_bytes")
    return tokens / text_bytes if tokens and text_bytes else None


def _list_data_warnings(run: RunRecord, manifest: Manifest | None) -> list[str]:
    """Return a warning when the run was trained on a dataset with another fingerprint."""
    trained_on = run.environment.get("data_fingerprint")
    if manifest is None or not trained_on or trained_on == manifest.fingerprint:
        return []
    return [
        f"The run was trained on data with the fingerprint {trained_on}, but this dataset has "
        f"{manifest.fingerprint}: it was prepared again since. This page does not describe the "
        "data that the model was trained on."
    ]


def _build_titles(run: RunRecord | None, manifest: Manifest | None) -> tuple[str, str]:
    """Return the page's title and subtitle."""
    data = f"dataset {manifest.name}" if manifest is not None else ""
    if run is None:
        return (manifest.name if manifest is not None else "report"), "dataset report"
    return run.name, " · ".join(
        one for one in ("training run", describe_run_state(run)[0], data) if one
    )


# --- The document ---


def render_document(
    titles: tuple[str, str],
    numbers: Numbers,
    notes: list[str],
    parts: list[ReportSection],
    reload_seconds: float | None = None,
) -> str:
    """Render one self-contained page.

    Args:
        titles: Title and subtitle.
        numbers: Cards at the head: what, how much, and a remark.
        notes: Remarks before the sections.
        parts: Sections with their figures.
        reload_seconds: Interval at which an open page loads itself again; None: never.

    Returns:
        The page as text.
    """
    title, subtitle = titles
    library = load_packed_plotly()
    scripts = [_read_asset("unpack.js"), _read_asset("page.js")]
    return render_template(
        "page.html",
        title=title,
        subtitle=subtitle,
        policy=_build_content_security_policy(scripts, library.digest),
        reload_seconds=reload_seconds,
        style=Markup(_read_asset("page.css")),
        numbers=numbers,
        notes=notes,
        parts=parts,
        version=__version__,
        figures=dump_script_json([figure.to_dict() for one in parts for figure in one.figures]),
        library=library,
        scripts=scripts,
    )


def _build_content_security_policy(scripts: list[str], library: str) -> str:
    """Return a policy that allows these scripts and the library of a digest alone, and loads
    nothing from anywhere.
    """
    digests = [library] + [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    )


def _read_asset(name: str) -> str:
    return resources.files("llmsys.report").joinpath(name).read_text("utf-8")
