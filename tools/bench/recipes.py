"""Run the recipes of configs/recipes one after another, hold a scaling law against one of them, and
write their table.

    python tools/bench/recipes.py [--folder runs/recipes] [--only NAME …] [--write]

A run that has finished is not repeated, and one that was interrupted continues. `--write` puts
tables and curves into configs/recipes. Times are CPU seconds of all processes, start and evaluation
included: other work on the machine changes them least. The translation needs Multi30k
(configs/README.md); the chats are written by tools/recipe_chats.py.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmsys.dataset.token_shards import open_tokens
from llmsys.estimate.scaling.law_fit import LawFit, fit_law, load_training_runs
from llmsys.estimate.summary_table import format_count
from llmsys.events import Event, read_latest_events
from tools.recipe_chats import write_chats

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "configs" / "recipes" / "README.md"
LADDER = ("ladder-32", "ladder-48", "ladder-64", "ladder-96", "ladder-128")
LADDER_TOKENS = (131_072, 262_144, 524_288)
# Predicted by the law of the ladder, which has not seen it.
PREDICTED = "dense"
# Tuned on chats after the run that it takes its weights from; its loss is that of answers.
CHAT = "chat"
RECIPES = (PREDICTED, "moe", "mla", "encoder", "translation", CHAT)
# Pixels of a panel, and of its margins.
PANEL, MARGIN = 300, 56
COLOURS = ("#444444", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#d62728")
Curve = tuple[str, list[float], list[float]]


class Run(NamedTuple):
    """One training: a config of configs/recipes, and its tokens where they differ from the
    config's.
    """

    recipe: str
    tokens: int | None = None

    @property
    def name(self) -> str:
        """Folder of the run."""
        return self.recipe if self.tokens is None else f"{self.recipe}-{self.tokens}"


STEPS_OF_LADDER = tuple(Run(recipe, tokens) for recipe in LADDER for tokens in LADDER_TOKENS)
RUNS = (*STEPS_OF_LADDER, *map(Run, RECIPES))


def main() -> int:
    """Train what has not finished, and print or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/recipes"), help="default: %(default)s"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="recipes to train (default: all), without tables"
    )
    parser.add_argument(
        "--write", action="store_true", help="write tables and curves into configs/recipes"
    )
    arguments = parser.parse_args()
    for run in RUNS:
        if not arguments.only or run.recipe in arguments.only:
            train_recipe(run, arguments.folder)
    if arguments.only:
        return 0
    text = "\n".join(iter_result_lines(arguments.folder))
    print(text)
    if arguments.write:
        write_results(text, arguments.folder)
    return 0


def train_recipe(run: Run, folder: Path) -> None:
    """Prepare and train one run, and write its cost, unless it has finished."""
    target = folder / run.name
    if (target / "cost.json").exists():
        return
    tokens = [] if run.tokens is None else [f"train.tokens={run.tokens}"]
    if run.recipe == CHAT:
        write_chats(Path("runs/recipes/chats"))
    seconds = measure_children_seconds()
    run_llmsys("prepare", f"recipes/{run.recipe}")
    prepared = measure_children_seconds()
    run_llmsys("train", f"recipes/{run.recipe}", f"run.folder={target}", *tokens)
    cost = {
        "cpu_seconds": measure_children_seconds() - prepared,
        "prepare_cpu_seconds": prepared - seconds,
    }
    if run.recipe == "translation":
        cost |= {
            "score": json.loads(
                run_llmsys("evaluate", f"recipes/{run.recipe}", f"run.folder={target}", "--json")
            )
        }
    (target / "cost.json").write_text(json.dumps(cost), encoding="utf-8")


def run_llmsys(*words: str) -> str:
    """Run one command of llmsys on one thread per process, and return its output."""
    command = [sys.executable, "-m", "llmsys.launch.main", *words]
    print("$ llmsys", *words, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, text=True
    ).stdout


def measure_children_seconds() -> float:
    """Return the CPU seconds of all finished child processes."""
    usage: Any = resource.getrusage(resource.RUSAGE_CHILDREN)
    return float(usage.ru_utime + usage.ru_stime)


