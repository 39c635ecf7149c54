"""Build the section about evaluation sets: how much of each set the documents contained, and where.

Reads a `Manifest`; returns None where no set was searched for.
"""

from llmsys.dataset.manifest import Manifest
from llmsys.dataset.manifest_section import ContaminatedDocument, SetContamination, SparedItem
from llmsys.report.html_markup import (
    Html,
    build_definition_list,
    build_details,
    build_table,
    build_tag,
    format_number,
    format_percent,
    format_user_text,
    join_html,
)
from llmsys.report.report_section import ReportSection, build_report_section


def build_contamination_section(manifest: Manifest) -> ReportSection | None:
    """Return the table of sets, with examples of matches."""
    found = manifest.decontamination
    if found is None:
        return None
    head = (
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
    rows = [
        (
            build_tag("b", name),
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
    examples = [_build_set_examples(name, one) for name, one in found.sets.items() if one.examples]
    spared = [_build_spared_fold(name, one) for name, one in found.sets.items() if one.spared]
    numbers = build_table(head, rows, numeric=range(1, len(head)))
    return build_report_section(
        "contamination",
        "Evaluation sets",
        [],
        numbers,
        build_tag("p", note, class_="muted"),
        *examples,
        *spared,
    )


def _build_spared_fold(name: str, one: SetContamination) -> Html:
    """Return the spared items of a set with the documents that contain them."""
    head = [
        build_tag("b", name),
        build_tag("span", f" {format_number(one.items_spared)} items spared", class_="muted"),
    ]
    rows = [
        (
            item.item,
            item.ngram,
            format_number(item.documents),
            build_tag("span", *_build_document_lines(item)),
        )
        for item in one.spared
    ]
    left = one.items_spared - len(one.spared)
    more = (
        build_tag(
            "p",
            f"{format_number(left)} more items are in the folder decontamination.",
            class_="muted",
        )
        if left
        else None
    )
    columns = ("item", "n-gram", "documents", "first of them")
    return build_details(head, [build_table(columns, rows, numeric=[2]), *([more] if more else [])])


def _build_document_lines(item: SparedItem) -> list[Html]:
    return [build_tag("div", document.url or document.id) for document in item.examples]


def _build_set_examples(name: str, one: SetContamination) -> Html:
    documents = one.documents_dropped + one.documents_cut
    summary = [
        build_tag("b", name),
        build_tag("span", f" in {format_number(documents)} documents", class_="muted"),
    ]
    return build_details(summary, [_build_example(example) for example in one.examples])


def _build_example(found: ContaminatedDocument) -> Html:
    return build_tag(
        "div",
        build_tag(
            "p",
            build_tag(
                "b",
                f"{found.item} ({found.part}), {format_number(found.matches)} matches, "
                f"{found.action}",
            ),
        ),
        build_definition_list([("n-gram", join_html(found.ngram)), ("page", join_html(found.url))]),
        format_user_text(found.excerpt),
        class_="example",
    )
