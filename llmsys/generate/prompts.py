"""The prompts of a config, continued: what the trainer does at the end of a run and `llmsys generate` on request."""

from llmsys.config.run import RunConfig
from llmsys.generate.sample import generate
from llmsys.model.transformer import Transformer
from llmsys.tokenizer import Tokenizer


def continue_prompts(model: Transformer, tokenizer: Tokenizer, config: RunConfig) -> list[dict[str, str]]:
    """Prompt and continuation for each of generation.prompts."""
    settings = config.generation
    if not settings.prompts:
        return []
    texts = generate(
        model,
        tokenizer,
        list(settings.prompts),
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
    )
    return [{"prompt": prompt, "text": text} for prompt, text in zip(settings.prompts, texts, strict=True)]
