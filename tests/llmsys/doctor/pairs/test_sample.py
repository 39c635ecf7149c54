"""The sample: every factor with each event and each schedule of stages.

The two defects that no list of cases had are in it; planted again, each fails its own case here.
All cases of the sample are run by `make pairs`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from llmsys.doctor.pairs.case_processes import CaseRunner
from llmsys.doctor.pairs.cases import Limits, PairCase, build_default_assignment
from llmsys.doctor.pairs.check import build_array, write_datasets
from llmsys.doctor.pairs.covering_array import CoveringArray

LIMITS = Limits(processes=4)
NAMES = {"multi_token_prediction": "multi-token prediction"}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CaseRunner:
    root = tmp_path_factory.mktemp("pairs")
    write_datasets(root)
    return CaseRunner(root, LIMITS)


def keep_gathered_weights() -> None:
    """Begin the gradients of a step with the tensors that an evaluation has gathered."""
    from llmsys.engine import engine

    engine.reshard_parameters = lambda model: None  # type: ignore[attr-defined]


def end_all_stages_together() -> None:
    """Count the backward passes of a rank, and say of all its stages that they end with the
    last.
    """
    from llmsys.parallel.fsdp import FsdpModel
    from llmsys.parallel.pipeline import PipelineRunner

    enter = FsdpModel.enter_micro_batch

    @contextmanager
    def enter_all(self: Any, *, last: bool, stage: int | None = None) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self._units_by_stage:
                stack.enter_context(enter(self, last=last, stage=one))
            yield

    @contextmanager
    def enter_backward(self: Any, stage: int, number: int) -> Iterator[None]:
        left = sum(self._backwards_left.values())
        self._backwards_left[stage] -= 1
        with self._enter_backward(stage, left == 1):
            yield

    FsdpModel.enter_micro_batch = enter_all  # type: ignore[method-assign]
    PipelineRunner.enter_backward = enter_backward  # type: ignore[method-assign]


def build_case(**labels: str) -> PairCase:
    chosen = {NAMES.get(name, name.replace("_", " ")): label for name, label in labels.items()}
    return PairCase(tuple((build_default_assignment() | chosen).items()), 1)


@pytest.mark.distributed
def test_a_step_after_an_evaluation_is_plain_in_bitwise_mode(runner: CaseRunner) -> None:
    assert runner.run_case(build_case(reproducibility="bitwise", evaluate="yes")).problem == ""


@pytest.mark.distributed
def test_every_stage_of_an_interleaved_pipeline_with_replicas_is_trained(
    runner: CaseRunner,
) -> None:
    case = build_case(pipeline="2", replicate="2", schedule_of_stages="interleaved")
    assert runner.run_case(case).problem == ""


@pytest.mark.distributed
@pytest.mark.parametrize("reproducibility", ["fast", "bitwise"])
def test_prediction_modules_take_their_weights_from_no_evaluation(
    runner: CaseRunner, reproducibility: str
) -> None:
    """Modules with experts of several ranks were prefetched by an evaluation that does not run
    them: the next step had the average of their weights.
    """
    labels = {
        "multi_token_prediction": "one",
        "experts": "every second",
        "shard": "2",
        "expert_axis": "2",
        "ema": "on",
        "evaluate": "yes",
        "reproducibility": reproducibility,
    }
    assert runner.run_case(build_case(**labels)).problem == ""


@pytest.mark.distributed
@pytest.mark.parametrize(("plant", "labels", "named"), [
    (keep_gathered_weights, {"reproducibility": "bitwise", "evaluate": "yes"},
        "LlmsysError: train.reproducibility=bitwise: 3 parameters"),
    (
        end_all_stages_together,
        {"pipeline": "2", "replicate": "2", "schedule_of_stages": "interleaved"},
        "LlmsysError: step 1: parameters without a gradient",
    ),
])  # fmt: skip
def test_a_defect_that_no_list_had_fails_its_pair_when_it_is_planted(
    plant: Callable[[], None], labels: dict[str, str], named: str, runner: CaseRunner
) -> None:
    planted = CaseRunner(runner.root, LIMITS, prepare=plant)
    assert planted.run_case(build_case(**labels)).problem.startswith(named)


@pytest.fixture(scope="module")
def sample() -> CoveringArray:
    return build_array(1, LIMITS, is_sample=True)


@pytest.mark.parametrize("labels", [
    {"reproducibility": "bitwise", "evaluate": "yes"},
    {"schedule of stages": "interleaved", "replicate": "2"},
])  # fmt: skip
def test_the_sample_has_the_pairs_of_the_defects_that_no_list_had(
    labels: dict[str, str], sample: CoveringArray
) -> None:
    assert any(labels.items() <= case.items() for case in sample.cases)
