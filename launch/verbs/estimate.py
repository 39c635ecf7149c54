"""`llmsys estimate`: parameters, operations and memory of a model or a run, before anything starts."""

import argparse
import json

from llmsys.config.load import read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--explain lists every tensor; --documents says what is packed into a window."""
    parser.add_argument("--explain", action="store_true", help="list every tensor; the counts sum to the total")
    parser.add_argument(
        "--documents",
        type=_lengths,
        default=(),
        metavar="N,N,…",
        help="tokens of the documents in one window, repeated until it is full; left out: one document",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate; with --json, as one object with stable keys."""
    resolved = read_config(arguments.config, arguments.overrides)
    from llmsys.estimate.ledger import estimate, tensor_ledger
    from llmsys.estimate.text import as_text

    result = estimate(resolved.run, model_only=resolved.model_only, documents=arguments.documents)
    ledger = tensor_ledger(resolved.run) if arguments.explain else None
    if arguments.json:
        print(json.dumps(result if ledger is None else result | {"tensors": ledger}, ensure_ascii=False))
    else:
        print(as_text(result, ledger))
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of document lengths in tokens. Use 512 or 100,300.")
    return lengths
