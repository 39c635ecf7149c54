"""Cases with dropout agree, and one that drops elsewhere or otherwise does not."""

from collections.abc import Callable

import pytest

from llmsys.doctor.pairs.case_processes import CaseRunner
from llmsys.doctor.pairs.cases import Limits, PairCase, build_default_assignment
from llmsys.doctor.pairs.check import write_datasets

LIMITS = Limits(processes=4)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CaseRunner:
    root = tmp_path_factory.mktemp("pairs")
    write_datasets(root)
    return CaseRunner(root, LIMITS)


def build_case(**labels: str) -> PairCase:
    chosen = {name.replace("_", " "): label for name, label in labels.items()}
    return PairCase(tuple((build_default_assignment() | chosen).items()), 1)


@pytest.mark.distributed
@pytest.mark.parametrize("labels", [
    {"dropout": "in blocks", "tensor": "2", "recomputation": "full", "evaluate": "yes"},
    {"dropout": "between blocks", "pipeline": "2", "experts": "all"},
])  # fmt: skip
def test_dropout_agrees_with_the_plain_process(runner: CaseRunner, labels: dict[str, str]) -> None:
    assert runner.run_case(build_case(**labels)).problem == ""


def drop_in_evaluations() -> None:
    from llmsys.model import layer_stack
    from llmsys.model.dropout import apply_dropout

    vars(layer_stack)["apply_dropout"] = lambda x, p, training: apply_dropout(x, p, True)


def drop_no_branch() -> None:
    from llmsys.model import transformer_block

    vars(transformer_block)["apply_dropout"] = lambda x, p, training: x


def drop_the_inner_channels_twice() -> None:
    from llmsys.model import feed_forward
    from llmsys.model.dropout import apply_dropout

    vars(feed_forward)["apply_dropout"] = lambda x, p, training: apply_dropout(
        apply_dropout(x, p, training), p, training
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("bug", "labels", "problem"),
    [
        (drop_in_evaluations, {"dropout": "between blocks"}, "evaluate step 9: the loss"),
        (drop_no_branch, {"dropout": "between blocks"}, "train step 1: the loss"),
        (drop_the_inner_channels_twice, {"dropout": "in blocks"}, "train step 1: the loss"),
    ],
)
def test_dropout_at_another_place_fails_its_case(
    runner: CaseRunner, bug: Callable[[], None], labels: dict[str, str], problem: str
) -> None:
    spoiled = CaseRunner(runner.root, LIMITS, prepare=bug)
    assert spoiled.run_case(build_case(**labels)).problem.startswith(problem)
