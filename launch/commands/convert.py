"""Run `llmsys convert`: import weights from a Hugging Face folder, export them, or export the
tokens of a dataset.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from llmsys.errors import ConfigError
from llmsys.storage.paths import parse_folder_argument, parse_local_path

UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}
SIZE_HELP = (
    "largest file to write, such as 2GB or 500MiB (default: as in the original folder, or 5GB)"
)
TOKENS_HELP = (
    "write the tokens of the dataset SOURCE for another trainer: Megatron-LM (.bin and .idx), "
    "nanoGPT (.bin, uint16) or MosaicML streaming (MDS)"
)
TO_HELP = (
    "write the run SOURCE as DESTINATION/model.gguf, for llama.cpp (default: Hugging Face's format)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add SOURCE, which decides the direction (Hugging Face folder: import, run folder: export),
    and DESTINATION.
    """
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=parse_folder_argument,
        help="a Hugging Face folder, a run folder or a checkpoint; with --tokens a dataset folder",
    )
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        type=parse_local_path,
        nargs="?",
        help="folder to create; must not exist",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help=SIZE_HELP)
    parser.add_argument(
        "--dtype",
        choices=("source", "float32", "bfloat16", "float16"),
        help="dtype of written weights; source: that of the imported Hugging Face folder, which "
        "is the default of runs that continue one (default of others: as SOURCE has it)",
    )
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="compute logits of a run and of its export, by transformers, and print the largest "
        "difference (default: for models of up to 1B parameters)",
    )
    parser.add_argument("--to", choices=("gguf",), help=TO_HELP)
    parser.add_argument("--tokens", choices=("megatron", "nanogpt", "mds"), help=TOKENS_HELP)
    parser.add_argument(
        "--dry-run", action="store_true", help="list the tensor mapping, and write nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert and print where the result is; with --json, as {source, destination, tensors,
    bytes}.
    """
    shard_bytes = (
        None if arguments.max_shard_size is None else _parse_bytes(arguments.max_shard_size)
    )
    if not arguments.source.is_dir():
        raise ConfigError(
            f"{arguments.source} is not a folder. Name a Hugging Face folder or a run folder."
        )
    if arguments.destination is None:
        raise ConfigError(
            f"convert {arguments.source} needs a DESTINATION. Name a folder that does not exist "
            "yet."
        )
    if arguments.tokens is not None:
        return _convert_tokens(arguments)
    from llmsys.convert.folders import is_hugging_face_folder, require_absent, require_run_folder

    require_absent(arguments.destination)
    is_import = is_hugging_face_folder(arguments.source)
    # what needs no weights is said before torch is imported
    if is_import:
        _check_config_json(arguments.source / "config.json")
    else:
        require_run_folder(arguments.source)
    if arguments.compare is not None and (is_import or arguments.to or arguments.dry_run):
        raise ConfigError(
            "--compare and --no-compare are for what is written in Hugging Face's format. Leave "
            "them out."
        )
    if arguments.to == "gguf":
        return _convert_to_gguf(arguments, is_import)
    if is_import and shard_bytes is not None:
        raise ConfigError(
            "--max-shard-size applies to the conversion to Hugging Face: a llmsys checkpoint is "
            "one file. Leave it out."
        )
    if arguments.dry_run:
        return _print_mappings(arguments, is_import, shard_bytes)
    values: dict[str, Any] = {}
    if is_import:
        from llmsys.convert.from_hugging_face import convert_from_hugging_face
        from llmsys.convert.weight_dtype import DTYPES

        # `source` is not in it: what is read is the source
        result = convert_from_hugging_face(
            arguments.source, arguments.destination, DTYPES.get(arguments.dtype)
        )
        message = f"wrote {result}. Use it with: llmsys generate {result}/config.yaml"
    else:
        from llmsys.convert.to_hugging_face import convert_to_hugging_face

        result = convert_to_hugging_face(
            arguments.source, arguments.destination, shard_bytes, arguments.dtype
        )
        message = f"wrote {result}"
        if arguments.compare is not False:
            from llmsys.convert.exported_logits import compare_exported_logits

            compared = compare_exported_logits(
                arguments.source, result, arguments.dtype, is_asked=bool(arguments.compare)
            )
            message = f"{message}\n{compared.format()}"
            values["logits"] = compared.to_values()
    values |= {"source": str(arguments.source), "destination": str(result)}
    print(json.dumps(values) if arguments.json else message)
    return 0


def _check_config_json(file: Path) -> None:
    """Raise ConfigError for an architecture that is not known."""
    from llmsys.hugging_face.read_config_json import parse_json, read_model_values

    values = parse_json(file.read_text(encoding="utf-8-sig"), str(file))
    # an image model has values in another file, too
    if values.get("model_type") != "vit":
        read_model_values(values, str(file))


def _convert_tokens(arguments: argparse.Namespace) -> int:
    """Write tokens for another trainer and print where; with --json, as {source, destination,
    tokens}.
    """
    given = {
        "--to": arguments.to,
        "--dry-run": arguments.dry_run,
        "--max-shard-size": arguments.max_shard_size,
        "--dtype": arguments.dtype,
        "--compare": arguments.compare is not None,
    }
    if other := next((name for name, value in given.items() if value), None):
        raise ConfigError(
            f"{other} is for weights, and --tokens writes tokens. Leave one of them out."
        )
    from llmsys.convert.token_formats import convert_tokens

    made = convert_tokens(arguments.source, arguments.destination, arguments.tokens)
    result = {"source": str(arguments.source), "destination": str(made), "tokens": arguments.tokens}
    print(json.dumps(result) if arguments.json else f"wrote {made}")
    return 0


def _convert_to_gguf(arguments: argparse.Namespace, is_import: bool) -> int:
    """Write a GGUF file and print where; with --json, as {source, destination}."""
    if is_import:
        raise ConfigError(
            f"--to gguf writes runs, and {arguments.source} is a Hugging Face folder. Import it "
            f"first: llmsys convert {arguments.source} RUN"
        )
    if arguments.dry_run or arguments.max_shard_size:
        raise ConfigError(
            "--dry-run and --max-shard-size are for Hugging Face's format. Leave them out with "
            "--to gguf."
        )
    from llmsys.convert.gguf_file import convert_to_gguf

    made = convert_to_gguf(arguments.source, arguments.destination, arguments.dtype)
    print(
        json.dumps({"source": str(arguments.source), "destination": str(made)})
        if arguments.json
        else f"wrote {made}"
    )
    return 0


def _print_mappings(arguments: argparse.Namespace, is_import: bool, shard_bytes: int | None) -> int:
    from llmsys.convert.dry_run import list_conversions

    lines: list[dict[str, Any]] = list_conversions(arguments.source, is_import, shard_bytes)
    if arguments.json:
        print(json.dumps(lines))
        return 0
    for line in lines:
        print(f"{' + '.join(line['theirs'])} {line['dtype']}  =  {' + '.join(line['ours'])}")
    print(f"{len(lines)} mappings; nothing was written")
    return 0


def _parse_bytes(text: str) -> int:
    """Return a size with a unit, such as 2GB, in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if size < 1:
        raise ConfigError(
            f"--max-shard-size {text!r} is not a size. Write a number and a unit, such as 2GB or "
            "500MiB."
        )
    return size
