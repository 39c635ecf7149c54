"""The sample of continuous integration: every factor with each event and each schedule of stages.

The two defects that no list of cases had are in it; planted again, each fails a case of its own
here.
"""

import pytest

from llmsys.doctor.pairs.case_processes import CaseRunner
from llmsys.doctor.pairs.cases import Limits, PairCase, build_default_assignment
from llmsys.doctor.pairs.check import PairsCheck, build_array, write_datasets
from llmsys.doctor.pairs.covering_array import CoveringArray

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
def test_a_step_after_an_evaluation_is_plain_in_bitwise_mode(runner: CaseRunner) -> None:
    assert runner.run_case(build_case(reproducibility="bitwise", evaluate="yes")).problem == ""


@pytest.mark.distributed
def test_every_stage_of_an_interleaved_pipeline_with_replicas_is_trained(
    runner: CaseRunner,
) -> None:
    case = build_case(pipeline="2", replicate="2", schedule_of_stages="interleaved")
    assert runner.run_case(case).problem == ""


@pytest.fixture(scope="module")
def sample() -> CoveringArray:
    return build_array(1, LIMITS, is_sample=True)


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_every_case_of_the_sample_agrees_with_the_plain_process(sample: CoveringArray) -> None:
    report = PairsCheck(LIMITS).run_array(sample, seed=1)
    assert [f"{one.case.title}: {one.problem}" for one in report.failures] == []
    assert report.has_passed


@pytest.mark.parametrize("labels", [
    {"reproducibility": "bitwise", "evaluate": "yes"},
    {"schedule of stages": "interleaved", "replicate": "2"},
])  # fmt: skip
def test_the_sample_has_the_pairs_of_the_defects_that_no_list_had(
    labels: dict[str, str], sample: CoveringArray
) -> None:
    assert any(labels.items() <= case.items() for case in sample.cases)
