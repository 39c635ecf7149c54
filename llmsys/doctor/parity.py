"""One cell of parity on the ranks that have joined: train as the trainer would, and measure the way to the oracle.

Gradients are compared parameter by parameter through first moments, weights through how far they moved: Adam makes
steps of equal length from gradients of any length, so that a loss alone would hide a gradient that is twice too large.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.doctor.cells import ParityCase
from llmsys.doctor.oracle import RATE, STEPS, Tensors, Trajectory
from llmsys.doctor.rows import build_micro_batches
from llmsys.engine.engine import Engine
from llmsys.estimate.memory import resolve_planned_layout
from llmsys.parallel.group import get_local_device, get_rank
from llmsys.parallel.mesh import build_device_meshes
from llmsys.train.balance import update_expert_balance
from llmsys.train.build_engine import build_engine

LIMITS = {"fp32": (1e-5, 1e-3, 5e-3), "bf16": (2e-2, 1.5e-1, 6e-1), "fp16": (5e-3, 1e-1, 4e-1)}
"""Of loss and norm, of gradients and moments, of weights; relative. Products in 16 bits are compared with fp32."""

BUFFERS = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-2}
"""Absolute. In 16 bits a few tokens choose another expert, and the balance follows them."""

SMALL = {"fp32": 1e-2, "bf16": 1e-1, "fp16": 1e-1}
"""A tensor shorter than this share of the longest is compared with that share: it is mostly rounding.

In 16 bits that holds for routers above all: where two experts are almost equal, another one is chosen.
"""


@dataclass(frozen=True)
class TrajectoryDistance:
    """How far a cell is from the oracle, relative; `worst` names the tensor that is farthest for its limit."""

    loss: float
    norm: float
    gradient: float
    weights: float
    moments: float
    worst: str
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def compare_to_reference(cell: ParityCase, expected: Trajectory) -> TrajectoryDistance:
    """Train a cell and compare it. Collective; every rank gets the distance."""
    found = train_case(cell)
    return compute_distance(cell.precision, found, expected)


def train_case(cell: ParityCase) -> Trajectory:
    """The cell's own trajectory. Collective."""
    config = cell.build_run_config()
    layout = resolve_planned_layout(config)
    device = get_local_device()
    engine = build_engine(config, build_device_meshes(layout, device), device)
    _load_expert_bias(engine, cell)
    start = _gather_weights(engine)
    dealt = {"rank": layout.get_data_rank(get_rank()), "ranks": layout.data_parallel_size, "micro": cell.micro_sequences}
    losses, norms = [], []
    gradients: Tensors = {}
    for step in range(STEPS):
        batches = build_micro_batches(cell.parity_model, step, **dealt, is_bitwise=cell.engine == "bitwise")
        result = engine.train_step(batches, RATE)
        update_expert_balance(engine.module)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        if step == 0:
            gradients = _gather_tensors(engine, "first_moment/")
    moments = {f"1/{name}": value for name, value in _gather_tensors(engine, "first_moment/").items()}
    moments |= {f"2/{name}": value for name, value in _gather_tensors(engine, "second_moment/").items()}
    return Trajectory(losses, norms, start, gradients, _gather_weights(engine), moments, _gather_tensors(engine, "buffer/"))


def compute_distance(precision: str, found: Trajectory, expected: Trajectory) -> TrajectoryDistance:
    """Relative differences of two trajectories."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True))
    norm = max(abs(a - b) / abs(b) for a, b in zip(found.norms, expected.norms, strict=True))
    small = SMALL[precision]
    gradient, worst_gradient = _compute_largest_difference(found.gradients, expected.gradients, small)
    weights, worst_weight = _compute_largest_difference(_compute_weight_changes(found), _compute_weight_changes(expected), small)
    moments, worst_moment = _compute_largest_difference(found.moments, expected.moments, small)
    start, _ = _compute_largest_difference(found.start, expected.start, small)
    of_loss, of_gradient, of_weights = LIMITS[precision]
    over = {
        "loss": loss / of_loss,
        "gradient norm": norm / of_loss if precision == "fp32" else norm / of_gradient,
        f"gradient of {worst_gradient}": gradient / of_gradient,
        f"weights of {worst_weight}": weights / of_weights,
        f"moments {worst_moment}": moments / (2 * of_gradient),
        "weights before the first step": start / 1e-7,
        **{f"{name} (buffer)": apart / BUFFERS[precision] for name, apart in _iter_buffer_differences(found, expected)},
    }
    worst = max(over, key=lambda name: over[name] if over[name] == over[name] else float("inf"))
    passed = all(value < 1 for value in over.values())
    return TrajectoryDistance(loss, norm, gradient, weights, moments, worst, passed)


def _compute_largest_difference(found: Tensors, expected: Tensors, small: float) -> tuple[float, str]:
    if found.keys() != expected.keys():
        return float("inf"), f"{sorted(found.keys() ^ expected.keys())[0]}, which only one side has"
    longest = max(float(value.norm()) for value in expected.values())
    apart = {
        name: float((found[name] - value).norm()) / max(float(value.norm()), small * longest)
        for name, value in expected.items()
    }
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"))
    return apart[worst], worst


def _iter_buffer_differences(found: Trajectory, expected: Trajectory) -> Iterator[tuple[str, float]]:
    """Largest absolute difference of each; a balancing bias moves by its rate or not at all."""
    for name, buffer in expected.buffers.items():
        yield name, float((found.buffers[name] - buffer).abs().max()) if name in found.buffers else float("inf")


def _compute_weight_changes(trajectory: Trajectory) -> Tensors:
    return {name: value - trajectory.start[name] for name, value in trajectory.weights.items()}


def _load_expert_bias(engine: Engine, cell: ParityCase) -> None:
    """The routing of the subject, put in as a checkpoint would be."""
    state = engine.get_state()
    for name, tensor in state.tensors.items():
        if name.endswith("balance_bias_E"):
            for expert, push in cell.parity_model.expert_bias.items():
                tensor[expert] = push
    engine.load_state(state)


def _gather_weights(engine: Engine) -> Tensors:
    return _gather_tensors(engine, "parameter/")


def _gather_tensors(engine: Engine, prefix: str) -> Tensors:
    tensors = engine.get_state().tensors
    return {name.removeprefix(prefix): gather_full_tensor(tensor) for name, tensor in tensors.items() if name.startswith(prefix)}


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor in host memory, fp32. Collective for sharded ones."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().float().cpu().clone()
