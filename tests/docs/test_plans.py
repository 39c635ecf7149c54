"""Plans of large clusters on the pages: the rows that a page shows are those that the program
prints.

A whole search takes 5 to 20 s of CPU time, so only the shown layouts are searched here. A layout
that has become faster than the shown ones is not noticed; `python -m tests.helpers.refresh_pages`
searches all.
"""

import re

import pytest

from llmsys.estimate.plan import layout_search
from llmsys.estimate.plan.candidate_enumeration import iter_candidates
from llmsys.launch.main import main
from tests.docs.test_commands import PAGES, is_exact, list_page_commands

PLANS = [command for path in PAGES for command in list_page_commands(path)
         if command.words[:2] == ["llmsys",
             "plan"] and command.output and not is_exact(command.words[1:])]  # fmt: skip


def parse_axes(row: str) -> tuple[str, ...]:
    """Return the engine and the axes of a layout; a search chooses the schedule, the micro-batch
    and the policy.
    """
    engine, *words = row.partition(" micro=")[0].split()
    return (engine, *(word for word in words if "=" in word))


@pytest.mark.parametrize("command", PLANS, ids=lambda command: command.words[2])
def test_shown_layouts_have_the_time_and_memory_that_a_plan_prints(
    command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line for line in command.output if re.search(r" micro=\d+ \w+ +\d", line)]
    changes = [line for line in command.output if re.match(r"  \S+ +(time|memory): ", line)]
    wanted = {parse_axes(row) for row in rows}
    monkeypatch.setattr(
        layout_search, "iter_candidates",
        lambda *arguments: (
            one
            for one in iter_candidates(*arguments)
            if parse_axes(one.format_layout()) in wanted
        ),
    )  # fmt: skip
    assert main([*command.words[1:], "--top", "1000"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(rows) >= 2
    for line in [*rows, *changes]:
        assert line.split() in printed, (
            f"{command.place}: run python -m tests.helpers.refresh_pages"
        )


def test_the_pages_have_plans_of_large_clusters() -> None:
    assert len(PLANS) >= 2
