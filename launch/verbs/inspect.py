"""`llmsys inspect`: a prepared dataset held against its manifest, or what became of one token."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from llmsys.errors import ConfigError, DataError
from llmsys.local_path import require_local_path

WRONG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A dataset folder or a config; what to look at in place of everything."""
    parser.add_argument("dataset", metavar="DATASET", help="dataset folder, or a config whose data.folder is meant")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="values of that config")
    parser.add_argument(
        "--samples",
        type=int,
        default=64,
        metavar="N",
        help="documents to encode and decode again (default: %(default)s)",
    )
    parser.add_argument(
        "--token",
        metavar="SPLIT:N",
        help="say where one token came from, such as train:12345, and nothing else",
    )
    parser.add_argument(
        "--dropped",
        metavar="rule=NAME",
        help="show dropped documents with value, threshold and text: rule=, stage= or test=, joined by commas",
    )
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="with --dropped: how many (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for; the status is 1 when something is wrong with a dataset."""
    folders = dataset_folders_of(arguments.dataset, arguments.overrides)
    if arguments.token is not None:
        return _token(folders[0], arguments.token, arguments.json)
    if arguments.dropped is not None:
        return _dropped(folders[0], arguments)
    return max(_whole(folder, arguments.samples, arguments.json) for folder in folders)


def dataset_folders_of(name: str, overrides: list[str]) -> tuple[Path, ...]:
    """The folder itself, or the folders that a config names."""
    if require_local_path(name, "DATASET").is_dir():
        if overrides:
            raise DataError(f"{name} is a folder, and {overrides[0]} is for configs. Leave it out, or name the config.")
        return (Path(name),)
    from llmsys.config.data import dataset_folders
    from llmsys.config.load import load_run
    from llmsys.config.lookup import find_config

    try:
        find_config(name, Path.cwd())
    except ConfigError as error:
        raise DataError(f"{name} is no dataset folder, and {error}") from None
    return dataset_folders(load_run(name, overrides).data)


def _whole(folder: Path, samples: int, as_json: bool) -> int:
    from data_pipeline.inspect.dataset import inspect_dataset
    from data_pipeline.inspect.text import as_data, as_text

    inspection = inspect_dataset(folder, samples)
    print(json.dumps(as_data(inspection), ensure_ascii=False) if as_json else as_text(inspection))
    return WRONG if inspection.findings else 0


def _token(folder: Path, name: str, as_json: bool) -> int:
    from data_pipeline.inspect.place import place_as_text, token_place

    place = token_place(folder, name)
    print(json.dumps(asdict(place), ensure_ascii=False) if as_json else place_as_text(place))
    return 0


def _dropped(folder: Path, arguments: argparse.Namespace) -> int:
    from data_pipeline.inspect.dropped import dropped_as_text, dropped_documents, parse_wanted

    total, rows = dropped_documents(folder, parse_wanted(arguments.dropped), arguments.limit)
    result = {"total": total, "documents": rows}
    print(json.dumps(result, ensure_ascii=False) if arguments.json else dropped_as_text(total, rows))
    return 0
