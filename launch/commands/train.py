"""Run `llmsys train`: train on this machine, from the start or from the newest checkpoint."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsys.errors import ConfigError, DataError, LostRankError
from llmsys.events import iter_events, read_latest_events
from llmsys.storage.paths import format_folder, parse_local_path

if TYPE_CHECKING:
    from llmsys.config.run import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --prepare and --export."""
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="run `llmsys prepare` first where the dataset is not prepared; one that has tokens "
        "is not touched",
    )
    parser.add_argument(
        "--export",
        metavar="FOLDER",
        type=parse_local_path,
        help="write the finished model as a Hugging Face folder too, as `llmsys convert` does",
    )
    parser.add_argument(
        "--no-probe",
        action="store_true",
        help="do not measure a machine without a device profile before the first step (about ten "
        "seconds, kept for 30 days): the step's time is then not predicted",
    )
    parser.add_argument(
        "--dtype",
        choices=("source", "float32", "bfloat16", "float16"),
        help="with --export: dtype of its weights (default: that of the Hugging Face folder that "
        "the run continues, else that of the checkpoint)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks unless the run is finished, and print the final evaluation."""
    from llmsys.config.loading.load import load_run_config
    from llmsys.estimate.device_profile import MACHINE_PROFILE, NOT_MEASURED
    from llmsys.launch.launchers.local import run_local_ranks
    from llmsys.launch.process.run_requirements import require_packages, require_startable

    config = load_run_config(arguments.config, arguments.overrides)
    require_packages(config)  # before a preparation, which may take hours
    require_export(config, arguments.export, arguments.dtype)
    if arguments.prepare:
        prepare_missing_dataset(config)
    require_startable(config, [arguments.config, *arguments.overrides])
    if is_finished(config):
        result = read_final_evaluation(config.run.folder)
        message = (
            f"{format_folder(config.run.folder)} is finished: {count_steps(config)} steps. To "
            "train longer, raise train.tokens in a new run.folder."
        )
    else:
        if arguments.no_probe:
            os.environ[MACHINE_PROFILE] = NOT_MEASURED
        run_local_ranks(config, [arguments.config, *arguments.overrides])
        # a launcher that was killed may exit with 0
        require_finish(config)
        result = read_final_evaluation(config.run.folder)
        message = f"trained {count_steps(config)} steps into {format_folder(config.run.folder)}"
    if arguments.export is not None:
        from llmsys.convert.exported_logits import compare_exported_logits
        from llmsys.convert.to_hugging_face import convert_to_hugging_face

        made = convert_to_hugging_face(config.run.folder, arguments.export, dtype=arguments.dtype)
        compared = compare_exported_logits(config.run.folder, made, arguments.dtype)
        message = f"{message}\nwrote {made}\n{compared.format()}"
    lines = [message, format_evaluation(result), *_list_promise_lines(config)]
    print(json.dumps(result) if arguments.json else "\n".join(lines))
    return 0


def _list_promise_lines(config: "RunConfig") -> list[str]:
    """Return what `llmsys init --minutes` promised, and the outcome."""
    if config.promise is None:
        return []
    from llmsys.report.promise_section import (
        compare_promise,
        describe_trained_tokens,
        format_promise_lines,
    )

    events = list(iter_events(config.run.folder / "events.jsonl"))
    lines = format_promise_lines(compare_promise(config.promise, config.train.tokens, events))
    trained = [event["tokens"] for event in events if event["event"] == "finish"]
    fitted = describe_trained_tokens(config.promise, trained[-1] if trained else None)
    return [*lines, fitted] if fitted else lines


def require_export(config: "RunConfig", folder: Path | None, dtype: str | None) -> None:
    """Raise ConfigError for an export that would fail at the end of the run."""
    if folder is None:
        if dtype is not None:
            raise ConfigError(
                f"--dtype {dtype} is for the exported weights. Give --export FOLDER too, or leave "
                "it out."
            )
        return
    if dtype == "source" and not _is_from_hugging_face(config):
        raise ConfigError(
            "--dtype source is for runs that continue a Hugging Face folder, by train.init_from. "
            "Name a dtype."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"--export {folder} exists already. Name another folder, or remove it first."
        )
    from llmsys.config.export.exported_model import choose_run_export

    # an architecture that no model type of Hugging Face has
    choose_run_export(config)


def _is_from_hugging_face(config: "RunConfig") -> bool:
    from llmsys.config.export.kept_folder import HUGGING_FACE, find_run_of_checkpoint

    folders = [config.run.folder]
    if (source := config.train.init_from or config.train.branch_from) is not None:
        folders.append(find_run_of_checkpoint(source))
    return any((folder / HUGGING_FACE).is_dir() for folder in folders)


def prepare_missing_dataset(config: "RunConfig") -> None:
    """Prepare the dataset of a config unless it has tokens already. A mixture has no inputs of
    its own to prepare.
    """
    from llmsys.dataset.manifest import load_manifest
    from llmsys.dataset.remote_dataset import is_prepared

    folder = config.data.folder
    if config.data.kind == "mixture" or (is_prepared(folder) and load_manifest(folder).splits):
        return
    from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
    from llmsys.launch.commands.prepare import format_skipped
    from llmsys.log import get_logger

    manifest = prepare_dataset(config)
    tokens = ", ".join(f"{split.tokens:,} {name} tokens" for name, split in manifest.splits.items())
    for line in (*format_skipped(manifest), f"prepared {format_folder(folder)}: {tokens}"):
        get_logger(__name__).info("%s", line)


def count_steps(config: "RunConfig") -> int:
    """Return the steps of a run; of a batch that grows by the noise scale, with the doublings of
    its events.
    """
    from llmsys.train.recorded_changes import load_recorded_changes

    return load_recorded_changes(config).num_steps


def is_finished(config: "RunConfig") -> bool:
    """Return whether the run folder holds the intact last checkpoint of these data, evaluated and
    sampled. Its settings are those of the config: `require_resumable_settings` has compared them.
    """
    events, num_steps = config.run.folder / "events.jsonl", count_steps(config)
    checkpoint = config.run.folder / "checkpoints" / f"step-{num_steps:08d}"
    if not events.exists() or not checkpoint.exists():
        return False
    if not any(
        event["event"] == "finish" and event["step"] == num_steps
        for event in read_latest_events(events)
    ):
        return False
    from llmsys.config.data import list_dataset_folders
    from llmsys.dataset.manifest import combine_fingerprints, load_manifest
    from llmsys.dataset.remote_dataset import is_prepared
    from llmsys.train.checkpoint_record import find_checkpoint_error, read_record

    folders = list_dataset_folders(config.data)
    if find_checkpoint_error(checkpoint) is not None or not all(map(is_prepared, folders)):
        return False
    now = combine_fingerprints([load_manifest(folder).fingerprint for folder in folders])
    return bool(read_record(checkpoint)["run"].get("data_fingerprint") == now)


def require_finish(config: "RunConfig") -> None:
    """Raise LostRankError unless the events record the last step. A launcher that is killed may
    exit with 0.
    """
    events, num_steps = config.run.folder / "events.jsonl", count_steps(config)
    seen = read_latest_events(events) if events.exists() else []
    if not any(event["event"] == "finish" and event["step"] == num_steps for event in seen):
        raise LostRankError(
            f"training stopped: its launcher ended with status 0 before step {num_steps}, "
            "probably because it was killed. Checkpoints are intact: run the same command again "
            f"to continue from the newest one in {config.run.folder}."
        )


def read_final_evaluation(folder: Path) -> dict[str, Any]:
    """Return the newest evaluation in the run's events; raise DataError without one."""
    evaluations = [
        event
        for event in read_latest_events(folder / "events.jsonl")
        if event["event"] == "evaluation"
    ]
    if not evaluations:
        raise DataError(
            f"{folder / 'events.jsonl'} has no evaluation, which is written at the end of a run. "
            f"Evaluate its newest checkpoint with: llmsys evaluate CONFIG run.folder={folder}."
        )
    return {key: value for key, value in evaluations[-1].items() if key not in ("time", "event")}


def format_evaluation(result: dict[str, Any]) -> str:
    """Return an evaluation as text: held-out data, each source of a mixture, and each set of
    questions.
    """
    sources = (f"{name}: {_format_heldout(one)}" for name, one in result.get("sources", {}).items())
    answers = (_format_answers(name, one) for name, one in result.get("sets", {}).items())
    metrics = (f"{name}: {one['value']:.6g}" for name, one in result.get("metrics", {}).items())
    return "\n".join([_format_heldout(result), *metrics, *sources, *answers])


def _format_answers(name: str, one: dict[str, Any]) -> str:
    if "accuracy" not in one:  # a task of the harness, whose metrics have other names
        metrics = (
            f"{metric} {value:.4f}" for metric, value in one.items() if metric != "questions"
        )
        return f"{name}: {', '.join(metrics)} ({one['questions']:,} questions)"
    return (
        f"{name}: {one['accuracy']:.2%} of {one['questions']:,} questions right, "
        f"{one['accuracy_per_byte']:.2%} by likelihood per byte, {one['accuracy_per_token']:.2%} "
        "per token"
    )


def _format_heldout(result: dict[str, Any]) -> str:
    from llmsys.report.compressor_comparison import describe_heldout_bytes

    if "bits_per_byte" not in result:
        return (
            f"held-out targets: {result['loss']:.4f} nats each, perplexity "
            f"{result['perplexity']:.3f}, {result['accuracy']:.2%} predicted right "
            f"({result['evaluated_targets']:,} targets)"
        )
    return (
        f"held-out documents: {result['loss']:.4f} nats per token, {result['bits_per_byte']:.4f} "
        f"bits per byte ({result['evaluated_tokens']:,} tokens, {result['evaluated_bytes']:,} "
        f"bytes); the same bytes take {result['gzip_bits_per_byte']:.4f} with gzip -9 and "
        f"{result['xz_bits_per_byte']:.4f} with xz -9 "
        f"({describe_heldout_bytes(result['evaluated_bytes'])})"
    )
