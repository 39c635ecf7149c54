"""Build the section about losses by document: hosts, and the hardest and easiest documents.

Reads document_losses/ of a run folder, and tokens/ and documents/ of its datasets.

Invariants:
- What cannot be read becomes a note with the next step.
- Rows and characters of a text are bounded, and text of a crawled page is escaped.
"""

from collections.abc import Sequence
from pathlib import Path

from llmsys.config.data import DataConfig
from llmsys.data_pipeline.inspection.loss_groups import (
    LossGroup,
    find_document_texts,
    group_losses,
)
from llmsys.dataset.document_losses import (
    DocumentLosses,
    load_document_losses,
    open_loss_sources,
    read_side_columns,
    select_extremes,
)
from llmsys.dataset.token_split import TokenShards
from llmsys.errors import DataError
from llmsys.report.html_markup import build_paragraph, build_table, format_number
from llmsys.report.report_section import ReportSection

MAX_GROUPS = 20
MAX_DOCUMENTS = 5
TEXT_CHARACTERS = 200
GROUP_HEAD = ("documents", "tokens", "loss", "excess", "first epoch", "last epoch")
DOCUMENT_HEAD = ("document", "text", "tokens", "loss", "excess")
EXPLANATION = (
    "Loss in nats per token. Its excess is what it has above the mean of the steps that a document "
    "was in, so that documents of early steps can be compared with those of late ones. High: hard "
    "to learn, or noise; low: easy, or seen elsewhere. llmsys inspect RUN --by-loss COLUMN groups "
    "by any column of documents/, and llmsys trace RUN --worst N lists more documents."
)


def build_losses_section(
    run_folder: Path, data: DataConfig
) -> tuple[ReportSection | None, list[str]]:
    """Build tables of losses by host, or by input file without documents/, and of single documents.

    Args:
        run_folder: Folder of the run.
        data: The `data:` section of the run.

    Returns:
        The section, None where the losses cannot be read; and notes that say why.
    """
    try:
        names, sources = open_loss_sources(data)
        losses = load_document_losses(run_folder, sources)
        has_documents = all(any((one.folder / "documents").glob("*.arrow")) for one in sources)
        column = "host" if has_documents else "file"
        groups = group_losses(losses, names, sources, column)
        documents = _list_document_rows(losses, names, sources)
    except DataError as error:
        return None, [f"No losses by document on this page: {error}"]
    shown = sorted(groups[:MAX_GROUPS], key=lambda group: -group.excess)
    count = (
        f"{format_number(len(losses.tokens_D))} documents in {format_number(losses.num_steps)} "
        f"steps, and {format_number(len(groups))} values of {column}"
        + (f", of which the {MAX_GROUPS} with the most tokens" if len(groups) > MAX_GROUPS else "")
        + "."
    )
    content = [
        build_paragraph(count),
        build_table((column, *GROUP_HEAD), map(_format_group, shown), range(1, 7)),
        build_table(DOCUMENT_HEAD, documents, range(2, 5)) if documents else None,
        build_paragraph(EXPLANATION, is_muted=True),
    ]
    return ReportSection("losses", "Losses by document", content), []


def _format_group(group: LossGroup) -> tuple[str, ...]:
    return (
        group.value,
        format_number(group.documents),
        format_number(group.tokens),
        f"{group.loss:.3f}",
        f"{group.excess:+.3f}",
        f"{group.first_loss:.3f}",
        f"{group.last_loss:.3f}",
    )


def _list_document_rows(
    losses: DocumentLosses, names: Sequence[str], sources: Sequence[TokenShards]
) -> list[tuple[str, ...]]:
    """Return the cells of the hardest documents, then of the easiest, the hardest of them first."""
    highest, lowest = select_extremes(losses, MAX_DOCUMENTS)
    places = [*highest, *lowest[::-1]]
    ids = read_side_columns(losses, sources, "id")
    keys = [(int(losses.sources_D[place]), ids[place]) for place in places]
    texts = find_document_texts(sources, keys)
    rows: list[tuple[str, ...]] = []
    for place, key in zip(places, keys, strict=True):
        found = texts.get(key, {})
        source = names[key[0]]
        text = " ".join(found.get("text", "").split())
        rows.append(
            (
                f"{source}: {found.get('url') or key[1]}" if source else found.get("url") or key[1],
                text[:TEXT_CHARACTERS] or "(documents/ does not have it)",
                format_number(int(losses.tokens_D[place])),
                f"{losses.mean_losses[place]:.3f}",
                f"{losses.excesses[place]:+.3f}",
            )
        )
    return rows
