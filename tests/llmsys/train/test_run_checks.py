"""Ranks with another version, another source or another config are named before anything is
built.
"""

from typing import Any

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.errors import LaunchError
from llmsys.train import run_checks as module
from llmsys.train.run_checks import collect_rank_facts, format_disagreement, require_rank_agreement
from tests.helpers.ranks import run_ranks


def test_every_rank_that_differs_is_named_with_its_host_and_what_differs() -> None:
    one, other = (
        load_run_config("train/demo"),
        load_run_config("train/demo", ["optimizer.learning_rate=3e-4", "train.precision=fp32"]),
    )
    newer = collect_rank_facts(one) | {"torch": "9.9.0"}
    said = format_disagreement(
        [("alpha", collect_rank_facts(one)), ("alpha", collect_rank_facts(other)), ("beta", newer)],
        [config.model_dump(mode="json") for config in (one, other, one)],
    )
    rate = one.optimizer.learning_rate
    assert (
        f"rank 1 on alpha has optimizer.learning_rate 0.0003 (rank 0 on alpha: {rate}); "
        "train.precision fp32"
    ) in said
    assert (
        f"rank 2 on beta has torch 9.9.0 (rank 0 on alpha: {collect_rank_facts(one)['torch']})"
        in said
    )
    assert said.endswith(
        "Install the same versions on every host, and start every rank with the same arguments."
    )


def start(rank: int, what: str) -> Any:
    """What starting ends with on this rank; rank 1 differs in `what`."""
    words = ["run.seed=1"] if (rank, what) == (1, "config") else []
    if (rank, what) == (1, "source"):
        module._hash_source = lambda: "0" * 16
    try:
        require_rank_agreement(load_run_config("train/demo", words))
    except LaunchError as error:
        return str(error)
    except SystemExit as leaving:
        return leaving.code
    return "agreed"


def start_run(rank: int) -> list[Any]:
    return [start(rank, what) for what in ("nothing", "config", "source")]


@pytest.mark.distributed
def test_one_rank_speaks_and_none_goes_on() -> None:
    first, second = run_ranks(start_run, 2)
    assert [first[0], second[0]] == ["agreed", "agreed"]
    assert "has run.seed 1 (rank 0 on" in first[1]
    assert "has the source of llmsys 0000000000000000 (rank 0 on" in first[2]
    assert second[1:] == [2, 2]
