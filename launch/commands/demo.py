"""Run `llmsys demo`, the whole pipeline on two shards of a sample crawl: also the program of `make
demo`.

Reads the config named by --config, and the sample crawl of the checkout or of the installed
package. Runs the verbs of `llmsys` as child processes in order. Writes one folder: the dataset,
which both engines share, and a run per engine.

Invariants:
- Each verb resumes, so the same command after a kill at any moment ends with the same files.
- SIGTERM, SIGUSR1 and SIGHUP go to the running verb: training saves, and the status is then 75.
- The last line is `bits_per_byte model=… gzip=… xz=… heldout_bytes=…`; the exit status is 0 when
  the model beats both.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import llmsys
from llmsys.errors import build_missing_package_error
from llmsys.launch.process.parent_watch import build_child_environment
from llmsys.launch.process.signal_forwarding import relay_signals_to
from llmsys.report.compressor_comparison import describe_heldout_bytes
from llmsys.storage.paths import parse_local_path

SAMPLE_CRAWL = Path("tests", "data", "sample_crawl")
"""Sample crawl in a checkout, as `data.inputs` of the config data/sample names it. A wheel holds
a copy.
"""


SHIPPED_CONFIG = "train/demo"
EXPECTED_RESULT = """\
What to expect: 1.797 to 1.805 bits per byte for the model. train.precision=auto multiplies in bf16
  where the processor does so natively, which ends at about 1.805; in fp32 it is about 1.797."""


@dataclass(frozen=True)
class DemoStep:
    """One verb of `llmsys`, and its heading."""

    verb: str
    purpose: str


STEPS = (
    DemoStep("prepare", "crawl shards to clean documents, a tokenizer and token shards"),
    DemoStep("estimate", "parameters, memory and time of the run, before it starts"),
    DemoStep("train", "a mixture-of-experts model on two processes"),
    DemoStep("evaluate", "bits per byte of held-out documents"),
    DemoStep("generate", "samples of generated text"),
    DemoStep("report", "the results on one page"),
)


@dataclass(frozen=True)
class Demo:
    """Folders of the demo, and how it calls `llmsys`."""

    config: str
    engine: str
    data_folder: Path  # shared by the runs of both engines
    run_folder: Path
    program: tuple[str, ...]
    words: tuple[str, ...] = ()  # overrides of the command line, and the place of the sample crawl

    def build_arguments(self, verb: str) -> list[str]:
        """Return the arguments after `llmsys`: the same config and overrides for every verb."""
        overrides = {
            "data.folder": self.data_folder,
            "run.folder": self.run_folder,
            "engine.kind": self.engine,
        }
        return [
            verb,
            self.config,
            *(f"{key}={value}" for key, value in overrides.items()),
            *self.words,
        ]


class VerbError(Exception):
    """A verb that ended with a status other than 0; it has printed its own message."""

    def __init__(self, verb: str, status: int) -> None:
        from llmsys.launch.train import STOPPED  # the help needs no config

        ending = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if status == STOPPED:
            ending = "was stopped, and what it did is kept"
        super().__init__(
            f"demo: `llmsys {verb}` {ending}; run the same command again to continue where it "
            "stopped"
        )
        self.status = status if status > 0 else 128 - status


def run_verb(demo: Demo, verb: str, *flags: str, capture: bool = False) -> str:
    """Run one verb to its end; return its standard output if `capture`, else ""."""
    command = [*demo.program, *demo.build_arguments(verb), *flags]
    environment = build_child_environment() | {"PYTHONUNBUFFERED": "1"}
    # redirect_stdout does not reach the standard output of a child
    output = subprocess.PIPE if capture else sys.stdout
    with (
        subprocess.Popen(command, env=environment, stdout=output, text=True) as process,
        relay_signals_to(process),
    ):
        written, _ = process.communicate()
    if process.returncode != 0:
        raise VerbError(verb, process.returncode)
    return written or ""


def run_steps(demo: Demo) -> Mapping[str, float]:
    """Run every verb under a heading with the elapsed time; return the result of the evaluation."""
    started = time.monotonic()
    evaluation: Mapping[str, float] = {}
    for number, step in enumerate(STEPS, start=1):
        minutes, seconds = divmod(round(time.monotonic() - started), 60)
        print(
            f"\n[{number}/{len(STEPS)}] {step.verb}: {step.purpose} ({minutes}:{seconds:02d} so "
            "far)",
            flush=True,
        )
        if step.verb == "evaluate":
            evaluation = json.loads(run_verb(demo, step.verb, "--json", capture=True))
            print(describe_evaluation(evaluation), flush=True)
        else:
            run_verb(demo, step.verb)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    print(f"\nDone in {minutes}:{seconds:02d}.")
    return evaluation


def describe_evaluation(evaluation: Mapping[str, float]) -> str:
    """Return a small table: the model and two compressors on the same held-out bytes."""
    rows = (
        ("the model", evaluation["bits_per_byte"], f"{evaluation['loss']:.3f} nats per token"),
        (
            "gzip -9",
            evaluation["gzip_bits_per_byte"],
            describe_heldout_bytes(evaluation["evaluated_bytes"]),
        ),
        (
            "xz -9",
            evaluation["xz_bits_per_byte"],
            describe_heldout_bytes(evaluation["evaluated_bytes"]),
        ),
    )
    return "\n".join(
        f"  {name:<10}{bits:>7.3f} bits per byte   {note}" for name, bits, note in rows
    )


def describe_results(demo: Demo) -> str:
    """Return the paths of the results, and the next steps."""
    checkpoints = sorted((demo.run_folder / "checkpoints").glob("step-*"))
    places = (
        (
            demo.data_folder,
            "the dataset: kept documents, dropped ones with the reason, tokenizer, token shards",
        ),
        (demo.run_folder, "the run: its config, versions, and every measurement in events.jsonl"),
        (checkpoints[-1] if checkpoints else demo.run_folder / "checkpoints", "the trained model"),
        (demo.run_folder / "report.html", "the report; open it in a browser"),
    )
    width = max(len(str(path)) for path, _ in places)
    lines = ["Where everything is:", *(f"  {path!s:<{width}}  {what}" for path, what in places)]
    longer = replace(demo, run_folder=demo.run_folder.with_name(f"{demo.run_folder.name}-longer"))
    commands = (
        ("write more", [*demo.build_arguments("generate"), "--prompt", "The kernel"]),
        ("train longer", [*longer.build_arguments("train"), "train.tokens=5_000_000"]),
        ("see the config", demo.build_arguments("show")),
    )
    lines += [
        "What next:",
        *(f"  {what:<14}  {format_command(demo, words)}" for what, words in commands),
    ]
    return "\n".join(lines)


def format_command(demo: Demo, arguments: Sequence[str]) -> str:
    """Return a command line that can be pasted into a shell."""
    return shlex.join([*demo.program, *arguments])


def compare_with_compressors(evaluation: Mapping[str, float]) -> tuple[str, bool]:
    """Return the last line of the demo, and whether the model needs fewer bits per byte than
    either compressor.
    """
    model, gzip, xz = (evaluation[f"{name}bits_per_byte"] for name in ("", "gzip_", "xz_"))
    size = int(evaluation["evaluated_bytes"])
    return (
        f"bits_per_byte model={model:.3f} gzip={gzip:.3f} xz={xz:.3f} heldout_bytes={size}",
        model < min(gzip, xz),
    )


def find_llmsys_command() -> tuple[str, ...]:
    """Return the words that call `llmsys` under this Python, as short as a shell accepts them."""
    installed = Path(sys.executable).with_name("llmsys")
    if not installed.exists():
        return (sys.executable, "-m", "llmsys.launch.main")
    if (found := shutil.which("llmsys")) is not None and Path(found) == installed:
        return ("llmsys",)
    return (
        str(
            installed.relative_to(Path.cwd()) if installed.is_relative_to(Path.cwd()) else installed
        ),
    )


def list_crawl_overrides(folder: Path | None = None) -> list[str]:
    """Return the override that names the shards of the sample crawl; none where `folder` is a
    checkout.

    Args:
        folder: the working directory of the verbs; the current one by default.
    """
    if ((folder or Path.cwd()) / SAMPLE_CRAWL).is_dir():
        return []
    shards = list_sample_shards()
    # JSON is YAML, and quotes whatever a path may hold
    return [f"data.inputs={json.dumps(shards)}"] if shards else []


def list_sample_shards() -> list[str]:
    """List the files of the sample crawl, of the package or of the checkout.

    Returns:
        Their paths, sorted.
    """
    package = Path(llmsys.__file__).resolve().parent
    for crawl in (package / SAMPLE_CRAWL.name, package.parent / SAMPLE_CRAWL):
        if crawl.is_dir():
            return [str(shard) for shard in sorted(crawl.glob("*.warc.gz"))]
    return []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine, the config, the folder and overrides."""
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="override values of the config",
    )
    parser.add_argument(
        "--engine",
        choices=("torch", "deepspeed"),
        default="torch",
        help="library that trains (default: %(default)s)",
    )
    parser.add_argument(
        "--config", default=SHIPPED_CONFIG, help="the config to run (default: %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=parse_local_path,
        default=Path("demo"),
        help="folder to write (default: %(default)s)",
    )
    parser.add_argument(
        "--program", help="the llmsys command to run (default: the one of this Python)"
    )


