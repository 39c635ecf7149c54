"""Bits per byte of a trained run on every held-out set."""

from collections.abc import Mapping
from pathlib import Path

from llmsys.ablation.record import Score
from llmsys.config.run import RunConfig


def evaluate_run(config: RunConfig, folders: Mapping[str, Path]) -> dict[str, Score]:
    """Evaluate the newest checkpoint of a run, in this process, as `llmsys evaluate` does.

    Args:
        config: The run.
        folders: Dataset folder by held-out set.

    Returns:
        Score by held-out set.

    Raises:
        CheckpointError: The run has no checkpoint.
        DataError: A set is missing or damaged.
    """
    # torch, which an ablation whose runs are all scored does not need
    from llmsys.train.build_objective import build_evaluator
    from llmsys.train.build_trainer import set_num_threads
    from llmsys.train.trained_model import build_logits_function, load_trained_model

    set_num_threads(config)
    model, _ = load_trained_model(config)
    device = next(model.parameters()).device
    compute_logits = build_logits_function(model)
    # Questions are the same whatever the set.
    evaluation = config.evaluation.model_copy(update={"tasks": (), "metrics": ()})
    scores = {}
    for name, folder in folders.items():
        data = config.data.model_copy(update={"folder": folder})
        own = config.model_copy(update={"data": data, "evaluation": evaluation})
        found = build_evaluator(own).evaluate(compute_logits, device).to_dict()
        scores[name] = Score(**{key: found[key] for key in Score.model_fields})
    return scores
