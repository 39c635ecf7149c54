"""What the page says about evaluation sets: how much of each stood in the documents, and where.

Reads a `Manifest`, gives a `Part`, or nothing when no set was looked for.
"""

from llmsys.manifest import Contaminated, ContaminationOfSet, Manifest
from llmsys.report.markup import Html, definitions, fold, join, number, percent, table, tag, user_text
from llmsys.report.run_sections import Part, part


def contamination_part(manifest: Manifest) -> Part | None:
    """The table of sets, with examples of what was found."""
    found = manifest.decontamination
    if found is None:
        return None
    head = ("set", "items", "found", "share", "documents dropped", "documents cut", "n-grams", "too short")
    rows = [
        (
            tag("b", name),
            number(one.items),
            number(one.items_found),
            percent(one.items_found, one.items),
            number(one.documents_dropped),
            number(one.documents_cut),
            number(one.ngrams),
            number(one.too_short),
        )
        for name, one in found.sets.items()
    ]
    note = (
        f"{number(found.exempt_ngrams)} n-grams stood in so many documents that they decided nothing. "
        f"The folder decontamination has a line for each document and item."
    )
    examples = [_examples(name, one) for name, one in found.sets.items() if one.examples]
    numbers = table(head, rows, numeric=range(1, len(head)))
    return part("contamination", "Evaluation sets", [], numbers, tag("p", note, class_="muted"), *examples)


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
