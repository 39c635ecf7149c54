"""Race llmsys, transformers' Trainer and a plain loop to a held-out loss.

Measures CPU seconds and tokens until each needs at most so many bits per byte of the same text.

    python tools/bench/time_to_loss.py [--target demo] [--seeds 0 1 2] [--systems NAME …] [--write]

Every run is a process with one thread, whose result is a file: a race that was killed goes on with
the same command, and a finished run is not repeated. The contenders train models of the demo's
shapes on the demo's ids, 2,048 a step, in the order of llmsys, each at the best rate of a
sweep with a shorter budget. `llmsys-demo` is the demo's recipe and `llmsys-small` one with fewer
pieces, a smaller model and Muon, both with its schedule in proportion to the budget. Preparing data
is not counted, nor the judge (tools/bench/race/judge.py); imports are.

A target counts as reached at the first look that finds it on all held-out bytes, without
interpolation. Prints a table in Markdown; `--write` puts it into the page of measurements.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, assert_never

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "measurements" / "time-to-loss.md"
BEGIN, END = "<!-- race -->\n", "<!-- end of race -->\n"

CONFIG = "train/demo"
# Bits per byte: what the demo ends with, and what its two compressors need for the same text.
TARGETS = {"demo": 1.805, "xz": 2.365, "gzip": 2.686}
LENGTH, SEQUENCES = 512, 4
STEP_TOKENS = LENGTH * SEQUENCES
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
# Looks of a run, evenly over its budget, and the share of the budget before the first.
LOOKS, FIRST_SHARE = 32, 0.25
# The demo's, of which each token uses a shared expert and two of eight: 5.25 million parameters.
DENSE = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
# As many parameters as the demo, and as many that a token uses: Mixtral has no shared expert.
EXPERTS = DENSE | {"intermediate_size": 256, "num_local_experts": 9, "num_experts_per_tok": 3}
TINY = {
    "vocab_size": 8192, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


# Fewer pieces, so that each is seen more often and the head costs less, and more steps.
SMALL = (
    "tokenizer.vocab_size=2048",
    "model.vocab_size=2048",
    "model.moe=null",
    "layout.expert=1",
    "model.hidden_size=128",
    "model.intermediate_size=352",
    "batch.sequence_length=256",
    "optimizer.kind=muon",
    "optimizer.learning_rate=6e-3",
    "optimizer.embedding_lr_multiplier=5",
)


class Contender(NamedTuple):
    """Another trainer: a module of tools/bench/race, and the shapes of its model."""

    kind: Literal["hugging_face", "plain_loop"]
    about: str
    shape: dict[str, int]


class Recipe(NamedTuple):
    """The demo's config with other settings, and the folder of its dataset."""

    about: str
    dataset: str
    words: tuple[str, ...] = ()


SYSTEMS: dict[str, Contender | Recipe] = {
    "trainer-llama": Contender("hugging_face", "transformers' Trainer, Llama", DENSE),
    "trainer-mixtral": Contender("hugging_face", "transformers' Trainer, Mixtral", EXPERTS),
    "plain-loop": Contender("plain_loop", "a plain loop, dense", DENSE),
    "llmsys-demo": Recipe("llmsys, the demo's recipe", "data"),
    "llmsys-small": Recipe("llmsys, small and with Muon", "data-small", SMALL),
}


class Race(NamedTuple):
    """The settings of a race.

    Attributes:
        folder: results, data and rows.
        target: bits per byte of held-out text.
        tokens: budget of a run.
        sweep_tokens: budget of a run that compares rates.
        rates: rates of the sweep.
        is_quick: tiny models, which say nothing.
    """

    folder: Path
    target: float
    tokens: int
    sweep_tokens: int
    rates: tuple[float, ...] = RATES
    is_quick: bool = False


class Result(NamedTuple):
    """A finished run."""

    parameters: int
    evaluations: list[dict[str, Any]]
    learning_rate: float | None

    def find_goal(self, target: float) -> dict[str, Any] | None:
        """Return the first look at all held-out bytes that found the target, or None."""
        return next(
            (
                look
                for look in self.evaluations
                if look["is_whole"] and look["bits_per_byte"] <= target
            ),
            None,
        )

    @property
    def best(self) -> float:
        """The lowest bits per byte of a look."""
        return min(float(look["bits_per_byte"]) for look in self.evaluations)


