"""The `llmsys` command: `llmsys VERB CONFIG [section.key=value …]`, one grammar for every verb.

Reads the command line. Imports only the module that the verb names, so that `llmsys --help` is fast.

Exit status: 2 after an error that the user can fix, with one message; 130 after Ctrl-C. `train` and `launch` end with
the statuses of launch/train.py.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from llmsys import __version__
from llmsys.errors import LlmsysError, to_data_error

# the last two are 128 + SIGINT and 128 + SIGPIPE, as a shell reports them
MENDABLE, INTERRUPTED, OUTPUT_CLOSED = 2, 130, 141


class CommandSpec(NamedTuple):
    """Help text of a verb. Its module is launch.commands.NAME.

    A verb about folders takes no config (`takes_config=False`): its module names its own arguments.
    """

    summary: str
    example: str
    config_optional: bool = False
    takes_config: bool = True


VERBS = {
    "demo": CommandSpec(
        "run every step on a sample crawl, from web pages to a report: 4 to 7 minutes on two cores",
        "llmsys demo --folder demo --engine deepspeed",
        takes_config=False,
    ),
    "prepare": CommandSpec(
        "turn crawl shards into clean documents, a tokenizer and token shards",
        "llmsys prepare train/demo data.executor.workers=2",
    ),
    "tokenizer": CommandSpec(
        "train the tokenizer on the documents that preparation kept",
        "llmsys tokenizer train/demo tokenizer.vocab_size=8_192",
    ),
    "train": CommandSpec(
        "train on this machine, from the start or from the newest checkpoint",
        "llmsys train train/demo engine.kind=deepspeed run.folder=demo/deepspeed",
    ),
    "preflight": CommandSpec(
        "check hosts before launch: ssh, versions, clocks, disks, network, layout, data",
        "llmsys preflight train/demo nodes=first:8,second:8",
    ),
    "launch": CommandSpec(
        "train on several hosts or under Slurm, or print the commands",
        "llmsys launch train/demo nodes=127.0.0.1:2 --print",
    ),
    "evaluate": CommandSpec(
        "measure the newest checkpoint on held-out documents",
        "llmsys evaluate train/demo evaluation.max_tokens=50_000 --json",
    ),
    "generate": CommandSpec(
        "continue prompts with the newest checkpoint",
        "llmsys generate train/demo --prompt 'The kernel' generation.temperature=0.7",
    ),
    "translate": CommandSpec(
        "translate lines with the newest checkpoint of an encoder-decoder",
        "llmsys translate train/multi30k --input sentences.txt generation.num_beams=5",
    ),
    "estimate": CommandSpec(
        "estimate parameters, FLOPs, memory and, on a device, time and cost, before a run starts",
        "llmsys estimate train/demo batch.sequence_length=1024 --json",
    ),
    "plan": CommandSpec(
        "find the fastest layouts that fit a cluster, and why the others do not",
        "llmsys plan model/llama3.1-8b gpus=64 device=h100-sxm batch.sequence_length=8192 batch.sequences=256",
    ),
    "dryrun": CommandSpec(
        "run the training step of one rank of any cluster without a GPU: memory, collectives, waits, kernels",
        "llmsys dryrun train/llama-8b-64xh100 nodes=8:8 rank=17 device=h100-sxm",
    ),
    "scale": CommandSpec(
        "recommend model size and tokens for a compute budget, or fit a scaling law to your runs",
        "llmsys scale budget=1e21 unique_tokens=2e9",
        takes_config=False,
    ),
    "calibrate": CommandSpec(
        "measure this machine into a device profile for estimates",
        "llmsys calibrate --output mine.yaml --processes 2",
        takes_config=False,
    ),
    "reconcile": CommandSpec(
        "compare predicted with measured step time and memory; --update fits a device profile",
        "llmsys reconcile runs/a runs/b --update mine.yaml",
        takes_config=False,
    ),
    "inspect": CommandSpec(
        "verify a prepared dataset, decode samples of it, and trace tokens to their pages",
        "llmsys inspect demo/data --samples 100",
        takes_config=False,
    ),
    "report": CommandSpec(
        "write one HTML page about a dataset and a run",
        "llmsys report train/demo --output demo/report.html",
    ),
    "doctor": CommandSpec(
        "check on this machine that engines and layouts agree (parity), crashes lose nothing (crash), and "
        "devices compute right (device)",
        "llmsys doctor parity --processes 1,2",
        takes_config=False,
    ),
    "trace": CommandSpec(
        "list the documents of a step, or the steps and checkpoints that saw a document",
        "llmsys trace train/demo step=100",
    ),
    "replay": CommandSpec(
        "rerun one step from the nearest checkpoint and compare it with the recorded values",
        "llmsys replay train/demo step=100",
    ),
    "convert": CommandSpec(
        "convert a Hugging Face folder to a run folder, or a run folder to a Hugging Face folder",
        "llmsys convert downloads/Qwen3-0.6B runs/qwen3",
        takes_config=False,
    ),
    "show": CommandSpec(
        "print the resolved config, and mark what differs from the defaults",
        "llmsys show train/demo optimizer.learning_rate=3e-4",
        config_optional=True,
    ),
}

CONFIG_HELP = "path of a YAML file or config.json, or a name under configs/ such as train/demo"
OVERRIDE_HELP = "a value of the config, such as batch.sequence_length=1024"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(format_help(), end="")
        return 0 if words else MENDABLE
    if words[0] in ("-V", "--version"):
        print(f"llmsys {__version__}")
        return 0
    if words[0] not in VERBS:
        return _print_error(f"{words[0]!r} is not a verb.{_suggest_command(words[0])} See: llmsys --help")
    try:
        return _run_command(words[0], words[1:])
    except LlmsysError as error:
        return _print_error(str(error), error.exit_status)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `llmsys show … | head`
        # or the interpreter's own flush at exit would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except OSError as error:
        if (problem := to_data_error(error)) is None:
            raise
        return _print_error(str(problem))


def format_help() -> str:
    """Return the text of `llmsys --help`."""
    verbs = "\n".join(f"  {name:<10} {verb.summary}" for name, verb in VERBS.items())
    return (
        "usage: llmsys VERB CONFIG [section.key=value …]\n\n"
        "From raw web crawl to a trained Transformer.\n\n"
        f"verbs:\n{verbs}\n\n"
        f"  CONFIG     {CONFIG_HELP}\n"
        f"  key=value  {OVERRIDE_HELP}\n\n"
        "options:\n"
        "  -h, --help     this text; after a verb, its own\n"
        "  -V, --version  the version\n\n"
        f"example: {VERBS['show'].example}\n"
    )


def build_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one verb: the arguments of every verb, and its own."""
    verb = VERBS[name]
    parser = argparse.ArgumentParser(
        prog=f"llmsys {name}",
        description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
        epilog=f"example: {verb.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # an abbreviation could change its meaning with every new option
        allow_abbrev=False,
    )
    if verb.takes_config:
        parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP, nargs="?" if verb.config_optional else None)
        parser.add_argument("overrides", metavar="section.key=value", nargs="*", default=[], help=OVERRIDE_HELP)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    importlib.import_module(f"launch.commands.{name}").add_arguments(parser)
    return parser


def _run_command(name: str, words: Sequence[str]) -> int:
    parser = build_parser(name)
    # parse_args takes no overrides behind an option that follows CONFIG
    arguments = parser.parse_intermixed_args(words)
    if os.environ.get("LLMSYS_PARENT"):
        from launch.process.parent_watch import die_with_parent

        die_with_parent()
    from llmsys.log import configure_logging

    configure_logging()
    status: int = importlib.import_module(f"launch.commands.{name}").run(arguments)
    # a closed pipe must show while its error can still be caught
    sys.stdout.flush()
    return status


def _print_error(message: str, exit_status: int = MENDABLE) -> int:
    print(f"llmsys: error: {message}", file=sys.stderr)
    return exit_status


def _suggest_command(word: str) -> str:
    close = difflib.get_close_matches(word, VERBS, n=1)
    return f" Did you mean {close[0]}?" if close else ""


if __name__ == "__main__":
    sys.exit(main())
