"""What keeps the prompts of a config from being continued at the end of its run, said before the run begins."""

from collections.abc import Iterator

from llmsys.config.model import ModelConfig
from llmsys.config.train import GenerationConfig
from llmsys.config.violation import Violation


def generation_problems(generation: GenerationConfig, model: ModelConfig) -> Iterator[Violation]:
    """Yield every broken rule between prompts and model. Only a decoder continues prompts."""
    if not generation.prompts or model.family != "decoder":
        return
    if model.moe is not None and model.moe.routing.kind == "expert_choice":
        yield Violation(
            "generation.prompts",
            f"{len(generation.prompts)} prompts cannot be continued with model.moe.routing.kind=expert_choice: experts "
            "choose among all tokens of a sequence, later ones included. Use generation.prompts=[], or "
            "model.moe.routing.kind=token_choice or capacity.",
        )
