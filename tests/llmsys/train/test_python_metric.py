"""A metric of the user's own code: its mean over held-out targets, and the refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmsys.config.evaluation import EvaluationConfig, PythonMetricConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.errors import ConfigError
from llmsys.launch.commands.templates.metric import TopK
from llmsys.train.evaluator import TargetEvaluation, TargetEvaluator
from llmsys.train.heldout_evaluator import combine_results
from llmsys.train.python_metric import (
    MetricValue,
    PythonMetric,
    check_python_metric,
    load_python_metrics,
)
from tests.helpers.paths import ROOT

TEMPLATE = ROOT / "launch/commands/templates/metric.py"
ROWS, LENGTH, VOCABULARY = 5, 4, 9
draws = torch.Generator().manual_seed(1)
LOGITS = torch.randn(ROWS, LENGTH, VOCABULARY, generator=draws)
TARGETS = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=draws)
TARGETS[1, 2:] = IGNORED
TARGETS[3] = IGNORED


class Held:
    num_rows = ROWS

    def get_batch(self, first: int, count: int) -> Batch:
        rows = torch.arange(first, first + count)
        targets = torch.where(rows[:, None] < ROWS, TARGETS[rows.clamp(max=ROWS - 1)], IGNORED)
        return Batch(rows[:, None].expand(-1, LENGTH).clamp(max=ROWS - 1), targets)


def compute_logits(batch: Batch) -> Tensor:
    return LOGITS[batch.tokens_BT[:, 0]]


@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_it_is_the_mean_over_valid_targets_for_any_batch(sequences: int) -> None:
    metrics = load_python_metrics(
        [PythonMetricConfig(path=f"{TEMPLATE}:TopK", options={"k": 3}, name="top 3")], 64
    )
    found = TargetEvaluator(Held(), sequences=sequences, metrics=metrics).evaluate(
        compute_logits, torch.device("cpu")
    )
    hits = [
        int(TARGETS[row, at])
        in sorted(range(VOCABULARY), key=lambda one, r=row, t=at: -LOGITS[r, t, one])[:3]
        for row in range(ROWS)
        for at in range(LENGTH)
        if TARGETS[row, at] != IGNORED
    ]
    assert found.evaluated_targets == len(hits)
    shown = found.to_dict()["metrics"]["top 3"]
    assert shown["value"] == pytest.approx(sum(hits) / len(hits))
    assert shown["code"] == metrics[0].digest
    plain = TargetEvaluator(Held()).evaluate(compute_logits, torch.device("cpu")).to_dict()
    assert "metrics" not in plain


def test_sources_of_a_mixture_count_by_their_targets() -> None:
    parts = [
        TargetEvaluation(1, 1, 0, targets, {"own": MetricValue(value, "c")})
        for targets, value in ((3, 1.0), (1, 5.0))
    ]
    assert combine_results(parts).metrics == {"own": MetricValue(2.0, "c")}


class _Changed(PythonMetric):
    body: str

    def compute(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        found: Tensor = eval(self.body, {"l": logits_NV, "t": targets_N, "torch": torch})
        return found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("l.mean()", r"returned \(\) for 6 targets. Return a tensor with a number of each target"),
        ("1.0", "returned float for 6 targets"),
        ("l[:, 0] - l[:, 0].mean()", "the metric would depend on the batch"),
        ("l[:, 0] / 0", "which is not finite"),
        ("l.mul_(0)[:, 0]", "changed the logits"),
        ("l[:, 99]", r"failed on logits of \(6, 64\): IndexError"),
    ],
)
def test_the_kit_names_each_fault(body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_python_metric(_Changed(body=body))
    check_python_metric(TopK())


def test_a_metric_is_tested_with_the_classes_of_the_model(tmp_path: Path) -> None:
    config = PythonMetricConfig(path=f"{TEMPLATE}:TopK", options={"k": 100})
    assert len(load_python_metrics([config], 128)) == 1
    with pytest.raises(ConfigError, match="out of range"):
        load_python_metrics([config], 64)


def test_two_metrics_of_one_name_are_refused(tmp_path: Path) -> None:
    one = {"kind": "python", "path": "a.py:Own"}
    with pytest.raises(ValueError, match="two entries have the name own"):
        EvaluationConfig.model_validate({"metrics": [one, one]})
