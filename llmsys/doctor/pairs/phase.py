"""A phase of a case: what one group of processes runs."""

from dataclasses import dataclass

from llmsys.config.run import RunConfig


@dataclass(frozen=True)
class Phase:
    """The part of a case that one group of processes runs, up to an end, a stop or a kill.

    Attributes:
        number: index among the phases of the case.
        config: config of the run.
        ranks: number of processes.
        fired: events that have happened before.
        run: 0, or 1 for the branch.
    """

    number: int
    config: RunConfig
    ranks: int
    fired: frozenset[str] = frozenset()
    run: int = 0
