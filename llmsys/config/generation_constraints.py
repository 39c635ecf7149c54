"""Rules between prompts and the model, checked before a run starts."""

from collections.abc import Iterator

from llmsys.config.model import ModelConfig
from llmsys.config.train import GenerationConfig
from llmsys.config.violation import Violation


def find_generation_violations(generation: GenerationConfig, model: ModelConfig) -> Iterator[Violation]:
    """Yield the violations between `generation:` and the model."""
    # Only decoders generate from prompts; other families ignore the section.
    if not generation.prompts or model.family != "decoder":
        return
    if model.moe is not None and model.moe.routing.kind == "expert_choice":
        yield Violation(
            "generation.prompts",
            f"{len(generation.prompts)} prompts cannot be completed with model.moe.routing.kind=expert_choice: "
            "experts choose among all tokens of a sequence, later ones included. Use generation.prompts=[], "
            "or model.moe.routing.kind=token_choice or capacity.",
        )
