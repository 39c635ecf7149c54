"""Scores of lm-evaluation-harness: those of its backend for transformers on the exported model, on
any ranks.

Without the package a stand-in of its interface asks the model (tests/helpers/harness_stand_in.py).
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmsys.config.harness import HarnessConfig
from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.errors import ConfigError, DataError
from llmsys.train.evaluator import ALONE
from llmsys.train.harness_evaluator import HarnessEvaluator, load_harness_tasks
from llmsys.train.trained_model import build_logits_function, load_trained_model
from tests.helpers import harness_stand_in
from tests.helpers.harness_stand_in import install_stand_in
from tests.helpers.harness_tasks import TASKS, write_harness_tasks
from tests.helpers.json_tokenizers import write
from tests.helpers.ranks import run_ranks
from tests.reference.harness_backend import TransformersBackend

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="lm_eval is optional")

# The stand-in gives no examples before a question.
PLAIN_TASKS = [name for name in TASKS if name != "toy_arc"]
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
        vocab_size=library.get_vocab_size() + 3, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "hub")
    write_harness_tasks(folder, WORDS)
    convert_from_hugging_face(folder / "hub", folder / "run")
    return folder


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, or its stand-in."""
    if not HAS_HARNESS:
        install_stand_in(monkeypatch)


def build_run_config(folder: Path) -> RunConfig:
    return load_run_config(
        str(folder / "run" / "config.yaml"),
        ["train.precision=fp32", "evaluation.micro_sequences=3"],
    )


def build_asked(folder: Path, **changes: Any) -> HarnessConfig:
    return HarnessConfig.model_validate({"tasks": TASKS.keys(), "include_path": folder, **changes})


def evaluate(folder: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    config = build_run_config(folder)
    model, _ = load_trained_model(config)
    evaluator = HarnessEvaluator(build_asked(folder, **changes), config, ALONE)
    found = evaluator.evaluate(build_logits_function(model), torch.device("cpu"))
    return {name: one.to_dict() for name, one in found.items()}


def evaluate_on_ranks(rank: int, folder: Path, tasks: list[str]) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_HARNESS:
            install_stand_in(patch)
        return evaluate(folder, tasks=tasks)


def evaluate_plainly(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of transformers on the exported model, as the stand-in asks for them."""
    loaded = harness_stand_in.TaskManager(str(folder)).load(PLAIN_TASKS)
    model = TransformersBackend(folder / "hub")
    results: dict[str, Any] = harness_stand_in.evaluate(
        model, loaded, bootstrap_iters=0, log_samples=False
    )["results"]
    return results


def compare(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    for task, values in found.items():
        assert values["questions"] == 12
        for metric in values.keys() - {"questions"}:
            theirs = expected[task][f"{metric},none"]
            is_count = metric in ("acc", "acc_norm", "exact_match")
            assert values[metric] == (theirs if is_count else pytest.approx(theirs, rel=1e-5)), (
                task,
                metric,
            )


def test_scores_are_those_of_transformers_by_the_rules_of_the_harness(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stand_in(monkeypatch)
    found = evaluate(exported, tasks=PLAIN_TASKS)
    assert found.keys() == set(PLAIN_TASKS)
    compare(found, evaluate_plainly(exported))
    assert 0 < found["toy_choices"]["acc"] < 1
    first = evaluate(exported, tasks=["toy_choices"], max_questions=5, name="own")
    assert first.keys() == {"own/toy_choices"}
    assert first["own/toy_choices"]["questions"] == 5


def test_any_number_of_ranks_gives_the_same_scores(exported: Path, harness: None) -> None:
    assert run_ranks(evaluate_on_ranks, 2, exported, PLAIN_TASKS)[0] == evaluate(
        exported, tasks=PLAIN_TASKS
    )


def test_a_group_has_the_questions_of_its_tasks(exported: Path, harness: None) -> None:
    group = {"group": "toy_group", "task": ["toy_choices", "toy_text"]}
    (exported / "toy_group.yaml").write_text(yaml.safe_dump(group))
    try:
        found = evaluate(exported, tasks=["toy_group"], max_questions=5)
    finally:
        (exported / "toy_group.yaml").unlink()
    assert {name: one["questions"] for name, one in found.items()} == {
        "toy_choices": 5,
        "toy_text": 5,
        "toy_group": 10,
    }


@needs_harness
def test_the_stand_in_scores_as_the_package(exported: Path) -> None:
    expected = evaluate_plainly(exported)
    found = evaluate(exported, tasks=PLAIN_TASKS)
    compare(found, expected)
    assert {name: one.keys() - {"questions"} for name, one in found.items()} == {
        name: {key.removesuffix(",none") for key in one if "," in key and "_stderr" not in key}
        for name, one in expected.items()
    }


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
    compare(found, expected)
    assert 0 < found["toy_choices"]["acc"] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tasks": ["toy_nowhere"]},
            "toy_nowhere cannot be loaded without the internet .*dataset_path",
        ),
        ({"tasks": ["toy_unknown"]}, "the harness knows no task toy_unknown"),
        ({"tasks": ["toy_sampled"]}, "toy_sampled samples its answers"),
        ({"include_path": "nowhere"}, "include_path=.*nowhere is no folder"),
    ],
)
def test_a_task_that_cannot_be_scored_is_named_before_training(
    changes: dict[str, Any], message: str, exported: Path, harness: None
) -> None:
    files = {"toy_nowhere": {"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}},
             "toy_sampled": {"generation_kwargs": {"do_sample": True,
                 "temperature": 1.0}}}  # fmt: skip
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
    with pytest.raises(
        ConfigError, match=r"needs the package lm_eval.*pip install 'llmsys\[harness\]'"
    ):
        load_harness_tasks(HarnessConfig(tasks=("hellaswag",)))
