"""The results of an ablation as rows, for the terminal and the page."""

from collections.abc import Sequence
from statistics import fmean

from llmsys.ablation.differences import NOTE, Difference
from llmsys.ablation.plan import BASE
from llmsys.ablation.record import AblationRecord


def list_rows(record: AblationRecord) -> tuple[list[str], list[list[str]]]:
    """List the results: one row for each variant.

    Args:
        record: The record.

    Returns:
        Titles of the columns, and cells.
    """
    head = ["variant", "documents", "tokens", "passes", "seeds"]
    for name in record.sets:
        head += [f"{name}: bits per byte", "difference to base"]
    rows = []
    for name in record.variants:
        dataset = record.datasets[name]
        row = [name, f"{dataset.documents:,}", f"{dataset.train_tokens:,}"]
        row += [f"{dataset.passes:.2f}", str(len(record.runs.get(name, {})))]
        for heldout in record.sets:
            scores = record.get_scores(name, heldout)
            row.append(f"{fmean(scores.values()):.4f}" if scores else "–")
            found = record.differences.get(name, {}).get(heldout)
            row.append("" if name == BASE else format_difference(found))
        rows.append(row)
    return head, rows


def format_difference(found: Difference | None) -> str:
    """Return a difference with its interval, and a word where the interval does not hold 0.

    Args:
        found: The difference; None where there are no pairs.

    Returns:
        Such as `+0.0132 ± 0.0051 worse`.
    """
    if found is None:
        return "–"
    if found.half_width is None:
        return f"{found.mean:+.4f}, one seed"
    verdict = (" better" if found.mean < 0 else " worse") if found.is_clear else ""
    return f"{found.mean:+.4f} ± {found.half_width:.4f}{verdict}"


def list_set_lines(record: AblationRecord) -> list[str]:
    """Return a line about each held-out set.

    Args:
        record: The record.

    Returns:
        Lines of text.
    """
    return [
        f"{name}: {one.documents:,} documents, {one.text_bytes:,} bytes, {one.tokens:,} tokens"
        + (f"; {one.left_out:,} with copies in the crawl are left out" if one.left_out else "")
        for name, one in record.sets.items()
    ]


def list_notes(record: AblationRecord) -> list[str]:
    """Return what a reader must know of the intervals.

    Args:
        record: The record.

    Returns:
        Sentences.
    """
    count = sum(len(by_set) for by_set in record.differences.values())
    notes = [NOTE]
    if count > 1:
        notes.append(
            f"Of {count} intervals {0.05 * count:.1f} would leave out 0 by chance if no variant "
            "differed."
        )
    notes.append(
        "Lower is better. All variants have the tokenizer of the base, the same model and the "
        "same number of training tokens; passes is how often each of their own tokens is seen."
    )
    return notes


def format_table(record: AblationRecord) -> str:
    """Return the results as text.

    Args:
        record: The record.

    Returns:
        The table, the held-out sets and the notes.
    """
    head, rows = list_rows(record)
    lines = _align_columns([head, *rows])
    return "\n".join([*lines, "", *list_set_lines(record), *list_notes(record)])


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines in which the first column begins, and the others end, at one place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
