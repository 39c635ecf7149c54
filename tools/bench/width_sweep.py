"""Train one model at several widths and learning rates, and find the best rate of each width.

    llmsys prepare train/mup-tiny
    python tools/bench/width_sweep.py [--widths 64 96 128 256] [--kinds mup standard]

Every run sees the same batches in the same order. Its score is the mean training loss of the last
fifth of the steps. Rates are tried in steps of a factor 2 until the lowest score has a neighbour on
each side; the best rate is the minimum of the parabola in the logarithm of the rate through these
three. Heads, feed-forward and experts grow in proportion to the width.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence

import torch

from llmsys.config.loading.load import load_run_config
from llmsys.config.parametrization import StandardParametrizationConfig
from llmsys.config.run import RunConfig
from llmsys.doctor.coordinate_check import widen_model
from llmsys.optim.lr_schedule import compute_learning_rate
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import init_process_group
from llmsys.train.build_engine import build_engine
from llmsys.train.build_objective import build_step_batches

# Ratio of neighbouring rates that are tried.
GRID = 2.0
# Rates further from the first one are not tried: GRID to this power.
MAX_STEPS = 8


def widen_config(name: str, width: int, kind: str, rate: float) -> RunConfig:
    """Load a config at another width, parametrization and rate."""
    config = load_run_config(name, [f"optimizer.learning_rate={rate}"])
    model = widen_model(config.model, width)
    if kind == "standard":
        model = model.model_copy(update={"parametrization": StandardParametrizationConfig()})
    return config.model_copy(update={"model": model})


def measure_score(config: RunConfig) -> float:
    """Train on one process and return the mean loss of the last fifth of the steps; inf where it
    is not finite.
    """
    device = torch.device("cpu")
    steps = build_step_batches(config, 1, 0)
    engine = build_engine(config, build_device_meshes(config.resolve_layout(1), device), device)
    losses = []
    for step in range(config.num_steps):
        result = engine.train_step(
            steps.get_micro_batches(step), compute_learning_rate(config, step + 1)
        )
        losses.append(result.loss)
        if not math.isfinite(result.loss):
            return math.inf
    last = losses[-max(1, config.num_steps // 5) :]
    return sum(last) / len(last)


def search_best_rate(
    measure: Callable[[float], float], start: float
) -> tuple[dict[float, float], float]:
    """Walk down a grid of rates until the lowest score has a neighbour on each side, and
    interpolate.

    Args:
        measure: Returns the score of a rate.
        start: First rate.

    Returns:
        Scores by rate, rising, and the minimum of the parabola in log rate through the lowest
        three.
    """
    scores: dict[int, float] = {}
    lowest = 0
    while any(lowest + offset not in scores for offset in (-1, 0, 1)) and abs(lowest) < MAX_STEPS:
        for offset in (-1, 0, 1):
            if lowest + offset not in scores:
                scores[lowest + offset] = measure(start * GRID ** (lowest + offset))
        lowest = min(scores, key=scores.__getitem__)
    below, least, above = (scores[lowest + offset] for offset in (-1, 0, 1))
    # The minimum of the parabola through three equally spaced points, in steps of the grid.
    shift = (
        (below - above) / (below - 2 * least + above) / 2 if math.isfinite(below + above) else 0.0
    )
    return {start * GRID**step: scores[step] for step in sorted(scores)}, start * GRID ** (
        lowest + shift
    )


def format_table(kind: str, found: dict[int, tuple[dict[float, float], float]]) -> str:
    """Return the scores of a parametrization as Markdown, with the best rate of each width."""
    rates = sorted({rate for scores, _ in found.values() for rate in scores})
    lines = [f"| {kind}: width | {' | '.join(f'{rate:.2g}' for rate in rates)} | best rate |"]
    lines.append("|---" * (len(rates) + 2) + "|")
    for width, (scores, best) in found.items():
        cells = " | ".join(f"{scores[rate]:.3f}" if rate in scores else "" for rate in rates)
        lines.append(f"| {width} | {cells} | {best:.2g} |")
    best_rates = [best for _, best in found.values()]
    factor = max(best_rates) / min(best_rates)
    return "\n".join([*lines, "", f"{kind}: the best rates differ by a factor of {factor:.2f}"])


def sweep_widths(
    name: str, kind: str, widths: Sequence[int], start: float
) -> dict[int, tuple[dict[float, float], float]]:
    """Return scores and best rate of every width; the search begins at the best rate of the
    width before.
    """
    found: dict[int, tuple[dict[float, float], float]] = {}
    for width in widths:
        found[width] = search_best_rate(
            lambda rate: measure_score(widen_config(name, width, kind, rate)),  # noqa: B023
            start,
        )
        scores, best = found[width]
        start = min(scores, key=scores.__getitem__)
        print(f"{kind} {width}: {best:.3g} of {scores}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run the sweep and print a table for each parametrization."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", default="train/mup-tiny", help="run to scale (default: %(default)s)"
    )
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 96, 128, 256],
        help="values of model.hidden_size",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=("mup", "standard"),
        default=["mup", "standard"],
        help="mup: as in the config",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = load_run_config(arguments.config).optimizer.learning_rate
    with init_process_group(60):
        found = {
            kind: sweep_widths(arguments.config, kind, arguments.widths, start)
            for kind in arguments.kinds
        }
    print("\n\n".join(format_table(kind, by_width) for kind, by_width in found.items()))
    print(f"{time.process_time() / 60:.1f} CPU minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
