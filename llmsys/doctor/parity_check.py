"""Compare training in every engine and layout with a reference run in one process.

Gradients are compared per parameter through Adam's first moments, weights through their change.
Adam's step has the same length for gradients of any length, so a loss alone would hide a gradient
that is twice too large.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.doctor.parity_matrix import RECOMPUTE, ParityCase
from llmsys.doctor.parity_reference import (
    RATE,
    STEPS,
    Tensors,
    Trajectory,
    compute_reference_trajectory,
)
from llmsys.doctor.parity_rows import build_micro_batches
from llmsys.doctor.rank_pool import TaskFailure, run_tasks
from llmsys.engine.engine import Engine
from llmsys.estimate.state_memory import resolve_planned_layout
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import all_gather_object, get_local_device, get_rank
from llmsys.train.build_engine import build_engine
from llmsys.train.expert_load import update_expert_balance

# Relative limits of (loss and norm, gradients and moments, weights). 16-bit runs are compared with
# fp32.
LIMITS = {"fp32": (1e-5, 1e-3, 5e-3), "bf16": (2e-2, 2e-1, 6e-1), "fp16": (5e-3, 1e-1, 4e-1)}

# Absolute limits of buffers. In 16 bits a few tokens choose another expert: three of 240 tokens
# were 0.0125 of an expert's share, and a balancing bias that moves up instead of down differs by
# twice its rate of 0.01.
BUFFERS = {"fp32": 1e-6, "bf16": 2.5e-2, "fp16": 2.5e-2}

# A tensor whose norm is below this share of the largest is compared with that share: it is mostly
# rounding (in 16 bits that concerns routers: between two almost equal experts, another one is
# chosen).
SMALL = {"fp32": 1e-2, "bf16": 1e-1, "fp16": 1e-1}


@dataclass(frozen=True)
class TrajectoryDistance:
    """Relative distance of a parity case to the reference; `worst` names the tensor farthest
    beyond its limit.
    """

    loss: float
    norm: float
    gradient: float
    weights: float
    moments: float
    worst: str
    passed: bool


def compare_to_reference(case: ParityCase, expected: Trajectory) -> TrajectoryDistance:
    """Train a parity case and return its distance on every rank. Collective."""
    return compute_distance(case.precision, train_case(case), expected)


def train_case(case: ParityCase) -> Trajectory:
    """Return the trajectory of a parity case. Collective."""
    config = case.build_run_config()
    layout = resolve_planned_layout(config)
    device = get_local_device()
    engine = build_engine(config, build_device_meshes(layout, device), device)
    _load_expert_bias(engine, case)
    start = _gather_tensors(engine, "parameter/")
    shard_arguments = {
        "rank": layout.get_data_rank(get_rank()),
        "ranks": layout.data_parallel_size,
        "micro": case.micro_sequences,
    }
    losses, norms = [], []
    gradients: Tensors = {}
    for step in range(STEPS):
        batches = build_micro_batches(
            case.parity_model, step, **shard_arguments, is_bitwise=case.engine == "bitwise"
        )
        result = engine.train_step(batches, RATE)
        update_expert_balance(engine.module)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        # After one step the first moment is a multiple of the gradient.
        if step == 0:
            gradients = _gather_tensors(engine, "first_moment/")
    moments = {
        f"1/{name}": value for name, value in _gather_tensors(engine, "first_moment/").items()
    }
    moments |= {
        f"2/{name}": value for name, value in _gather_tensors(engine, "second_moment/").items()
    }
    return Trajectory(
        losses,
        norms,
        start,
        gradients,
        _gather_tensors(engine, "parameter/"),
        moments,
        _gather_tensors(engine, "buffer/"),
    )


def compute_distance(precision: str, found: Trajectory, expected: Trajectory) -> TrajectoryDistance:
    """Return the relative distance of two trajectories.

    Args:
        precision: selects the limits: fp32, bf16 or fp16.
        found: trajectory of the case.
        expected: trajectory of the reference run.
    """
    loss = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True))
    norm = max(abs(a - b) / abs(b) for a, b in zip(found.norms, expected.norms, strict=True))
    small = SMALL[precision]
    gradient, worst_gradient = _compute_largest_difference(
        found.gradients, expected.gradients, small
    )
    weights, worst_weight = _compute_largest_difference(
        _compute_weight_changes(found), _compute_weight_changes(expected), small
    )
    moments, worst_moment = _compute_largest_difference(found.moments, expected.moments, small)
    start, _ = _compute_largest_difference(found.start, expected.start, small)
    of_loss, of_gradient, of_weights = LIMITS[precision]
    over = {
        "loss": loss / of_loss,
        # In 16 bits the norm is as inexact as the gradients it is made of.
        "gradient norm": norm / of_loss if precision == "fp32" else norm / of_gradient,
        f"gradient of {worst_gradient}": gradient / of_gradient,
        f"weights of {worst_weight}": weights / of_weights,
        f"moments {worst_moment}": moments / (2 * of_gradient),
        "weights before the first step": start / 1e-7,
        **{
            f"{name} (buffer)": apart / BUFFERS[precision]
            for name, apart in _iter_buffer_differences(found, expected)
        },
    }
    # NaN compares as false: count it as infinite.
    worst = max(over, key=lambda name: over[name] if over[name] == over[name] else float("inf"))
    passed = all(value < 1 for value in over.values())
    return TrajectoryDistance(loss, norm, gradient, weights, moments, worst, passed)


def _compute_largest_difference(
    found: Tensors, expected: Tensors, small: float
) -> tuple[float, str]:
    if found.keys() != expected.keys():
        return float(
            "inf"
        ), f"{sorted(found.keys() ^ expected.keys())[0]}, present on one side only"
    longest = max(float(value.norm()) for value in expected.values())
    apart = {
        name: float((found[name] - value).norm()) / max(float(value.norm()), small * longest)
        for name, value in expected.items()
    }
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"))
    return apart[worst], worst


def _iter_buffer_differences(
    found: Trajectory, expected: Trajectory
) -> Iterator[tuple[str, float]]:
    """Yield the largest absolute difference of each buffer; a balancing bias moves by its rate
    or not at all.
    """
    for name, buffer in expected.buffers.items():
        yield (
            name,
            float((found.buffers[name] - buffer).abs().max())
            if name in found.buffers
            else float("inf"),
        )


def _compute_weight_changes(trajectory: Trajectory) -> Tensors:
    return {name: value - trajectory.start[name] for name, value in trajectory.weights.items()}


def _load_expert_bias(engine: Engine, case: ParityCase) -> None:
    """Load the expert bias of the parity model into the engine, as a checkpoint would."""
    state = engine.get_state()
    for name, tensor in state.tensors.items():
        if name.endswith("balance_bias_E"):
            for expert, push in case.parity_model.expert_bias.items():
                tensor[expert] = push
    engine.load_state(state)


def _gather_tensors(engine: Engine, prefix: str) -> Tensors:
    tensors = engine.get_state().tensors
    names = [name for name in tensors if name.startswith(prefix)]
    own = {name.removeprefix(prefix): gather_full_tensor(tensors[name]) for name in names}
    # Other ranks of a pipeline have other tensors.
    parts = all_gather_object(own) if engine.module.shapes_elsewhere else [own]
    return {name: tensor for part in parts for name, tensor in part.items()}


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return a float32 copy of the full tensor in host memory. Collective for sharded ones."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().float().cpu().clone()


# Minimum timeout of one case of a tiny model, a hundred times the usual.
TIMEOUT_SECONDS = 120.0

# Timeout of a case over the time of the reference run: ranks share cores, and 16 bits can be slow.
REFERENCE_TIME_FACTOR = 60.0


@dataclass(frozen=True)
class ParityResult:
    """A parity case with its distance, or with the reason why there is none."""

    case: ParityCase
    distance: TrajectoryDistance | None
    failure: str = ""

    @property
    def has_passed(self) -> bool:
        """Every number is within its limit."""
        return self.distance is not None and self.distance.passed

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "cell": self.case.title,
            "passed": self.has_passed,
            "distance": None if self.distance is None else asdict(self.distance),
            "failure": self.failure,
        }


def run_parity(
    cases: Sequence[ParityCase], on_result: Callable[[ParityResult], None]
) -> list[ParityResult]:
    """Train every case on its number of ranks and compare it with the reference.

    Args:
        cases: the cases, run in order of their ranks.
        on_result: called with each result.

    Returns:
        A result for each case. A case that fails or hangs does not end the others.
    """
    began = time.monotonic()
    expected = {
        model.name: compute_reference_trajectory(model)
        for model in {case.parity_model.name: case.parity_model for case in cases}.values()
    }
    # Scaled by this machine's speed, which the reference runs have just measured.
    timeout_seconds = max(
        TIMEOUT_SECONDS, REFERENCE_TIME_FACTOR * (time.monotonic() - began) / max(len(expected), 1)
    )
    results = []
    for ranks in sorted({case.ranks for case in cases}):
        chosen = [case for case in cases if case.ranks == ranks]
        for result in _iter_results(ranks, chosen, expected, timeout_seconds):
            results.append(result)
            on_result(result)
    return results


def _iter_results(
    ranks: int, cases: Sequence[ParityCase], expected: dict[str, Trajectory], timeout_seconds: float
) -> Iterator[ParityResult]:
    """Train the cases on a pool of ranks. A case that crashes or hangs fails alone, so that the
    others are still compared.
    """
    task = partial(_compare_case, list(cases), expected)
    for number, result in run_tasks(task, range(len(cases)), ranks, timeout_seconds):
        if isinstance(result, TaskFailure):
            yield ParityResult(cases[number], None, str(result))
        else:
            yield ParityResult(cases[number], result)


def _compare_case(
    cases: list[ParityCase], expected: dict[str, Trajectory], number: int
) -> TrajectoryDistance:
    case = cases[number]
    return compare_to_reference(case, expected[case.parity_model.name])


def format_parity_table(results: Sequence[ParityResult]) -> str:
    """Format a table with a row per ranks, engine and layout and a column per precision and
    recomputation.

    Args:
        results: results of `run_parity`.

    Returns:
        The table; an entry is the largest relative difference of a gradient, or FAIL.
    """
    rows: dict[str, dict[tuple[str, str], list[ParityResult]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for result in results:
        rows[result.case.placement][result.case.precision, result.case.recompute].append(result)
    precisions = list(dict.fromkeys(result.case.precision for result in results))
    columns = [(precision, recompute) for precision in precisions for recompute in RECOMPUTE]
    width = max(len(where) for where in rows) + 2
    head = "".join(f"{f'{precision} {recompute}':>16}" for precision, recompute in columns)
    lines = [f"{'ranks engine layout':<{width}}{head}"]
    for where, cases in rows.items():
        lines.append(
            f"{where:<{width}}"
            + "".join(f"{_format_entry(cases.get(column, [])):>16}" for column in columns)
        )
    return "\n".join(lines)


def _format_entry(results: list[ParityResult]) -> str:
    if not results:
        return "–"
    if not all(result.has_passed for result in results):
        return "FAIL"
    return (
        f"{max(result.distance.gradient for result in results if result.distance is not None):.0e}"
    )


def iter_failures(results: Sequence[ParityResult]) -> Iterator[str]:
    """Describe the cases that failed.

    Args:
        results: results of `run_parity`.

    Yields:
        One line per failed case.
    """
    for result in results:
        if result.distance is None:
            yield f"{result.case.title}: {result.failure}"
        elif not result.has_passed:
            found = result.distance
            yield (
                f"{result.case.title}: {found.worst} differs (loss {found.loss:.1e}, norm "
                f"{found.norm:.1e}, gradient {found.gradient:.1e}, weights {found.weights:.1e}, "
                f"moments {found.moments:.1e})"
            )
