"""Score a model on tasks of lm-evaluation-harness: in training and by `llmsys evaluate`.

Reads task files and local data through lm_eval, which is imported only where a config names a task.

Invariants:
- Tasks and their data are loaded before training. No file is fetched from the internet.
- Scores are those of lm_eval's own backend for transformers on the exported model.
"""

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmsys.config.harness import HarnessConfig
from llmsys.config.loading.trusted_code import require_trusted_tasks
from llmsys.config.run import RunConfig
from llmsys.data.harness_rows import HarnessTokenizer
from llmsys.errors import ConfigError, DataError
from llmsys.train.chat_data import get_template_folder, load_file_tokenizer
from llmsys.train.evaluator import LogitsFunction, RowRanks
from llmsys.train.harness_model import HarnessModel
from llmsys.vocabulary.chat_template import ChatTemplate, load_chat_template

FEWSHOT_SEED = 1234  # the default of the harness


@dataclass(frozen=True)
class HarnessScores:
    """Metrics of one task, by the harness's names, and its number of documents."""

    metrics: dict[str, float]
    questions: int

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for events and JSON."""
        return self.metrics | {"questions": self.questions}


class HarnessEvaluator:
    """An evaluator of the tasks of one entry of `evaluation.tasks`.

    Args:
        asked: the entry.
        config: the config of the run.
        row_ranks: the ranks that compute the logits of a row together.

    Raises:
        ConfigError: lm_eval is not installed, or the tokenizer lacks the prefix token.
        DataError: a task or its files are missing.
    """

    def __init__(self, asked: HarnessConfig, config: RunConfig, row_ranks: RowRanks) -> None:
        self.asked = asked
        self.row_ranks = row_ranks
        self.longest = config.model.max_position_embeddings
        self.sequences = config.evaluation_sequences
        library = load_file_tokenizer(config, "evaluation.tasks with kind=harness")
        prefix = library.eos_id if library.bos_id < 0 else library.bos_id
        if asked.prefix_token is not None:
            found = library.find_piece_id(asked.prefix_token)
            if found is None:
                raise ConfigError(f"evaluation.tasks: prefix_token={asked.prefix_token} is no "
                "token of the tokenizer. Correct it, or leave it out.")  # fmt: skip
            prefix = found
        self.tokenizer = HarnessTokenizer(library, prefix)
        self.template: ChatTemplate | None = None
        if asked.apply_chat_template:
            self.template = load_chat_template(get_template_folder(config), library)
        self.loaded = load_harness_tasks(asked)

    def evaluate(
        self, compute_logits: LogitsFunction, device: torch.device
    ) -> dict[str, HarnessScores]:
        """Score the model and return the metrics of each task by its name. Collective."""
        from lm_eval.evaluator import evaluate

        model = HarnessModel(
            compute_logits,
            device,
            self.tokenizer,
            self.longest,
            self.row_ranks,
            self.sequences,
            self.template,
        )
        # progress bars of the harness, on every rank and in every evaluation
        with _keep_offline(), _keep_random_state(), contextlib.redirect_stderr(io.StringIO()):
            results = evaluate(
                model,
                self.loaded,
                limit=self.asked.max_questions or None,
                bootstrap_iters=0,
                log_samples=False,
                apply_chat_template=self.template is not None,
                fewshot_as_multiturn=self.template is not None,
            )
        assert results is not None  # on its rank 0, which every rank is
        prefix = f"{self.asked.name}/" if self.asked.name else ""
        return {
            f"{prefix}{name}": HarnessScores(
                _select_metrics(values), count_questions(results, name)
            )
            for name, values in results["results"].items()
        }


def count_questions(results: dict[str, Any], name: str) -> int:
    """Count the documents of a task, or of all tasks of a group.

    Args:
        results: what the harness's `evaluate` returned.
        name: a task or a group, which may have groups itself.

    Returns:
        The documents that were scored; those of a task that is in two groups of a group count
        twice, as in the harness's own means.
    """
    if (counts := results["n-samples"].get(name)) is not None:
        return int(counts["effective"])
    return sum(
        count_questions(results, child) for child in results.get("group_subtasks", {}).get(name, ())
    )


def load_harness_tasks(asked: HarnessConfig) -> Any:
    """Load tasks with their data.

    Args:
        asked: the entry of `evaluation.tasks`.

    Returns:
        The harness's own mapping of tasks and groups.

    Raises:
        ConfigError: lm_eval is not installed, or the user has not consented to the task files.
        DataError: a task is not known, its data are not on this machine, or it samples.
    """
    with _keep_offline():
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ConfigError(
                "evaluation.tasks with kind=harness needs the package lm_eval, which cannot be "
                f"imported ({error}). Install it with: pip install 'llmsys[harness]', or remove "
                "the entry."
            ) from None
        own = None if asked.include_path is None else str(asked.include_path)
        if own is not None and not os.path.isdir(own):
            raise DataError(
                f"evaluation.tasks: include_path={own} is no folder. Name the folder of the task "
                "files."
            )
        if asked.include_path is not None:
            require_trusted_tasks(asked.include_path, "evaluation.tasks")
        manager = TaskManager(include_path=own, include_defaults=False) if own else None
        if manager is None or any(name not in manager.all_tasks for name in asked.tasks):
            manager = TaskManager(include_path=own)  # reads all task files of the harness
        for name in asked.tasks:
            if name not in manager.all_tasks:
                raise DataError(f"evaluation.tasks: the harness knows no task {name}. Correct the "
                "name, or name the folder of its file in include_path.")  # fmt: skip
        try:
            loaded = manager.load(list(asked.tasks))
        except Exception as error:  # of datasets, of YAML, and of tasks' own Python
            raise DataError(
                f"evaluation.tasks: {', '.join(asked.tasks)} cannot be loaded without the "
                f"internet ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}). Put the data where the "
                "task's dataset_path and data_files name them, or into the cache of datasets "
                "(HF_HOME)."
            ) from None
    for name, task in loaded["tasks"].items():
        _prepare_task(name, task, asked)
    return loaded


def _prepare_task(name: str, task: Any, asked: HarnessConfig) -> None:
    """Set the number of examples as the harness does; raise DataError for a task that draws
    random tokens.
    """
    settings = task.get_config("generation_kwargs") or {}
    if settings.get("do_sample") or float(settings.get("temperature") or 0) > 0:
        raise DataError(f"evaluation.tasks: {name} samples its answers ({settings}), and only "
        "greedy answers are given. Set do_sample: false and temperature: 0 in the task's "
        "file.")  # fmt: skip
    given = task.get_config("num_fewshot")
    if asked.num_fewshot is not None and given != 0:
        task.set_config(key="num_fewshot", value=asked.num_fewshot)
    elif given is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)


def _select_metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a task, without its standard errors and the name of the filter
    `none`.
    """
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "," in name and "_stderr" not in name
    }


@contextlib.contextmanager
def _keep_offline() -> Iterator[None]:
    """Let no library ask the internet, and the harness log warnings alone."""
    names = ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    logger = logging.getLogger("lm_eval")
    level = logger.level
    os.environ.update(dict.fromkeys(names, "1"))
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _keep_random_state() -> Iterator[None]:
    """Leave torch's random numbers as they were: tasks may seed them."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
