"""The budget of a step is the one that was planned when it was trained."""

import pytest

from llmsys.config.train import TrainConfig


@pytest.mark.parametrize(
    ("step", "tokens"), [(1, 1000), (4, 1000), (5, 700), (9, 700), (10, 800), (None, 800)]
)
def test_a_step_keeps_the_budget_that_it_was_trained_with(step: int | None, tokens: int) -> None:
    budgets = ({"after_step": 4, "tokens": 700}, {"after_step": 9, "tokens": 800})
    train = TrainConfig.model_validate(
        {"tokens": 1000, "fit_minutes": 1, "fitted_budgets": budgets}
    )
    assert train.get_budget(step) == tokens


def test_a_run_without_plans_has_its_tokens() -> None:
    assert TrainConfig(tokens=1000).get_budget(3) == TrainConfig(tokens=1000).get_budget() == 1000
