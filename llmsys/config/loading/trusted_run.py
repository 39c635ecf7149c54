"""Consent to the code of a run, before a command imports torch or starts ranks.

`load_python_object` and the harness check again where code runs; here all of it is refused early,
also what only ranks run.
"""

from typing import Literal

from llmsys.config.harness import HarnessConfig
from llmsys.config.loading.python_object import require_trusted_section
from llmsys.config.loading.trusted_code import require_trusted_tasks
from llmsys.config.python_code import PythonCode
from llmsys.config.run import RunConfig

CodeUse = Literal["text", "step", "evaluation", "training"]


def require_trusted_run(config: RunConfig, use: CodeUse) -> None:
    """Check that the user consents to the code that a use of a run needs.

    Args:
        config: the config of the run.
        use: `text` needs the tokenizer, `step` the schedule and the optimizer, `evaluation` the
            tokenizer, metrics and tasks, and `training` all of them.

    Raises:
        UntrustedCodeError: the user has not consented; nothing has run.
        ConfigError: a file is missing.
    """
    sections: list[tuple[str, object]] = []
    if use != "step":
        sections.append(("tokenizer", config.tokenizer))
    if use in ("evaluation", "training"):
        for name in ("metrics", "tasks"):
            entries = getattr(config.evaluation, name)
            sections += [(f"evaluation.{name}.{i}", one) for i, one in enumerate(entries)]
    if use in ("step", "training"):
        sections += [("schedule", config.schedule), ("optimizer", config.optimizer)]
    # Every use builds the model.
    sections.append(("model.attention", config.model.attention))
    sections.append(("model.feed_forward", config.model.feed_forward))
    for key, section in sections:
        if isinstance(section, PythonCode):
            require_trusted_section(section, key)
        elif isinstance(section, HarnessConfig) and section.include_path is not None:
            require_trusted_tasks(section.include_path, key)
