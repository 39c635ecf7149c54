"""Run `llmsys trace`: list the documents of a step, the steps and checkpoints that saw a document,
or the documents with the highest and the lowest loss.
"""

import argparse
import json
from typing import Any

from llmsys.errors import ConfigError
from llmsys.launch.commands.arguments import parse_count, split_arguments

OWN_NAMES = ("step", "url", "document")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --worst, and help: step=, url= or document= is given among the overrides."""
    parser.add_argument(
        "--worst",
        type=parse_count(1),
        metavar="N",
        help="list the N documents with the highest and the N with the lowest loss against the "
        "mean of their steps, with text; needs a run with train.record_document_losses=true",
    )
    parser.epilog = (
        "step=N lists documents; url=URL or document=ID lists steps and checkpoints; --worst N "
        f"lists documents by loss.\n{parser.epilog}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; with --json, as one object."""
    asked, words = split_arguments(arguments.overrides, OWN_NAMES)
    if len(asked) + (arguments.worst is not None) != 1:
        raise ConfigError("Give exactly one of step=N, url=URL, document=ID or --worst N.")
    from llmsys.config.loading.load import load_run_config
    from llmsys.config.loading.trusted_run import require_trusted_run
    from llmsys.launch.process.run_requirements import require_datasets

    config = load_run_config(arguments.config, words)
    require_trusted_run(config, "text")
    if "step" in asked and not asked["step"].isdigit():
        raise ConfigError(f"step={asked['step']} is not a step. Use a number, counted from 1.")
    require_datasets(config, [arguments.config, *words], "a trace")
    if arguments.worst is not None:
        return _print_extremes(config, arguments.worst, arguments.json)
    from llmsys.doctor.document_trace import DocumentTracer, list_checkpoints_after, read_progress

    tracer = DocumentTracer(config)
    if "step" in asked:
        return _print_documents(tracer, int(asked["step"]), arguments.json)
    places = tracer.locate_document(**asked)
    done, refused = read_progress(config.run.folder)
    steps = sorted(
        {step for place in places for step in tracer.list_steps_with_document(place, done)}
    )
    learnt = [step for step in steps if step not in refused]
    checkpoints = list_checkpoints_after(config.run.folder, learnt)
    answer: dict[str, Any] = {
        **asked,
        "steps": learnt,
        "refused_steps": [step for step in steps if step in refused],
        "steps_done": done,
        "checkpoints": checkpoints,
    }
    if arguments.json:
        print(json.dumps(answer))
        return 0
    print(
        f"{len(learnt)} of {done} steps trained on it: {', '.join(map(str, learnt)) or 'none yet'}"
    )
    if answer["refused_steps"]:
        print(
            "skipped steps, which changed no weight: "
            f"{', '.join(map(str, answer['refused_steps']))}"
        )
    print(f"checkpoints trained on it: {', '.join(checkpoints) or 'none'}")
    return 0


def _print_extremes(config: Any, count: int, as_json: bool) -> int:
    from llmsys.doctor.loss_extremes import format_loss_extremes, list_loss_extremes
    from llmsys.train.remote_run import fetch_run

    fetch_run(config.run.folder)
    found = list_loss_extremes(config, count)
    print(json.dumps(found, ensure_ascii=False) if as_json else format_loss_extremes(found))
    return 0


def _print_documents(tracer: Any, step: int, as_json: bool) -> int:
    documents = tracer.list_step_documents(step)
    if as_json:
        print(json.dumps({"step": step, "documents": documents}, ensure_ascii=False))
        return 0
    from llmsys.dataset.manifest_section import format_record_place

    print(f"step {step}: {len(documents)} documents")
    for one in documents:
        source = f"{one['source']}: " if one["source"] else ""
        print(
            f"{one['id']}  {source}{format_record_place(one['file'], one['offset'])}  "
            f"{_describe_url(one['url'])}"
        )
    return 0


def _describe_url(url: str | None) -> str:
    """Return the URL, or why there is none: its document is no longer kept, or never had one."""
    if url is None:
        return "(its text no longer exists)"
    return url or "(it has no URL)"