def require_engine(engine: str) -> None:
    """Raise ConfigError where the packages of an engine are not installed: preparation comes first
    and takes minutes.
    """
    for package in ("torch", "deepspeed") if engine == "deepspeed" else ("torch",):
        if find_spec(package) is None:
            raise build_missing_package_error(package)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 when the model beats both compressors, else 1 or the status of the
    failed verb.

    With --json, standard output is the evaluation as one object, and everything else goes to
    standard error.
    """
    require_engine(arguments.engine)
    program = shlex.split(arguments.program) if arguments.program else find_llmsys_command()
    words = (*list_crawl_overrides(), *arguments.overrides)
    folder = arguments.folder
    demo = Demo(
        arguments.config,
        arguments.engine,
        folder / "data",
        folder / arguments.engine,
        tuple(program),
        words,
    )
    with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
        try:
            evaluation = run_steps(demo)
        except VerbError as failure:
            print(failure, file=sys.stderr)
            return failure.status
        except KeyboardInterrupt:
            print("demo: stopped; run the same command again to continue", file=sys.stderr)
            # 128 + SIGINT, as shells give it.
            return 130
        print(describe_results(demo))
        if (arguments.config, arguments.overrides) == (SHIPPED_CONFIG, []):
            print(EXPECTED_RESULT)
    line, beats_both = compare_with_compressors(evaluation)
    if not beats_both:
        print("demo: the model does not beat both compressors", file=sys.stderr)
    print(json.dumps(evaluation) if arguments.json else f"\n{line}", flush=True)
    return 0 if beats_both else 1
