"""Train transformers' Llama or Mixtral by its Trainer.

    python -m tools.bench.race.hugging_face SPEC

Reads rows of `rows.py` and the spec, a JSON object; writes the result. Imports nothing of llmsys.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from tools.bench.race.judge import EvaluationSteps, Judge, write_result


class Rows(Dataset[dict[str, Any]]):
    """Training rows, each with its own ids as labels, which the model shifts."""

    def __init__(self, rows: Any) -> None:
        self._rows = torch.from_numpy(rows.astype(np.int64))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return one row."""
        return {"input_ids": self._rows[number], "labels": self._rows[number]}


class OrderedTrainer(Trainer):
    """The Trainer, without a shuffle of its own: rows are in a random order already."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)


def build_model(spec: dict[str, Any]) -> Any:
    """Return a new model of the shapes of a spec; Mixtral where it has experts."""
    shape = dict(spec["shape"])
    fields = shape | {"tie_word_embeddings": True, "max_position_embeddings": 1024}
    fields |= {"attn_implementation": "sdpa", "use_cache": False}
    fields |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if "num_local_experts" in shape:
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))


def train(spec: dict[str, Any]) -> None:
    """Train to the target or the end of the budget, and write the result."""
    judge = Judge(Path(spec["rows"]), spec["target"])
    with np.load(spec["rows"]) as file:
        rows = file["train"]
    transformers.set_seed(spec["seed"])
    model = build_model(spec)
    sequences, length = spec["sequences"], rows.shape[1] - 1
    looks = EvaluationSteps(spec["steps"], spec["look_every"], spec["look_first"])

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            if looks.is_due(step):
                model.eval()
                is_reached = judge.look(
                    lambda ids_BT: model(input_ids=ids_BT).logits,
                    step * sequences * length,
                    is_last=step == spec["steps"],
                )
                model.train()
                # The Trainer has set it at the last step.
                control.should_training_stop |= is_reached

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            per_device_train_batch_size=sequences, max_steps=spec["steps"], seed=spec["seed"],
            learning_rate=spec["learning_rate"], lr_scheduler_type="cosine",
            warmup_steps=spec["warmup"], weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0,
            logging_steps=20,
        )  # fmt: skip
        trainer = OrderedTrainer(
            model=model, args=arguments, train_dataset=Rows(rows), callbacks=[Look()]
        )
        trainer.train()
    write_result(Path(spec["result"]), spec, judge, model.num_parameters())


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
