"""The interface of lm_eval 0.4 that llmsys calls, over task files of the kinds in harness_tasks.py,
in few lines.

Stands in for the package where it is not installed: what is llmsys' own (tokens around a text,
cuts, batches over ranks, greedy answers, names and counts of scores, messages) is then tested
without it. `test_the_stand_in_scores_as_the_package` holds it against the package where that is
installed.
"""

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest
import yaml


@dataclass
class Instance:
    args: tuple[Any, ...]


@dataclass
class Task:
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    seed: int = 0
    asked: list[Instance] = field(default_factory=list)

    def get_config(self, key: str) -> Any:
        return self.config.get(key)

    def set_config(self, key: str, value: Any) -> None:
        self.config[key] = value

    def set_fewshot_seed(self, seed: int) -> None:
        self.seed = seed

    def render(self, key: str, row: dict[str, Any]) -> str:
        return (
            jinja2.Environment(keep_trailing_newline=True)
            .from_string(self.config[key])
            .render(**row)
        )

    def build_requests(self, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        match self.config["output_type"]:
            case "multiple_choice":
                return [
                    (self.render("doc_to_text", row), " " + one)
                    for row in rows
                    for one in row["choices"]
                ]
            case "loglikelihood_rolling":
                return [(self.render("doc_to_target", row),) for row in rows]
            case kind:
                assert kind == "generate_until"
                return [
                    (self.render("doc_to_text", row), dict(self.config["generation_kwargs"]))
                    for row in rows
                ]

    def compute_metrics(self, rows: list[dict[str, Any]], found: list[Any]) -> dict[str, float]:
        match self.config["output_type"]:
            case "multiple_choice":
                return self._compute_accuracies(rows, [nats for nats, _ in found])
            case "loglikelihood_rolling":
                texts = [self.render("doc_to_target", row) for row in rows]
                words = sum(len(text.split()) for text in texts)
                size = sum(len(text.encode()) for text in texts)
                return {
                    "word_perplexity": math.exp(-sum(found) / words),
                    "byte_perplexity": math.exp(-sum(found) / size),
                    "bits_per_byte": -sum(found) / size / math.log(2),
                }
            case _:
                right = [
                    text == self.render("doc_to_target", row)
                    for row, text in zip(rows, found, strict=True)
                ]
                return {"exact_match": sum(right) / len(right)}

    @staticmethod
    def _compute_accuracies(rows: list[dict[str, Any]], nats: list[float]) -> dict[str, float]:
        plain, by_length, at = [], [], 0
        for row in rows:
            own = nats[at : at + len(row["choices"])]
            at += len(own)
            shares = [one / len(choice) for one, choice in zip(own, row["choices"], strict=True)]
            plain.append(own.index(max(own)) == row["answer"])
            by_length.append(shares.index(max(shares)) == row["answer"])
        return {"acc": sum(plain) / len(rows), "acc_norm": sum(by_length) / len(rows)}


class TaskManager:
    def __init__(self, include_path: str | None = None, include_defaults: bool = True) -> None:
        files = [] if include_path is None else sorted(Path(include_path).glob("*.yaml"))
        configs = [yaml.safe_load(file.read_text()) for file in files]
        self.configs = {
            one["task"] if isinstance(one["task"], str) else one["group"]: one for one in configs
        }
        self.all_tasks = list(self.configs)

    def load(self, names: list[str]) -> dict[str, Any]:
        tasks: dict[str, Task] = {}
        groups: dict[str, list[str]] = {}
        for name in names:
            config = self.configs[name]
            if isinstance(config["task"], list):
                groups[name] = config["task"]
                tasks |= self.load(config["task"])["tasks"]
                continue
            lines = Path(config["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
            tasks[name] = Task(dict(config), [json.loads(line) for line in lines])
        return {"tasks": tasks, "groups": groups}


def evaluate(
    lm: Any, loaded: dict[str, Any], limit: int | None = None, **options: Any
) -> dict[str, Any]:
    assert options["log_samples"] is False
    assert options["bootstrap_iters"] == 0
    results: dict[str, dict[str, Any]] = {}
    samples = {}
    for name, task in loaded["tasks"].items():
        rows = task.rows[:limit]
        kind = task.config["output_type"]
        method = "loglikelihood" if kind == "multiple_choice" else kind
        requests = [Instance(args) for args in task.build_requests(rows)]
        metrics = task.compute_metrics(rows, getattr(lm, method)(requests))
        results[name] = {"alias": name} | {f"{key},none": value for key, value in metrics.items()}
        results[name] |= {f"{key}_stderr,none": "N/A" for key in metrics}
        samples[name] = {"original": len(task.rows), "effective": len(rows)}
    for name in loaded["groups"]:
        results[name] = {"alias": name}
    return {"results": results, "n-samples": samples, "group_subtasks": loaded["groups"]}


def normalize_gen_kwargs(given: dict[str, Any], default_max_gen_toks: int) -> dict[str, Any]:
    until = given.get("until", [])
    tokens = given.get("max_gen_toks", default_max_gen_toks)
    return given | {"until": until if isinstance(until, list) else [until], "max_gen_toks": tokens}


def handle_stop_sequences(until: list[str], eos: str | None) -> list[str]:
    return until if eos is None or eos in until else [*until, eos]


def install_stand_in(patch: pytest.MonkeyPatch) -> None:
    """Give `import lm_eval` this module until the patch is undone."""
    names: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.evaluator": {"evaluate": evaluate},
        "lm_eval.models": {},
        "lm_eval.models.utils": {
            "normalize_gen_kwargs": normalize_gen_kwargs,
            "handle_stop_sequences": handle_stop_sequences
        },
    }  # fmt: skip
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
