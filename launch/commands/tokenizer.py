"""Run `llmsys tokenizer`: train the tokenizer on the documents that preparation kept."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `llmsys tokenizer` has no options."""


def run(arguments: argparse.Namespace) -> int:
    """Train the tokenizer unless its file exists, and print its path."""
    from llmsys.config.loading.load import load_run_config

    config = load_run_config(arguments.config, arguments.overrides)
    from llmsys.data_pipeline.pipelines.prepare_dataset import train_tokenizer
    from llmsys.data_pipeline.tokenize.tokenizer_files import load_dataset_tokenizer

    path = train_tokenizer(config)
    tokenizer = load_dataset_tokenizer(path)
    result = {
        "path": str(path),
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
    }
    print(json.dumps(result) if arguments.json else f"{path}: {tokenizer.vocab_size:,} pieces")
    return 0
