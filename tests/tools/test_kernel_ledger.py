"""The ledger of kernels in the measurements is what its tool prints, and its steps lead towards the
goal.
"""

from pathlib import Path

from llmsys.estimate.device_profile import load_device_profile
from tools.bench.kernel_ledger import (
    BEGIN,
    DENSE,
    END,
    MIXTURE,
    estimate_ideal_step,
    iter_ledger_lines,
)


def test_the_page_has_the_ledger_that_the_tool_prints(repository: Path) -> None:
    text = (repository / "docs" / "measurements" / "dryrun.md").read_text(encoding="utf-8")
    section = text.partition(BEGIN)[2].partition(END)[0]
    assert section.strip() == "\n".join(iter_ledger_lines()).strip()


def test_first_principles_give_47_and_25_percent_and_every_step_is_nearer_to_the_goal() -> None:
    device = load_device_profile("h100-sxm")
    for run, least in ((DENSE, 0.47), (MIXTURE, 0.25)):
        step, _ = estimate_ideal_step(run, (), device)
        assert least <= step.mfu * step.factor < run.goal
        overrides: tuple[str, ...] = ()
        rates, faster = [], device
        for one in run.steps:
            overrides, faster = (*overrides, *one.overrides), one.change_device(faster)
            rates.append(estimate_ideal_step(run, overrides, faster)[0].mfu)
        assert rates == sorted(rates)