def main(words: Sequence[str]) -> int:
    """Run what has not finished, and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", default="demo", help=f"bits per byte, or one of {', '.join(TARGETS)}"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--tokens", type=int, default=1_703_936, help="budget of a run")
    parser.add_argument("--sweep-tokens", type=int, default=131_072, help="budget of a rate")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(RATES), help="of the sweep; one: no sweep"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/time-to-loss"))
    parser.add_argument("--quick", action="store_true", help="tiny models and budgets: a test")
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    asked = parser.parse_args(words)
    if not STEP_TOKENS <= asked.sweep_tokens <= asked.tokens:
        parser.error(
            f"--sweep-tokens is {asked.sweep_tokens}. Use {STEP_TOKENS}, a step, up to "
            f"--tokens={asked.tokens}."
        )
    target = TARGETS[asked.target] if asked.target in TARGETS else float(asked.target)
    race = Race(
        asked.folder.resolve(), target, asked.tokens, asked.sweep_tokens, tuple(asked.rates)
    )
    if asked.quick:
        race = race._replace(
            tokens=2 * STEP_TOKENS, sweep_tokens=STEP_TOKENS, rates=race.rates[:2], is_quick=True
        )
    race.folder.mkdir(parents=True, exist_ok=True)
    found = {name: [run_system(race, name, seed) for seed in asked.seeds] for name in asked.systems}
    text = format_table(race, found)
    print(text)
    if asked.write:
        write_page(PAGE, text)
    return 0


def run_system(race: Race, name: str, seed: int) -> Result:
    """Return the result of a system with a seed, from its file if it has run."""
    system = SYSTEMS[name]
    rows = prepare_rows(race, system, seed)
    steps = race.tokens // STEP_TOKENS
    common = {"rows": str(rows), "target": race.target, "seed": seed}
    result_file = race.folder / f"{name}-{race.target:g}-{race.tokens}-{seed}.json"
    match system:
        case Contender():
            rate = choose_rate(race, name, system)
            spec = common | build_contender_spec(race, system, steps, rate)
            return run_module(system.kind, spec, result_file)
        case Recipe():
            spec = common | build_recipe_spec(race, system, seed)
            return run_module("ours", spec, result_file)
        case unreachable:
            assert_never(unreachable)


def build_contender_spec(race: Race, system: Contender, steps: int, rate: float) -> dict[str, Any]:
    """Return what a contender reads besides rows, seed and target."""
    shape = system.shape if not race.is_quick else {**system.shape, **TINY}
    return {
        "shape": shape,
        "sequences": SEQUENCES,
        "steps": steps,
        "warmup": max(1, steps // 20),
        "learning_rate": rate,
        "look_every": max(1, steps // LOOKS),
        "look_first": round(steps * FIRST_SHARE),
    }


def build_recipe_spec(race: Race, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Return what a run of llmsys reads besides rows and target."""
    words = [
        f"data.folder={race.folder / recipe.dataset}",
        f"run.seed={seed}",
        # One process of one thread, as the contenders, which save nothing either.
        "launch.processes=1",
        "layout.expert=1",
        "train.threads_per_process=1",
        "checkpoint.every_steps=0",
        "generation.prompts=[]",
        "evaluation.every_steps=1",
    ]
    return {
        "config": CONFIG,
        "words": [*words, *recipe.words, *scale_schedule(race.tokens)],
        "looks": LOOKS,
        "look_share": FIRST_SHARE,
    }


def scale_schedule(tokens: int) -> list[str]:
    """Return a budget, and the warm-up and decay of the demo in proportion to it."""
    from llmsys.config.loading.load import load_run_config

    config = load_run_config(CONFIG)
    if config.schedule.kind != "wsd":
        raise SystemExit(f"{CONFIG}: its schedule is {config.schedule.kind}, and wsd is scaled")
    share = tokens / config.train.tokens
    return [
        f"train.tokens={tokens}",
        f"schedule.warmup_tokens={math.floor(config.schedule.warmup_tokens * share)}",
        f"schedule.decay_tokens={math.floor(config.schedule.decay_tokens * share)}",
    ]


def choose_rate(race: Race, name: str, system: Contender) -> float:
    """Return the rate with the lowest bits per byte after the sweep's budget, on some rows.

    One rate is taken without a sweep.
    """
    if len(race.rates) == 1:
        return race.rates[0]
    rows = prepare_rows(race, system, 0)
    steps = race.sweep_tokens // STEP_TOKENS
    scores = {}
    for rate in race.rates:
        spec = build_contender_spec(race, system, steps, rate)
        spec |= {"rows": str(rows), "target": 0, "seed": 0, "look_every": steps}
        file = race.folder / f"{name}-rate-{rate:g}-{race.sweep_tokens}.json"
        scores[rate] = run_module(system.kind, spec, file).evaluations[-1]["bits_per_byte"]
    print(f"{name}: bits per byte by rate {scores}", file=sys.stderr, flush=True)
    return min(scores, key=scores.__getitem__)


