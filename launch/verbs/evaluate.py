"""`llmsys evaluate`: a trained model on held-back data: its loss, beside gzip and xz for text, with BLEU for pairs."""

import argparse
import json
from typing import Any

from launch.verbs.train import described
from llmsys.config.load import load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`llmsys evaluate` has no options of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Evaluate in one process and print the result; with --json, its fields and the checkpoint's path."""
    config = load_run(arguments.config, arguments.overrides)
    from llmsys.train.build import use_threads
    from llmsys.train.objective import evaluator_of
    from llmsys.train.trained import load_trained, logits_of

    use_threads(config)
    evaluator = evaluator_of(config)
    model, checkpoint = load_trained(config)
    result = evaluator.evaluate(logits_of(model), next(model.parameters()).device).fields()
    score: dict[str, Any] = {}
    if config.objective.kind == "translation":
        from llmsys.generate.score import bleu, heldout_texts, translate_lines
        from llmsys.train.dataset import open_data

        sources, references = heldout_texts(config)
        score = bleu(translate_lines(model, open_data(config, "heldout")[1], config, sources), references)
    if arguments.json:
        print(json.dumps(result | score | {"checkpoint": str(checkpoint)}))
        return 0
    print(f"{checkpoint}\n{described(result)}")
    if score:
        print(
            f"BLEU {score['bleu']:.2f} on {score['sentences']:,} sentences, brevity penalty "
            f"{score['brevity_penalty']:.3f}, {config.generation.beams} beams ({score['signature']})"
        )
    return 0
