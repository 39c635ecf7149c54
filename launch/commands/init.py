"""Run `llmsys init`: write a commented config for what is in some folders, and print the next
command.
"""

import argparse
import json
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsys.errors import ConfigError, DataError, LlmsysError, build_missing_package_error
from llmsys.launch.commands.arguments import parse_positive_number
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.paths import parse_local_path

if TYPE_CHECKING:
    from llmsys.config.run import RunConfig
    from llmsys.data_pipeline.inspection.text_sample import TextSample
    from llmsys.launch.commands.init_inputs import FoundContents
    from llmsys.launch.commands.init_minutes import SizedRun

TEMPLATES = (
    "rule",
    "extractor",
    "reader",
    "tokenizer",
    "schedule",
    "optimizer",
    "metric",
    "mixer",
    "memory_compressed_attention",
    "convolution",
    "feed_forward",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folders to look at and the file to write."""
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        type=parse_local_path,
        help="folder of WARC, parquet, jsonl, Arrow, CSV, text or HTML files, of a prepared "
        "dataset, or of a Hugging Face model; or one of each (default: the working directory)",
    )
    parser.add_argument(
        "--output",
        type=parse_local_path,
        default=Path("my.yaml"),
        metavar="FILE",
        help="file to write; must not exist (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=parse_positive_number,
        metavar="N",
        help="measure machine and text, size model and tokens to N minutes of training, and "
        "promise minutes and bits per byte; the report compares them with the outcome",
    )
    parser.add_argument(
        "--template",
        choices=TEMPLATES,
        help="write an example of your own rule, extractor, reader, tokenizer, schedule, "
        "optimizer, metric, mixer (attention) or feed_forward instead, as a Python file",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the config and print what was found and the next commands; with --json, as one
    object.
    """
    output: Path = arguments.output
    if output.exists():
        raise ConfigError(
            f"{output} exists, and a config is not overwritten. Choose another file with --output "
            "FILE."
        )
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"{output.parent} is not a folder. Make it, or choose another --output.")
    if arguments.template is not None:
        if arguments.minutes is not None:
            raise ConfigError(
                f"--minutes sizes a training run, and --template {arguments.template} writes "
                "Python. Give one of the two."
            )
        return _write_template(arguments)
    from llmsys.config.loading.load import load_run_config
    from llmsys.launch.commands.init_config import format_config, list_next_commands
    from llmsys.launch.commands.init_inputs import find_contents

    found = find_contents(arguments.folders or [Path()])
    if arguments.minutes is not None:
        _check_minutes(arguments.minutes, found)
    _require_documents(found, is_promised=arguments.minutes is not None)
    write_bytes_atomically(output, format_config(found, output).encode())
    sized = None
    try:
        config = load_run_config(str(output))  # bases are found from the place of the file
        if found.patterns:
            sample = _measure_text_sample(config, found, arguments.minutes is not None)
            found = replace(found, text_share=None if sample is None else sample.share)
            if arguments.minutes is not None:
                sized = _plan_minutes(arguments.minutes, found, sample)
            write_bytes_atomically(output, format_config(found, output, sized).encode())
            load_run_config(str(output))
    except (LlmsysError, KeyboardInterrupt):  # or the same command would find the file and refuse
        output.unlink()
        raise
    commands = [shlex.join(command) for command in list_next_commands(found, output)]
    if arguments.json:
        result: dict[str, Any] = {
            "config": str(output),
            "found": found.describe(),
            "next": commands,
        }
        if sized is not None:
            result["promise"] = sized.promise.model_dump(mode="json")
        print(json.dumps(result))
        return 0
    print("\n".join([f"found {line}" for line in found.describe()]))
    print(f"wrote {output}")
    if sized is not None:
        from llmsys.launch.commands.init_sized_config import format_promise

        print(format_promise(sized))
    print("\nnext:\n" + "\n".join(f"  {command}" for command in commands))
    return 0


def _check_minutes(minutes: float, found: "FoundContents") -> None:
    """Raise ConfigError where a promise makes no sense."""
    from llmsys.launch.commands.init_minutes import require_minutes

    require_minutes(minutes)
    if find_spec("torch") is None:  # it measures steps, after the sample
        raise build_missing_package_error("torch")
    if found.model is not None:
        raise ConfigError(
            f"--minutes sizes a model to the time, and {found.model} has its size already. Leave "
            "out the model to train one from the start, or leave out --minutes."
        )
    if found.dataset is not None:
        raise ConfigError(
            f"--minutes chooses the vocabulary, and the dataset {found.dataset} has its tokens "
            "already. Give the folder of its texts, or leave out --minutes."
        )


def _require_documents(found: "FoundContents", *, is_promised: bool) -> None:
    """Raise ConfigError where there are too few documents to train on some and hold out others."""
    from llmsys.launch.commands.init_config import MIN_DOCUMENTS

    documents = found.num_documents
    # Of one, nothing is left to train on or to hold out; a promise needs a mean over several.
    if not documents or documents >= (MIN_DOCUMENTS if is_promised else 2):
        return
    why = (
        "--minutes promises a loss on held-out documents"
        if is_promised
        else "documents to train on and held-out ones are different ones"
    )
    where = f"{why}, and {found.patterns[0]} has {documents}, a file each."
    if found.has_html:
        raise ConfigError(f"{where} Give a folder with {MIN_DOCUMENTS} pages or more.")
    raise ConfigError(
        f"{where} Split them into {MIN_DOCUMENTS} or more, such as with: split --lines 400 "
        "--additional-suffix .txt FILE FOLDER/part-"
    )


def _plan_minutes(
    minutes: float, found: "FoundContents", sample: "TextSample | None"
) -> "SizedRun":
    from llmsys.launch.commands.init_config import estimate_text_bytes
    from llmsys.launch.commands.init_minutes import plan_run_minutes

    if sample is None:
        raise DataError(
            f"no text is kept of a sample of {found.patterns[0]}, so that no loss can be promised. "
            "Loosen the rules: write the config without --minutes, change data.rules, and see "
            "llmsys prepare."
        )
    return plan_run_minutes(minutes, estimate_text_bytes(found), sample)


def _measure_text_sample(
    config: "RunConfig", found: "FoundContents", has_minutes: bool
) -> "TextSample | None":
    """Return what a sample of documents says about the kept text."""
    from llmsys.config.data import CrawlConfig

    if not isinstance(config.data, CrawlConfig):
        return None
    from llmsys.data_pipeline.inspection.text_sample import measure_text_sample

    vocabularies: tuple[int, ...] = ()
    if has_minutes:
        from llmsys.launch.commands.init_minutes import MEASURED_VOCABULARIES

        vocabularies = MEASURED_VOCABULARIES
    return measure_text_sample(config.data, is_crawl=found.has_html, vocabularies=vocabularies)


def _write_template(arguments: argparse.Namespace) -> int:
    """Copy a template and print how to test it."""
    output: Path = arguments.output
    if output.suffix != ".py":
        raise ConfigError(
            f"--template writes Python, and {output} does not end in .py. Add --output "
            f"my_{arguments.template}s.py."
        )
    source = Path(__file__).with_name("templates") / f"{arguments.template}.py"
    write_bytes_atomically(output, source.read_bytes())
    commands = [shlex.join(["python", str(output)])]
    if arguments.json:
        print(json.dumps({"template": str(output), "next": commands}))
    else:
        print(f"wrote {output}\n\nnext:\n  {commands[0]}")
    return 0