def prepare_rows(race: Race, system: Contender | Recipe, seed: int) -> Path:
    """Prepare dataset and rows that a system reads, and return the file of rows.

    The sample crawl of the checkout is what `train/demo` reads.
    """
    is_recipe = isinstance(system, Recipe)
    dataset = race.folder / (system.dataset if isinstance(system, Recipe) else "data")
    words = system.words if isinstance(system, Recipe) else ()
    tokens = 0 if is_recipe else race.tokens
    file = race.folder / f"rows-{dataset.name}-{seed}-{tokens}.npz"
    if not file.exists():
        run_command("llmsys.launch.main", "prepare", CONFIG, f"data.folder={dataset}", *words)
        run_command("tools.bench.race.rows", str(dataset), str(file), str(tokens), str(seed))
    return file


def run_module(module: str, spec: dict[str, Any], file: Path) -> Result:
    """Run a trainer in a process of its own unless its result is there, and return the result."""
    spec = spec | {"result": str(file)}
    if not file.exists():
        words = file.with_suffix(".spec")
        words.write_text(json.dumps(spec, indent=1), encoding="utf-8")
        print(f"{file.stem} …", file=sys.stderr, flush=True)
        run_command(f"tools.bench.race.{module}", str(words))
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["spec"] != spec:
        raise SystemExit(
            f"{file} is of a run with other settings. Remove it, or give another --folder."
        )
    return Result(found["parameters"], found["evaluations"], spec.get("learning_rate"))


def run_command(module: str, *words: str) -> None:
    """Run a module with one thread, its output on standard error."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}")


def format_table(race: Race, found: dict[str, list[Result]]) -> str:
    """Return the results as Markdown: medians over seeds, a seed without the target counting as
    never.
    """
    lines = [
        f"{describe_machine()}; target {race.target:g} bits per byte, one thread, "
        f"medians over seeds: {max(map(len, found.values()))}.",
        "",
        "| system | parameters | rate | tokens | CPU seconds | of the fastest | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    seconds = {name: measure_medians(race, results)[1] for name, results in found.items()}
    fastest = min(seconds.values())
    for name, results in found.items():
        tokens, cpu_seconds = measure_medians(race, results)
        first = results[0]
        rate = "" if first.learning_rate is None else f"{first.learning_rate:g}"
        goals = [result.find_goal(race.target) for result in results]
        reached = f"{sum(goal is not None for goal in goals)} of {len(goals)}"
        row = [SYSTEMS[name].about, f"{first.parameters / 1e6:.2f}M", rate]
        if math.isfinite(cpu_seconds):
            row += [f"{tokens:,.0f}", f"{cpu_seconds:.0f}", f"{cpu_seconds / fastest:.2f}"]
        else:
            last = [result.evaluations[-1] for result in results]
            best = min(result.best for result in results)
            spent = statistics.median(look["cpu_seconds"] for look in last)
            row += [f"not in {max(look['tokens'] for look in last):,}: best {best:.3f}"]
            row += [
                f"over {spent:.0f}",
                f"over {spent / fastest:.2f}" if fastest < math.inf else "",
            ]
        lines.append(f"| {' | '.join([*row, reached])} |")
    return "\n".join(lines)


def measure_medians(race: Race, results: Sequence[Result]) -> tuple[float, float]:
    """Return the median tokens and CPU seconds to the target; inf where most never reach it."""
    goals = [result.find_goal(race.target) for result in results]
    tokens, seconds = (
        statistics.median(math.inf if goal is None else float(goal[key]) for goal in goals)
        for key in ("tokens", "cpu_seconds")
    )
    return tokens, seconds


def describe_machine() -> str:
    """Return the number of cores and the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")
    return f"{os.cpu_count()} cores of {model}"


def write_page(page: Path, text: str) -> None:
    """Put a table between the marks of a page.

    Raises:
        SystemExit: the page has no such marks.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no {BEGIN.strip()} before {END.strip()}. Add both lines.")
    page.write_text(f"{before}{BEGIN}{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
