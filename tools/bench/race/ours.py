"""Train by llmsys: a run as `llmsys train` starts it on one process, with the judge as evaluator.

    python -m tools.bench.race.ours SPEC

Reads the dataset, rows of `rows.py` for the judge, and the spec, a JSON object; writes the result.
The run reads its windows itself. Its folder is a temporary one: a run that resumed another would
lack the CPU seconds of the other.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from llmsys.config.loading.load import load_run_config
from llmsys.data.batch import Batch
from llmsys.errors import StopRequested
from llmsys.log import configure_logging
from llmsys.parallel.process_group import get_local_device, init_process_group
from llmsys.train.auto_data_parallel import resolve_data_parallel
from llmsys.train.build_trainer import build_trainer, check_config, set_num_threads
from llmsys.train.evaluator import LogitsFunction
from llmsys.train.precision import resolve_compile, resolve_precision, set_matmul_numerics
from llmsys.train.remote_run import lock_run
from llmsys.train.trainer import Trainer
from tools.bench.race.judge import EvaluationSteps, Judge, write_result


class Judged:
    """The result of a look, for the log of the run."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def to_dict(self) -> dict[str, Any]:
        """Return bits per byte, if there was a look."""
        looks = self._judge.evaluations
        return {"bits_per_byte": looks[-1].bits_per_byte} if looks else {}


class JudgingEvaluator:
    """An evaluator that asks the judge where a look is due."""

    def __init__(self, judge: Judge, looks: EvaluationSteps) -> None:
        self._judge = judge
        self._looks = looks
        self.trainer: Trainer | None = None

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> Judged:
        """Look at the model of the trainer, unless this step is none to look at."""
        assert self.trainer is not None
        step = self.trainer.steps_done

        def compute(ids_BT: torch.Tensor) -> torch.Tensor:
            logits = compute_logits(Batch(ids_BT, ids_BT))
            assert logits is not None
            return logits.view(*ids_BT.shape, -1)

        if self._looks.is_due(step):
            tokens = self.trainer.tokens_done
            if self._judge.look(compute, tokens, is_last=step == self._looks.steps):
                raise StopRequested("the target is reached")
        return Judged(self._judge)


def train(spec: dict[str, Any]) -> None:
    """Train to the target or the end of the budget, and write the result."""
    configure_logging()
    judge = Judge(Path(spec["rows"]), spec["target"])
    # As launch/train.py and train_run do, but for the evaluator.
    with init_process_group(600), contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=Path(spec["result"]).parent))
        config = load_run_config(spec["config"], [*spec["words"], f"run.folder={folder}/run"])
        check_config(config, 1)
        stack.enter_context(lock_run(config.run.folder, 30))
        config = resolve_compile(resolve_precision(config))
        config = resolve_data_parallel(config, get_local_device())
        set_num_threads(config)
        set_matmul_numerics()
        trainer = build_trainer(config, stack, lambda *_: [])
        steps = config.num_steps
        every = max(1, steps // spec["looks"])
        looks = EvaluationSteps(steps, every, round(steps * spec["look_share"]))
        evaluator = JudgingEvaluator(judge, looks)
        evaluator.trainer = trainer
        trainer.evaluation.evaluator = evaluator
        with contextlib.suppress(StopRequested):
            trainer.train()
        parameters = sum(one.numel() for one in trainer.engine.module.parameters())
    write_result(Path(spec["result"]), spec, judge, parameters)


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
