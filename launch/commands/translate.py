"""Run `llmsys translate`: translate lines of text with a trained encoder-decoder, one
translation per line.
"""

import argparse
import json
import sys

from llmsys.errors import DataError
from llmsys.storage.paths import parse_local_path, require_local_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --input and --output; without them the verb is a filter."""
    parser.add_argument(
        "--input",
        default="-",
        help="file with one sentence per line; - reads standard input (default)",
    )
    parser.add_argument(
        "--output",
        type=parse_local_path,
        help="file to write the translations to (default: standard output)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Translate every line; with --json, print a list of {source, translation}."""
    from llmsys.config.loading.load import load_run_config
    from llmsys.config.loading.trusted_run import require_trusted_run
    from llmsys.launch.process.run_requirements import require_checkpoint

    config = load_run_config(arguments.config, arguments.overrides)
    require_trusted_run(config, "text")
    # str.splitlines would also split at form feeds and U+2028, inside a sentence
    lines = [line.strip() for line in _read_input(arguments.input).split("\n")]
    if lines and not lines[-1]:
        lines.pop()
    require_checkpoint(config)
    from llmsys.generate.translation import translate_lines
    from llmsys.train.build_trainer import set_num_threads
    from llmsys.train.run_data import load_run_tokenizer
    from llmsys.train.trained_model import load_trained_model

    set_num_threads(config)
    model, _ = load_trained_model(config)
    found = translate_lines(model, load_run_tokenizer(config), config, lines)
    if arguments.json:
        pairs = [
            {"source": source, "translation": text}
            for source, text in zip(lines, found, strict=True)
        ]
        text = json.dumps(pairs, ensure_ascii=False) + "\n"
    else:
        text = "".join(f"{line}\n" for line in found)
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


def _read_input(name: str) -> str:
    try:
        return (
            sys.stdin.read()
            if name == "-"
            else require_local_path(name, "--input").read_text(encoding="utf-8")
        )
    except FileNotFoundError:
        raise DataError(
            f"--input {name} does not exist. Give a text file with one sentence per line."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"--input {name} is not UTF-8: {error.reason} at byte {error.start}. Convert it."
        ) from None
