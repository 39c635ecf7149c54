"""`llmsys estimate`: parameters, operations and memory of a model or a run, before anything starts."""

import argparse
import json

from llmsys.config.load import read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--explain lists every tensor."""
    parser.add_argument("--explain", action="store_true", help="list every tensor; the counts sum to the total")


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate; with --json, as one object with stable keys."""
    resolved = read_config(arguments.config, arguments.overrides)
    from llmsys.estimate.ledger import as_text, estimate, tensor_ledger

    result = estimate(resolved.run, model_only=resolved.model_only)
    ledger = tensor_ledger(resolved.run) if arguments.explain else None
    if arguments.json:
        print(json.dumps(result if ledger is None else result | {"tensors": ledger}, ensure_ascii=False))
    else:
        print(as_text(result, ledger))
    return 0
