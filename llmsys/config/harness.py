"""Configuration of tasks of the Language Model Evaluation Harness (`evaluation.tasks` with
kind=harness).
"""

from typing import Literal

from pydantic import Field

from llmsys.config.section import LocalPath, Section


class HarnessConfig(Section):
    """Tasks of EleutherAI's lm-evaluation-harness. Needs the package lm_eval: `pip install
    'llmsys[harness]'`.

    Data are read from local files and from the cache of the library datasets (HF_DATASETS_OFFLINE).
    """

    kind: Literal["harness"] = "harness"
    tasks: tuple[str, ...] = Field(
        min_length=1, description="Names of tasks or groups, such as hellaswag, arc_easy."
    )
    name: str = Field(
        "", description="Prefix of the tasks' names in logs and events. Default: none."
    )
    include_path: LocalPath | None = Field(
        None,
        description="Folder with task files (YAML) of your own. null: the harness's tasks alone.",
    )
    num_fewshot: int | None = Field(
        None, ge=0, description="Examples before each question. null: the task's number."
    )
    max_questions: int = Field(
        0, ge=0, description="Maximum number of documents of each task, the first. 0: all."
    )
    prefix_token: str | None = Field(
        None,
        description="Token before texts without a context. null: the tokenizer's begin token, "
        "else its end token, as the harness does for models of transformers.",
    )
    apply_chat_template: bool = Field(
        False,
        description="Give the documents as messages in the chat template, examples as separate "
        "turns.",
    )

    @property
    def title(self) -> str:
        """Name of the tasks together."""
        return self.name or ", ".join(self.tasks)
