"""`llmsys evaluate`: loss of the newest checkpoint on held-back documents, beside gzip and xz."""

import argparse
import json

from launch.verbs.train import described
from llmsys.config.load import load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`llmsys evaluate` has no options of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Evaluate in one process and print the result; with --json, its fields and the checkpoint's path."""
    config = load_run(arguments.config, arguments.overrides)
    from llmsys.train.build import open_data, use_threads
    from llmsys.train.evaluate import HeldoutEvaluator
    from llmsys.train.trained import load_trained, losses_of

    use_threads(config)
    shards, tokenizer = open_data(config, "heldout")
    model, checkpoint = load_trained(config)
    device = next(model.parameters()).device
    result = HeldoutEvaluator(config, shards, tokenizer).evaluate(losses_of(model), device).fields()
    print(
        json.dumps(result | {"checkpoint": str(checkpoint)}) if arguments.json else f"{checkpoint}\n{described(result)}"
    )
    return 0
