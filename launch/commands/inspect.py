"""Run `llmsys inspect`: verify a prepared dataset against its manifest, locate a token, show
dropped documents, or group documents, or the losses of a run, by a column.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from llmsys.errors import ConfigError, DataError
from llmsys.launch.commands.arguments import parse_count
from llmsys.storage.paths import find_folder_url, parse_local_path, require_local_path

WRONG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a dataset folder or config, and the options that replace the whole verification."""
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        help="dataset folder, run folder, or a config with data.folder",
    )
    parser.add_argument(
        "overrides", metavar="section.key=value", nargs="*", help="override values of that config"
    )
    parser.add_argument(
        "--samples",
        type=parse_count(1),
        default=64,
        metavar="N",
        help="number of documents to decode and compare (default: %(default)s)",
    )
    parser.add_argument(
        "--token",
        metavar="SPLIT:N",
        help="print the source page of one token, such as train:12345, instead",
    )
    parser.add_argument(
        "--dropped",
        metavar="rule=NAME",
        help="show dropped documents with value, threshold and text: rule=, stage= or test=, "
        "joined by commas, or all",
    )
    parser.add_argument(
        "--by",
        metavar="COLUMN",
        help="count kept and dropped documents by host, domain, year, month, or any column of "
        "documents/, numbers in ten ranges",
    )
    parser.add_argument(
        "--compare",
        type=parse_local_path,
        metavar="OTHER",
        help="name the documents that only one of two datasets of a crawl has, by the test that "
        "dropped them from the other",
    )
    parser.add_argument(
        "--by-loss",
        nargs="?",
        const="host",
        metavar="COLUMN",
        help="show the loss of a run by host (the default), domain, year, month, source, file, or "
        "any column of documents/, numbers in ten buckets; needs a run with "
        "train.record_document_losses=true",
    )
    parser.add_argument(
        "--limit",
        type=parse_count(1),
        default=20,
        metavar="N",
        help="with --dropped, --by or --by-loss: maximum number of documents or groups (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--output",
        type=parse_local_path,
        metavar="FILE",
        help="with --dropped: write all of them with their whole texts, as .parquet, .jsonl or "
        ".jsonl.zst; with --by-loss: write the losses of every document by its id, as .parquet",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; return 1 when a dataset has a violation."""
    if arguments.by_loss is not None:
        return _print_losses(arguments)
    folders = resolve_dataset_folders(arguments.dataset, arguments.overrides)
    for folder in folders:
        _require_local_dataset(folder)
    if arguments.token is not None:
        return _print_token_origin(folders[0], arguments.token, arguments.json)
    if arguments.dropped is not None:
        return _print_dropped(folders[0], arguments)
    if arguments.by is not None:
        return _print_groups(folders[0], arguments)
    if arguments.compare is not None:
        from llmsys.launch.commands.compare_datasets import print_differences

        print_differences([folders[0], arguments.compare], arguments.json)
        return 0
    if arguments.output is not None:
        raise ConfigError(
            "--output writes dropped documents, or with --by-loss losses. Say which: "
            "--dropped all, rule=NAME or stage=NAME, or --by-loss."
        )
    return max(_print_inspection(folder, arguments.samples, arguments.json) for folder in folders)


def _require_local_dataset(folder: Path) -> None:
    """Raise DataError for a dataset in object storage: its documents are not on this machine."""
    if (url := find_folder_url(folder)) is not None:
        name = folder.name
        raise DataError(
            f"{url} is in object storage, and inspect reads every file of a dataset. Copy it, then "
            f"inspect the copy: aws s3 sync {url} {name} && llmsys inspect {name}"
        )


def resolve_dataset_folders(name: str, overrides: list[str]) -> tuple[Path, ...]:
    """Return the folder itself, or the dataset folders of a config."""
    from llmsys.config.loading.config_files import RUN_CONFIG, find_folder_config

    folder = require_local_path(name, "DATASET")
    # a folder of another sort is a damaged dataset: its missing manifest is the finding
    if folder.is_dir() and (
        (file := find_folder_config(folder)) is None or file.name != RUN_CONFIG
    ):
        if overrides:
            raise DataError(
                f"{name} is a dataset folder, but {overrides[0]} applies to configs. Leave it "
                "out, or give the config."
            )
        return (folder,)
    from llmsys.config.data import list_dataset_folders
    from llmsys.config.loading.config_files import find_config_file
    from llmsys.config.loading.load import load_run_config

    try:
        find_config_file(name, Path.cwd())
    except ConfigError as error:
        raise DataError(f"{name} is not a dataset folder, and {error}") from None
    return list_dataset_folders(load_run_config(name, overrides).data)


def _print_groups(folder: Path, arguments: argparse.Namespace) -> int:
    from llmsys.data_pipeline.inspection.document_groups import (
        format_document_groups,
        group_documents,
    )

    found = group_documents(folder, arguments.by, arguments.limit)
    print(json.dumps(asdict(found)) if arguments.json else format_document_groups(found))
    return 0


def _print_losses(arguments: argparse.Namespace) -> int:
    from llmsys.config.loading.config_files import MANIFEST, find_folder_config
    from llmsys.config.loading.load import load_run_config
    from llmsys.data_pipeline.inspection.loss_groups import (
        export_losses,
        format_loss_groups,
        group_losses,
    )
    from llmsys.dataset.document_losses import load_document_losses, open_loss_sources
    from llmsys.train.remote_run import fetch_run

    if arguments.dropped is not None or arguments.token is not None:
        raise ConfigError("--by-loss shows losses. Give it without --dropped and --token.")
    found = find_folder_config(require_local_path(arguments.dataset, "DATASET"))
    if found is not None and found.name == MANIFEST:
        raise ConfigError(
            f"{arguments.dataset} is a dataset, and --by-loss shows the losses of a run. Give the "
            "run folder or its config."
        )
    config = load_run_config(arguments.dataset, arguments.overrides)
    fetch_run(config.run.folder)
    names, sources = open_loss_sources(config.data)
    losses = load_document_losses(config.run.folder, sources)
    groups = group_losses(losses, names, sources, arguments.by_loss)
    if arguments.output is not None:
        export_losses(losses, names, sources, arguments.output)
    if arguments.json:
        result = {
            "run": str(config.run.folder),
            "column": arguments.by_loss,
            "steps": losses.num_steps,
            "skipped_steps": losses.num_skipped,
            "documents": len(losses.tokens_D),
            "tokens": int(losses.tokens_D.sum()),
            "loss": float(losses.nats_D.sum() / losses.tokens_D.sum()),
            "output": None if arguments.output is None else str(arguments.output),
            "groups": [asdict(group) for group in groups],
        }
        print(json.dumps(result, ensure_ascii=False))
        return 0
    print(format_loss_groups(losses, arguments.by_loss, groups, arguments.limit))
    if arguments.output is not None:
        print(f"wrote {arguments.output}: {len(losses.tokens_D):,} documents")
    return 0


def _print_inspection(folder: Path, samples: int, as_json: bool) -> int:
    from llmsys.data_pipeline.inspection.format_result import (
        build_inspection_dict,
        format_inspection,
    )
    from llmsys.data_pipeline.inspection.verify_dataset import verify_dataset

    inspection = verify_dataset(folder, samples)
    print(
        json.dumps(build_inspection_dict(inspection), ensure_ascii=False)
        if as_json
        else format_inspection(inspection)
    )
    return WRONG if inspection.findings else 0


def _print_token_origin(folder: Path, name: str, as_json: bool) -> int:
    from llmsys.data_pipeline.inspection.token_lineage import format_token_lineage, locate_token

    place = locate_token(folder, name)
    print(json.dumps(asdict(place), ensure_ascii=False) if as_json else format_token_lineage(place))
    return 0


def _print_dropped(folder: Path, arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        return _export_dropped(folder, arguments)
    from llmsys.data_pipeline.inspection.dropped_documents import (
        find_dropped_documents,
        format_dropped_documents,
        parse_wanted,
    )

    total, rows = find_dropped_documents(folder, parse_wanted(arguments.dropped), arguments.limit)
    result = {"total": total, "documents": rows}
    print(
        json.dumps(result, ensure_ascii=False)
        if arguments.json
        else format_dropped_documents(total, rows)
    )
    return 0


def _export_dropped(folder: Path, arguments: argparse.Namespace) -> int:
    from llmsys.data_pipeline.inspection.dropped_documents import parse_wanted
    from llmsys.data_pipeline.inspection.export_dropped import export_dropped_documents

    total, missing = export_dropped_documents(
        folder, parse_wanted(arguments.dropped), arguments.output
    )
    result = {"output": str(arguments.output), "documents": total, "without_text": missing}
    few = (
        f", {missing:,} of them without text: nothing was extracted from their pages"
        if missing
        else ""
    )
    print(
        json.dumps(result)
        if arguments.json
        else f"wrote {arguments.output}: {total:,} documents{few}"
    )
    return 0
