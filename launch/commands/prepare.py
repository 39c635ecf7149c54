"""Run `llmsys prepare`: turn crawl shards, pairs, labelled texts or images into token shards."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from llmsys.errors import DataError
from llmsys.log import get_logger
from llmsys.storage.paths import find_folder_url, format_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmsys.config.data import CrawlConfig, DataConfig
    from llmsys.config.run import RunConfig
    from llmsys.dataset.manifest import Manifest, SkippedInput

QUARANTINED = 3  # exit status when inputs that failed every attempt are missing from the dataset

NOUNS = {
    "crawl": "pages",
    "tokens": "documents",
    "pairs": "pairs",
    "labelled": "texts",
    "images": "images",
}
NOUNS |= {"chat": "chats"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --until, and the options that analyse a dataset without preparing one."""
    parser.add_argument(
        "--until",
        choices=("documents", "tokenizer", "tokens"),
        default="tokens",
        help="last part to prepare (default: %(default)s)",
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="OTHER",
        help="prepare the documents of this config and of another one, from one extraction where "
        "they share it, and print which documents differ, by the test that dropped them; may be "
        "given several times",
    )
    parser.add_argument(
        "--compare-dialects",
        action="store_true",
        help="prepare nothing; compare implementations of the Gopher and C4 rules on the config's "
        "documents",
    )
    parser.add_argument(
        "--dialects",
        default="datatrove,dolma",
        metavar="A,B",
        help="with --compare-dialects: two or more of datatrove, paper, dolma, dclm (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--sweep",
        metavar="RULE.FIELD=A,B,C",
        help="prepare nothing; count the documents kept with other thresholds, from the prepared "
        "dataset",
    )
    parser.add_argument(
        "--explain",
        metavar="URL",
        help="prepare nothing; show what each stage did with one page of the prepared dataset",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prepare the parts that are missing and print a summary; return 3 when inputs are in
    quarantine.
    """
    from llmsys.data_pipeline.executors.garbage_collection import (
        collect_less_often,
        pause_collection,
    )

    collect_less_often()
    with pause_collection():
        from llmsys.config.data import ChatConfig, CrawlConfig, TokensConfig
        from llmsys.config.loading.load import load_run_config

    config = load_run_config(arguments.config, arguments.overrides)
    if arguments.sweep or arguments.explain:
        config = find_prepared_files(config)
    if arguments.compare:
        from llmsys.data_pipeline.graph.quarantine import read_quarantine
        from llmsys.launch.commands.compare_datasets import prepare_and_compare

        folders = prepare_and_compare(config, arguments)
        return max(_report_quarantine(read_quarantine(folder)) for folder in folders)
    if arguments.compare_dialects:
        from llmsys.launch.commands.compare_dialects import run_compare_dialects

        return run_compare_dialects(config, arguments.dialects, arguments.json)
    if arguments.sweep:
        return _print_sweep(config, arguments)
    if arguments.explain:
        return _print_explanation(config, arguments)
    with pause_collection():
        from llmsys.data_pipeline.graph.quarantine import read_quarantine
        from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset

    manifest = prepare_dataset(config, until=arguments.until)
    stages = manifest.funnel
    result = {
        "folder": format_folder(config.data.folder),
        "fingerprint": manifest.fingerprint,
        "records": manifest.read.records,
        "pages": (
            stages[0].documents_out if config.data.kind == "crawl" else stages[0].documents_in
        )
        if stages
        else 0,
        "documents": stages[-1].documents_out if stages else 0,
        "bytes": stages[-1].bytes_out if stages else 0,
        "tokens": {name: split.tokens for name, split in manifest.splits.items()},
        "skipped": [skip.model_dump() for skip in manifest.read.skipped],
        "usage": None if manifest.usage is None else manifest.usage.model_dump(),
        "sampling": [column.model_dump() for column in manifest.sampling],
        "quarantined": (given_up := read_quarantine(find_prepared_files(config).data.folder)),
    }
    came_as_text = 0 < manifest.read.html_bytes == manifest.read.given_text_bytes
    noun = "documents" if came_as_text else NOUNS[config.data.kind]
    print(
        json.dumps(result)
        if arguments.json
        else "\n".join(
            [
                *format_skipped(manifest),
                *(f"columns: {note}" for note in manifest.column_notes),
                *list_spared_items(manifest),
                *format_tokenizer_fit(manifest),
                *format_sampling(manifest),
                format_dataset(result, noun),
            ]
        )
    )
    if (
        isinstance(config.data, CrawlConfig | TokensConfig | ChatConfig)
        and result["tokens"]
        and not manifest.splits["heldout"].tokens
    ):
        get_logger(__name__).warning(
            "no document was held out, but training ends with an evaluation. Raise "
            "data.split.heldout_fraction (%g)",
            config.data.split.heldout_fraction,
        )
    return _report_quarantine(given_up)


def _report_quarantine(entries: "Sequence[Mapping[str, str]]") -> int:
    """Log the inputs that failed every attempt, and return the exit status."""
    for entry in entries:
        get_logger(__name__).error("in quarantine: task %s: %s", entry["task"], entry["message"])
    return QUARANTINED if entries else 0


def find_prepared_files(config: "RunConfig") -> "RunConfig":
    """Return the config with the local folder that a remote dataset was prepared in; that of a
    local one unchanged.
    """
    if (url := find_folder_url(config.data.folder)) is None:
        return config
    from llmsys.data_pipeline.pipelines.remote_dataset import get_work_folder

    return config.model_copy(
        update={"data": config.data.model_copy(update={"folder": get_work_folder(url)})}
    )


def _print_sweep(config: "RunConfig", arguments: argparse.Namespace) -> int:
    from llmsys.data_pipeline.inspection.threshold_sweep import format_sweep, sweep_threshold

    found = sweep_threshold(config.data.folder, arguments.sweep)
    print(json.dumps(asdict(found)) if arguments.json else format_sweep(found))
    return 0


def _print_explanation(config: "RunConfig", arguments: argparse.Namespace) -> int:
    from llmsys.data_pipeline.inspection.dataset_config import describe_config_differences
    from llmsys.data_pipeline.inspection.explain_page import explain_url, format_explanation
    from llmsys.dataset.manifest import load_manifest

    data = require_crawl(config.data)
    found = explain_url(data, arguments.explain)
    if differences := describe_config_differences(load_manifest(data.folder), data):
        get_logger(__name__).warning("%s", differences)
    result = [asdict(capture) for capture in found]
    print(json.dumps(result, ensure_ascii=False) if arguments.json else format_explanation(found))
    return 0


def require_crawl(data: "DataConfig") -> "CrawlConfig":
    """Return the data section when it is a crawl; raise DataError otherwise, since other kinds
    have no stages.
    """
    if data.kind != "crawl":
        raise DataError(
            f"data.kind={data.kind} has no stages to show. Use a config with data.kind=crawl."
        )
    return data


def format_skipped(manifest: "Manifest") -> list[str]:
    """Return a line for each reason why records were skipped, with the first location."""
    from llmsys.dataset.manifest_section import format_record_place

    by_reason: dict[str, list[SkippedInput]] = {}
    for skip in manifest.read.skipped:
        by_reason.setdefault(skip.reason, []).append(skip)
    places = {
        reason: format_record_place(skips[0].file, skips[0].offset)
        for reason, skips in by_reason.items()
    }
    return [
        f"skipped {sum(skip.count for skip in skips):,}: {reason} (first: {places[reason]})"
        for reason, skips in sorted(by_reason.items())
    ]


def list_spared_items(manifest: "Manifest") -> list[str]:
    """Return a line for each evaluation set with items that are ignored because too many
    documents contain them.
    """
    sets = manifest.decontamination.sets if manifest.decontamination else {}
    return [
        f"decontamination: {one.items_spared:,} items of {name} are spared because too many "
        "documents have them: "
        f"{', '.join(item.item for item in one.spared[:5])}{', …' if one.items_spared > 5 else ''} "
        "(lines with action spared in decontamination/; see data.decontaminate.max_documents)"
        for name, one in sets.items()
        if one.items_spared
    ]


def format_tokenizer_fit(manifest: "Manifest") -> list[str]:
    """Return one line with bytes and words per token and unused pieces; none before there are
    tokens.
    """
    usage = manifest.usage
    if usage is None or not (tokens := sum(one.tokens for one in usage.languages.values())):
        return []
    shares = {
        name: sum(getattr(one, name) for one in usage.languages.values()) / tokens
        for name in ("bytes", "words", "unknown_tokens", "byte_tokens")
    }
    parts = [
        f"{shares['bytes']:.2f} bytes and {shares['words']:.2f} words per token",
        f"{shares['unknown_tokens']:.2%} of the tokens unknown, {shares['byte_tokens']:.2%} "
        "single bytes",
        f"{usage.dead_pieces:,} of {usage.pieces:,} pieces in no document",
    ]
    return [f"tokenizer: {', '.join(parts)} (llmsys inspect shows it by language)"]


def format_sampling(manifest: "Manifest") -> list[str]:
    """Return a table for each rule of `data.sampling`: the training documents before and after."""
    lines = []
    for column in manifest.sampling:
        before = sum(group.tokens for group in column.groups)
        after = sum(group.sampled_tokens for group in column.groups)
        width = max(len(column.column), *(len(group.value) for group in column.groups))
        lines.append(
            f"{column.column:<{width}} {'documents':>11} {'tokens':>15} {'share':>7}  sampled: "
            f"{'documents':>11} {'tokens':>15} {'share':>7}"
        )
        lines += [
            f"{group.value:<{width}} {group.documents:>11,} {group.tokens:>15,} "
            f"{group.tokens / max(1, before):>7.1%} {group.sampled_documents:>21,} "
            f"{group.sampled_tokens:>15,} {group.sampled_tokens / max(1, after):>7.1%}"
            for group in column.groups
        ]
    return lines


def format_dataset(result: dict[str, object], noun: str = "pages") -> str:
    """Return a summary of a dataset in one line."""
    tokens = result["tokens"]
    counts = (
        [f"{count:,} {name} tokens" for name, count in tokens.items()]
        if isinstance(tokens, dict)
        else []
    )
    kept = (
        f"{result['documents']:,} of {result['pages']:,} {noun} kept, {result['bytes']:,} bytes "
        "of text"
    )
    return f"{result['folder']}: {', '.join([kept, *counts])} (fingerprint {result['fingerprint']})"
