"""What the page says about evaluation sets: how much of each stood in the documents, and where.

Reads a `Manifest`, gives a `Part`, or nothing when no set was looked for.
"""

from llmsys.manifest import Contaminated, ContaminationOfSet, Manifest
from llmsys.report.markup import Html, definitions, fold, join, number, percent, table, tag, user_text
from llmsys.report.run_sections import Part, part
from llmsys.spared_item import SparedItem


def contamination_part(manifest: Manifest) -> Part | None:
    """The table of sets, with examples of what was found."""
    found = manifest.decontamination
    if found is None:
        return None
    head = ("set", "items", "found", "share", "documents dropped", "documents cut", "spared", "n-grams", "too short")
    rows = [
        (
            tag("b", name),
            number(one.items),
            number(one.items_found),
            percent(one.items_found, one.items),
            number(one.documents_dropped),
            number(one.documents_cut),
            number(one.items_spared),
            number(one.ngrams),
            number(one.too_short),
        )
        for name, one in found.sets.items()
    ]
    note = (
        f"{number(found.exempt_ngrams)} n-grams stood in so many documents that they decided nothing "
        f"(data.decontaminate.max_documents); an item that stays in a document for that reason is spared. "
        f"The folder decontamination has a line for each document and item."
    )
    examples = [_examples(name, one) for name, one in found.sets.items() if one.examples]
    spared = [_build_spared_fold(name, one) for name, one in found.sets.items() if one.spared]
    numbers = table(head, rows, numeric=range(1, len(head)))
    return part("contamination", "Evaluation sets", [], numbers, tag("p", note, class_="muted"), *examples, *spared)


def _build_spared_fold(name: str, one: ContaminationOfSet) -> Html:
    """Return the spared items of a set with the documents that keep them."""
    head = [tag("b", name), tag("span", f" {number(one.items_spared)} items spared", class_="muted")]
    rows = [
        (item.item, item.ngram, number(item.documents), tag("span", *_build_document_lines(item)))
        for item in one.spared
    ]
    left = one.items_spared - len(one.spared)
    more = tag("p", f"{number(left)} more items are in the folder decontamination.", class_="muted") if left else None
    columns = ("item", "n-gram", "documents", "first of them")
    return fold(head, [table(columns, rows, numeric=[2]), *([more] if more else [])])


def _build_document_lines(item: SparedItem) -> list[Html]:
    return [tag("div", document.url or document.id) for document in item.examples]


def _examples(name: str, one: ContaminationOfSet) -> Html:
    documents = one.documents_dropped + one.documents_cut
    summary = [tag("b", name), tag("span", f" in {number(documents)} documents", class_="muted")]
    return fold(summary, [_example(example) for example in one.examples])


def _example(found: Contaminated) -> Html:
    return tag(
        "div",
        tag("p", tag("b", f"{found.item} ({found.part}), {number(found.matches)} matches, {found.action}")),
        definitions([("n-gram", join(found.ngram)), ("page", join(found.url))]),
        user_text(found.excerpt),
        class_="example",
    )
