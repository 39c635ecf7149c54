"""Run `llmsys evaluate`: measure a trained model on held-out data, with gzip and xz for text and
BLEU for pairs.
"""

import argparse
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `llmsys evaluate` has no options."""


def run(arguments: argparse.Namespace) -> int:
    """Evaluate in one process and print the result; with --json, its fields and the checkpoint's
    path.
    """
    from llmsys.config.loading.load import load_run_config
    from llmsys.config.loading.trusted_run import require_trusted_run
    from llmsys.launch.commands.train import format_evaluation
    from llmsys.launch.process.run_requirements import require_checkpoint, require_datasets

    config = load_run_config(arguments.config, arguments.overrides)
    require_trusted_run(config, "evaluation")
    require_datasets(config, [arguments.config, *arguments.overrides], "an evaluation")
    require_checkpoint(config)
    from llmsys.train.build_objective import build_evaluator
    from llmsys.train.build_trainer import set_num_threads
    from llmsys.train.expert_load import measure_heldout_next_sentence
    from llmsys.train.trained_model import build_logits_function, load_trained_model

    set_num_threads(config)
    evaluator = build_evaluator(config)
    model, checkpoint = load_trained_model(config)
    result = evaluator.evaluate(
        build_logits_function(model), next(model.parameters()).device
    ).to_dict()
    score: dict[str, Any] = measure_heldout_next_sentence(model, config.objective.kind)
    if config.objective.kind == "translation":
        from llmsys.generate.translation import compute_bleu, read_heldout_texts, translate_lines
        from llmsys.train.run_data import open_first_source

        sources, references = read_heldout_texts(config)
        score = compute_bleu(
            translate_lines(model, open_first_source(config, "heldout")[1], config, sources),
            references,
        )
    if arguments.json:
        print(json.dumps(result | score | {"checkpoint": str(checkpoint)}))
        return 0
    print(f"{checkpoint}\n{format_evaluation(result)}")
    if "next_sentence_loss" in score:
        loss, accuracy = score["next_sentence_loss"], score["next_sentence_accuracy"]
        print(f"next sentences: {loss:.4f} nats each, {accuracy:.2%} right")
    if "bleu" in score:
        print(
            f"BLEU {score['bleu']:.2f} on {score['sentences']:,} sentences, brevity penalty "
            f"{score['brevity_penalty']:.3f}, {config.generation.num_beams} beams "
            f"({score['signature']})"
        )
    return 0