class Result(NamedTuple):
    """The events of a finished run and its cost."""

    run: Run
    events: list[Event]
    cost: dict[str, Any]

    def get_last(self, kind: str) -> Event:
        """Return the last event of a kind."""
        return [event for event in self.events if event["event"] == kind][-1]

    def build_curve(self) -> Curve:
        """Return name, tokens and training loss of the logged steps."""
        steps = [event for event in self.events if event["event"] == "step"]
        return (
            self.run.name,
            [event["tokens"] for event in steps],
            [event["loss"] for event in steps],
        )


def load_result(run: Run, folder: Path) -> Result:
    """Read the events and the cost of a finished run."""
    target = folder / run.name
    cost = json.loads((target / "cost.json").read_text(encoding="utf-8"))
    return Result(run, read_latest_events(target / "events.jsonl"), cost)


def iter_result_lines(folder: Path) -> Iterator[str]:
    """Yield the tables of the recipes and of the ladder, as Markdown."""
    nats, bits = compute_unigram_loss(folder / "sample-data")
    yield (
        "| recipe | parameters, active | tokens | CPU seconds | nats per target | score | state "
        "hash |"
    )
    yield "|---|---|---|---|---|---|---|"
    recipes = [load_result(Run(name), folder) for name in RECIPES]
    yield from map(format_recipe, recipes)
    yield ""
    yield (
        f"Frequencies of single tokens alone give {nats:.3f} nats and {bits:.3f} bits per byte on "
        "the held-out text of the sample crawl, gzip "
        f"{recipes[0].get_last('evaluation')['gzip_bits_per_byte']:.3f} and xz "
        f"{recipes[0].get_last('evaluation')['xz_bits_per_byte']:.3f} bits per byte."
    )
    yield ""
    ladder = [load_result(run, folder) for run in STEPS_OF_LADDER]
    yield (
        "| width | parameters | "
        + " | ".join(f"{tokens:,} tokens" for tokens in LADDER_TOKENS)
        + " | CPU seconds |"
    )
    yield "|---|---|" + "---|" * len(LADDER_TOKENS) + "---|"
    for recipe in LADDER:
        same = [result for result in ladder if result.run.recipe == recipe]
        losses = " | ".join(f"{result.get_last('evaluation')['loss']:.3f}" for result in same)
        size = format_count(same[0].get_last("start")["parameters"])
        seconds = sum(result.cost["cpu_seconds"] for result in same)
        yield f"| {recipe.removeprefix('ladder-')} | {size} | {losses} | {seconds:.0f} |"
    yield ""
    yield from iter_law_lines(folder, recipes[0])
    total = sum(
        result.cost["cpu_seconds"] + result.cost["prepare_cpu_seconds"]
        for result in [*ladder, *recipes]
    )
    yield ""
    yield f"All of it took {total / 60:.0f} CPU minutes."


def compute_unigram_loss(dataset: Path) -> tuple[float, float]:
    """Return nats per token and bits per byte of held-out text by the frequencies of tokens in
    the training text.
    """
    train, heldout = (open_tokens(dataset, split) for split in ("train", "heldout"))
    ids, held = (
        np.concatenate([shards.get_tokens(number) for number in range(len(shards.lengths))])
        for shards in (train, heldout)
    )
    # no token has probability 0
    counts = np.bincount(ids, minlength=int(max(ids.max(), held.max())) + 1) + 1.0
    nats = float(-np.log(counts / counts.sum())[held].mean())
    return nats, nats * len(held) / float(heldout.text_bytes.sum()) / math.log(2)


def format_recipe(result: Result) -> str:
    """Return one row of the table of recipes."""
    start, evaluation = result.get_last("start"), result.get_last("evaluation")
    sizes = f"{format_count(start['parameters'])}, {format_count(start['parameters_active'])}"
    if result.run.recipe == "translation":
        score = f"BLEU {result.cost['score']['bleu']:.2f}"
    elif "sets" in evaluation:
        score = (
            f"{evaluation['sets']['questions']['accuracy']:.1%} of questions with four choices "
            "right"
        )
    elif "bits_per_byte" in evaluation:
        score = f"{evaluation['bits_per_byte']:.3f} bits per byte"
    else:
        score = f"{evaluation['accuracy']:.1%} of masked tokens right"
    return (
        f"| `{result.run.recipe}` | {sizes} | {evaluation['tokens']:,} | "
        f"{result.cost['cpu_seconds']:.0f} | {evaluation['loss']:.3f} | {score} | "
        f"`{result.get_last('state_hash')['state_hash']}` |"
    )


