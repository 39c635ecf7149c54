"""Build the section about the family of a run: the runs that its weights came from, and the runs
that took its weights.

Reads the `branch` events of the run, of its ancestors and of the other run folders in the same
place.

Invariants:
- A run without relatives has no section. An ancestor whose folder is gone is named by its path.
"""

import re
from pathlib import Path

from markupsafe import Markup

from llmsys.events import Event
from llmsys.report import plots
from llmsys.report.html_markup import build_table, format_amount
from llmsys.report.plots import Figure
from llmsys.report.report_section import ReportSection, compute_curves_height
from llmsys.report.run_record import RunRecord, read_run

# Runs that one page draws.
MAX_RUNS = 20
# Folders that are searched for branches.
MAX_FOLDERS = 500

_SOURCE = re.compile(r"^  (?:branch_from|init_from): (?!null$)(.+?)(?:@\d+)?$", re.MULTILINE)
COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.FAINT)


def build_family_section(record: RunRecord) -> ReportSection | None:
    """Build the section of a run's relatives.

    Args:
        record: The run of the page.

    Returns:
        Loss curves over tokens and a table with what every branch changed; None for a run without
        relatives.
    """
    family = _collect_family(record)
    if len(family) == 1 and record.branch is None:
        return None
    traces = []
    for number, member in enumerate(family):
        curves, colour = member.curves, COLOURS[number % len(COLOURS)]
        traces += plots.build_noisy_curve(
            member.name, curves.columns["tokens"], curves.columns["loss"], colour
        )
    caption = (
        "Training loss of the run, of the runs that it took weights from, and of their branches "
        "in its folder."
    )
    layout = plots.build_tokens_layout("nats per token", legend=True)
    figure = Figure(
        "plot-family", "Loss of the family", traces, layout, caption, compute_curves_height(traces)
    )
    head = ("run", "from", "tokens", "data", "moments", "changed")
    table = build_table(head, [_build_row(member) for member in family], numeric=[2])
    return ReportSection("family", "Family", [table], [figure])


def _collect_family(record: RunRecord) -> list[RunRecord]:
    """Return the run, its ancestors, and the branches of all of them next to the run's folder."""
    family = {record.folder.resolve(): record}
    member = record
    while member.branch is not None and len(family) < MAX_RUNS:
        folder = _find_parent(member, member.branch)
        if folder is None or folder in family:
            break
        family[folder] = member = read_run(folder)
    candidates = sorted(record.folder.resolve().parent.glob("*/config.yaml"))[:MAX_FOLDERS]
    is_grown = True
    while is_grown:  # a branch of a branch is found in the next round
        found = [
            path.parent
            for path in candidates
            if path.parent not in family and _find_relative(path, set(family))
        ]
        is_grown = bool(found) and len(family) < MAX_RUNS
        family |= {folder: read_run(folder) for folder in found[: MAX_RUNS - len(family)]}
    return sorted(family.values(), key=lambda one: (_get_tokens(one), one.name))


def _find_parent(member: RunRecord, branch: Event) -> Path | None:
    """Return the folder of the parent: as recorded, else of the same name next to the run."""
    recorded = Path(str(branch.get("run")))
    folders = (recorded, member.folder.parent / recorded.name)
    return next(
        (folder.resolve() for folder in folders if (folder / "events.jsonl").is_file()), None
    )


def _find_relative(config: Path, family: set[Path]) -> Path | None:
    """Return the member of the family that the run of a config.yaml took its weights from."""
    match = _SOURCE.search(config.read_text("utf-8", errors="replace"))
    if match is None:
        return None
    named = Path(match[1].strip("'\""))
    parents = (named.resolve(), config.parent.parent / named.name)
    return next((parent for parent in parents if parent in family), None)


def _get_tokens(member: RunRecord) -> float:
    return 0 if member.branch is None else float(member.branch.get("tokens", 0))


def _build_row(member: RunRecord) -> tuple[str, ...]:
    branch = member.branch
    if branch is None:
        return member.name, "–", "0", "–", "–", "–"
    changes = [*branch.get("changes", ()), *(f"grown: {name}" for name in branch.get("grown", ()))]
    parent = f"{branch.get('run')}@{branch.get('parent_steps')}"
    items = Markup("").join(Markup("<li>{}</li>").format(change) for change in changes)
    listed = Markup("<ul>{}</ul>").format(items) if changes else "nothing"
    tokens = format_amount(_get_tokens(member))
    return (
        member.name,
        parent,
        tokens,
        str(branch.get("data_order")),
        str(branch.get("moments")),
        listed,
    )
