"""Build the section about evaluation sets: how much of each set the documents contained, and where.

Reads a `Manifest`; returns None where no set was searched for.
"""

from markupsafe import Markup

from llmsys.dataset.manifest import Manifest
from llmsys.dataset.manifest_section import SetContamination
from llmsys.report.html_markup import format_number, format_percent, render_template
from llmsys.report.report_section import ReportSection

HEAD = (
    "set",
    "items",
    "found",
    "share",
    "documents dropped",
    "documents cut",
    "spared",
    "n-grams",
    "too short",
)


def build_contamination_section(manifest: Manifest) -> ReportSection | None:
    """Return the table of sets, with examples of matches."""
    found = manifest.decontamination
    if found is None:
        return None
    rows = [
        (
            Markup("<b>{}</b>").format(name),
            format_number(one.items),
            format_number(one.items_found),
            format_percent(one.items_found, one.items),
            format_number(one.documents_dropped),
            format_number(one.documents_cut),
            format_number(one.items_spared),
            format_number(one.ngrams),
            format_number(one.too_short),
        )
        for name, one in found.sets.items()
    ]
    note = (
        f"{format_number(found.exempt_ngrams)} n-grams occur in more than "
        "data.decontaminate.max_documents documents and were ignored; an item that remains in a "
        "document for this reason is called spared. The folder decontamination has one line per "
        "document and item."
    )
    content = render_template(
        "contamination.html",
        head=HEAD,
        rows=rows,
        numeric=range(1, len(HEAD)),
        note=note,
        sets=found.sets,
        list_spared_rows=list_spared_rows,
    )
    return ReportSection("contamination", "Evaluation sets", [content])


def list_spared_rows(one: SetContamination) -> list[tuple[str, ...]]:
    """Return the spared items of a set with the documents that contain them."""
    line = Markup("<div>{}</div>")
    return [
        (
            item.item,
            item.ngram,
            format_number(item.documents),
            Markup("").join(line.format(each.url or each.id) for each in item.examples),
        )
        for item in one.spared
    ]