def iter_law_lines(folder: Path, predicted: Result) -> Iterator[str]:
    """Yield the law that the ladder gives, and its prediction of a larger and longer run beside
    that run.
    """
    fit = fit_law(load_training_runs([folder / run.name for run in STEPS_OF_LADDER]))
    law, start, evaluation = fit.law, predicted.get_last("start"), predicted.get_last("evaluation")
    size, tokens, loss = start["parameters_active"], evaluation["tokens"], evaluation["loss"]
    best, (low, high) = predict_loss(fit, size, tokens)
    yield (
        f"Law of the {len(STEPS_OF_LADDER)} runs (`llmsys scale fit`): L = {law.irreducible:.3g} "
        f"+ {law.parameter_factor:.3g} / N^{law.alpha:.3f} + {law.token_factor:.3g} / "
        f"D^{law.beta:.3f}, largest residual {max(map(abs, fit.residuals)):.2%}."
    )
    yield ""
    yield (
        f"`{predicted.run.recipe}` ({format_count(size)} parameters, {tokens:,} tokens, "
        f"{size * tokens / law.origin.spans[2].high * 6:.1f} times the FLOPs of the largest run "
        f"of the ladder): predicted {best:.3f} nats ({low:.3f} to {high:.3f}, 5 to 95 % of "
        f"resampled ladders), measured {loss:.3f}: {loss / best - 1:+.1%}, "
        f"{'inside' if low <= loss <= high else 'outside'} of the interval."
    )


def predict_loss(fit: LawFit, size: float, tokens: float) -> tuple[float, tuple[float, float]]:
    """Return the predicted loss of a run in nats, and its interval of 5 to 95 %."""
    return fit.law.predict_loss(size, tokens), fit.compute_interval(
        lambda law: law.predict_loss(size, tokens)
    )


def write_results(text: str, folder: Path) -> None:
    """Write tables and curves next to the configs."""
    before, _, rest = README.read_text(encoding="utf-8").partition("<!-- results -->\n")
    _, _, after = rest.partition("<!-- end of results -->\n")
    README.write_text(
        f"{before}<!-- results -->\n{text}\n<!-- end of results -->\n{after}", encoding="utf-8"
    )
    recipes = [load_result(Run(name), folder).build_curve() for name in RECIPES if name != CHAT]
    longest = [load_result(Run(name, LADDER_TOKENS[-1]), folder).build_curve() for name in LADDER]
    longest.append(load_result(Run(PREDICTED), folder).build_curve())
    panels = (recipes, longest, [load_result(Run(CHAT), folder).build_curve()])
    (README.parent / "curves.svg").write_text(draw_panels(panels), encoding="utf-8")


def draw_panels(panels: Sequence[Sequence[Curve]]) -> str:
    """Return an SVG with one panel of training losses over tokens per list of curves."""
    width, height = len(panels) * (PANEL + 2 * MARGIN), PANEL + MARGIN + 20 * max(map(len, panels))
    body = "".join(
        draw_panel(curves, MARGIN + number * (PANEL + 2 * MARGIN))
        for number, curves in enumerate(panels)
    )
    style = 'font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f"{style}>{body}</svg>\n"
    )


def draw_panel(curves: Sequence[Curve], left: float) -> str:
    """Return the lines, axes and legend of one panel whose left edge is at `left`."""
    longest = max(tokens[-1] for _, tokens, _ in curves)
    low, high = (
        math.floor(min(min(losses) for *_, losses in curves)),
        math.ceil(max(max(x) for *_, x in curves)),
    )
    top, bottom = 20, 20 + PANEL
    parts = [f'<path d="M{left},{top}V{bottom}H{left + PANEL}" fill="none" stroke="#888"/>']
    for loss in range(low, high + 1):
        y = bottom - PANEL * (loss - low) / (high - low)
        parts.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{loss}</text>')
    parts.append(
        f'<text x="{left + PANEL}" y="{bottom + 16}" text-anchor="end">{longest:,.0f} tokens</text>'
    )
    parts.append(f'<text x="{left + 6}" y="{top - 6}">training loss, nats per target</text>')
    for number, (name, tokens, losses) in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{left + PANEL * x / longest:.1f},{bottom - PANEL * (y - low) / (high - low):.1f}"
            for x, y in zip(tokens, losses, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        parts.append(
            f'<text x="{left + 10}" y="{bottom + 34 + 16 * number}" fill="{colour}">{name}</text>'
        )
    return "".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
