"""Scores of lm-evaluation-harness: those of its backend for transformers on the exported model, on any ranks."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmsys.config.harness import HarnessConfig
from llmsys.config.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.errors import ConfigError, DataError
from llmsys.train.evaluator import ALONE
from llmsys.train.harness_evaluator import HarnessEvaluator, load_harness_tasks
from llmsys.train.trained_model import build_logits_function, load_trained_model
from tests.helpers.harness_tasks import TASKS, write_harness_tasks
from tests.helpers.json_tokenizers import write
from tests.helpers.ranks import run_ranks

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="lm_eval is optional")

WORDS = ["the", "lazy", "dog", "jumps", "over", "quick", "foxes;", "it's", "box.", "7th"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers with random weights and a tokenizer, and the tasks."""
    import transformers

    folder = tmp_path_factory.mktemp("harness")
    torch.manual_seed(0)
    (folder / "hub").mkdir()
    library = write("llama3", folder / "hub")
    config = transformers.LlamaConfig(
        vocab_size=library.get_vocab_size() + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "hub")
    write_harness_tasks(folder, WORDS)
    convert_from_hugging_face(folder / "hub", folder / "run")
    return folder


def build_run_config(folder: Path) -> RunConfig:
    return load_run_config(
        str(folder / "run" / "config.yaml"), ["train.precision=fp32", "evaluation.micro_sequences=3"]
    )


def build_asked(folder: Path, **changes: Any) -> HarnessConfig:
    return HarnessConfig.model_validate({"tasks": TASKS.keys(), "include_path": folder, **changes})


def evaluate(folder: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    config = build_run_config(folder)
    model, _ = load_trained_model(config)
    evaluator = HarnessEvaluator(build_asked(folder, **changes), config, ALONE)
    found = evaluator.evaluate(build_logits_function(model), torch.device("cpu"))
    return {name: one.to_dict() for name, one in found.items()}


def evaluate_on_ranks(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    return evaluate(folder)


@needs_harness
def test_scores_are_those_of_the_harness_on_the_exported_model(exported: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported / "hub"), "dtype": "float32"},
        tasks=list(TASKS),
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(exported), include_defaults=False),
    )["results"]
    found = evaluate(exported)
    assert found.keys() == set(TASKS)
    for task, values in found.items():
        assert values["questions"] == 12
        for metric in values.keys() - {"questions"}:
            theirs = expected[task][f"{metric},none"]
            is_count = metric in ("acc", "acc_norm", "exact_match")
            assert values[metric] == (theirs if is_count else pytest.approx(theirs, rel=1e-5)), (task, metric)
    assert 0 < found["toy_choices"]["acc"] < 1
    assert run_ranks(evaluate_on_ranks, 2, exported)[0] == found


@needs_harness
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["toy_nowhere"]}, "toy_nowhere cannot be loaded without the internet .*dataset_path"),
        ({"tasks": ["toy_unknown"]}, "the harness knows no task toy_unknown"),
        ({"tasks": ["toy_sampled"]}, "toy_sampled samples its answers"),
        ({"include_path": "nowhere"}, "include_path=.*nowhere is no folder"),
    ],
)
def test_a_task_that_cannot_be_scored_is_named_before_training(
    changes: dict[str, Any], message: str, exported: Path
) -> None:
    files = {"toy_nowhere": {"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}},
             "toy_sampled": {"generation_kwargs": {"do_sample": True, "temperature": 1.0}}}  # fmt: skip
    for name, values in files.items():
        task = yaml.safe_load((exported / "toy_answer.yaml").read_text()) | {"task": name} | values
        (exported / f"{name}.yaml").write_text(yaml.safe_dump(task))
    try:
        with pytest.raises(DataError, match=message):
            load_harness_tasks(build_asked(exported, **changes))
    finally:
        for name in files:
            (exported / f"{name}.yaml").unlink()


@pytest.mark.skipif(HAS_HARNESS, reason="lm_eval is installed")
def test_without_the_package_the_way_to_install_it_is_named() -> None:
    with pytest.raises(ConfigError, match=r"needs the package lm_eval.*pip install 'llmsys\[harness\]'"):
        load_harness_tasks(HarnessConfig(tasks=("hellaswag",)))
