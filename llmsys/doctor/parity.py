"""One cell of parity on the ranks that have joined: train as the trainer would, and measure the way to the oracle.

Gradients are compared parameter by parameter through first moments, weights through how far they moved: Adam makes
steps of equal length from gradients of any length, so that a loss alone would hide a gradient that is twice too large.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.doctor.cells import Cell
from llmsys.doctor.oracle import RATE, STEPS, Tensors, Trajectory
from llmsys.doctor.rows import build_micro_batches
from llmsys.engine.engine import Engine
from llmsys.estimate.memory import planned_layout
from llmsys.parallel.group import device_of_this_rank, rank
from llmsys.parallel.mesh import make_meshes
from llmsys.train.balance import settle_experts
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
class Distance:
    """How far a cell is from the oracle, relative; `worst` names the tensor that is farthest for its limit."""

    loss: float
    norm: float
    gradient: float
    weights: float
    moments: float
    worst: str
    passed: bool

    def as_data(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measure(cell: Cell, expected: Trajectory) -> Distance:
    """Train a cell and compare it. Collective; every rank gets the distance."""
    found = trained(cell)
    return distance(cell.precision, found, expected)


def trained(cell: Cell) -> Trajectory:
    """The cell's own trajectory. Collective."""
    config = cell.config()
    layout = planned_layout(config)
    device = device_of_this_rank()
    engine = build_engine(config, make_meshes(layout, device), device)
    _push(engine, cell)
    start = _weights(engine)
    dealt = {"rank": layout.data_rank(rank()), "ranks": layout.data_ranks, "micro": cell.micro}
    losses, norms = [], []
    gradients: Tensors = {}
    for step in range(STEPS):
        batches = build_micro_batches(cell.subject, step, **dealt, is_bitwise=cell.engine == "bitwise")
        result = engine.train_step(batches, RATE)
        settle_experts(engine.module)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        if step == 0:
            gradients = _part(engine, "first_moment/")
    moments = {f"1/{name}": value for name, value in _part(engine, "first_moment/").items()}
    moments |= {f"2/{name}": value for name, value in _part(engine, "second_moment/").items()}
    return Trajectory(losses, norms, start, gradients, _weights(engine), moments, _part(engine, "buffer/"))


def distance(precision: str, found: Trajectory, expected: Trajectory) -> Distance:
    """Relative differences of two trajectories."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True))
    norm = max(abs(a - b) / abs(b) for a, b in zip(found.norms, expected.norms, strict=True))
    small = SMALL[precision]
    gradient, worst_gradient = _farthest(found.gradients, expected.gradients, small)
    weights, worst_weight = _farthest(_moved(found), _moved(expected), small)
    moments, worst_moment = _farthest(found.moments, expected.moments, small)
    start, _ = _farthest(found.start, expected.start, small)
    of_loss, of_gradient, of_weights = LIMITS[precision]
    over = {
        "loss": loss / of_loss,
        "gradient norm": norm / of_loss if precision == "fp32" else norm / of_gradient,
        f"gradient of {worst_gradient}": gradient / of_gradient,
        f"weights of {worst_weight}": weights / of_weights,
        f"moments {worst_moment}": moments / (2 * of_gradient),
        "weights before the first step": start / 1e-7,
        **{f"{name} (buffer)": apart / BUFFERS[precision] for name, apart in _buffers(found, expected)},
    }
    worst = max(over, key=lambda name: over[name] if over[name] == over[name] else float("inf"))
    passed = all(value < 1 for value in over.values())
    return Distance(loss, norm, gradient, weights, moments, worst, passed)


def _farthest(found: Tensors, expected: Tensors, small: float) -> tuple[float, str]:
    if found.keys() != expected.keys():
        return float("inf"), f"{sorted(found.keys() ^ expected.keys())[0]}, which only one side has"
    longest = max(float(value.norm()) for value in expected.values())
    apart = {
        name: float((found[name] - value).norm()) / max(float(value.norm()), small * longest)
        for name, value in expected.items()
    }
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"))
    return apart[worst], worst


def _buffers(found: Trajectory, expected: Trajectory) -> Iterator[tuple[str, float]]:
    """Largest absolute difference of each; a balancing bias moves by its rate or not at all."""
    for name, buffer in expected.buffers.items():
        yield name, float((found.buffers[name] - buffer).abs().max()) if name in found.buffers else float("inf")


def _moved(trajectory: Trajectory) -> Tensors:
    return {name: value - trajectory.start[name] for name, value in trajectory.weights.items()}


def _push(engine: Engine, cell: Cell) -> None:
    """The routing of the subject, put in as a checkpoint would be."""
    state = engine.state()
    for name, tensor in state.tensors.items():
        if name.endswith("balance_bias_E"):
            for expert, push in cell.subject.pushed.items():
                tensor[expert] = push
    engine.load(state)


def _weights(engine: Engine) -> Tensors:
    return _part(engine, "parameter/")


def _part(engine: Engine, prefix: str) -> Tensors:
    tensors = engine.state().tensors
    return {name.removeprefix(prefix): whole(tensor) for name, tensor in tensors.items() if name.startswith(prefix)}


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor in host memory, fp32. Collective for sharded ones."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().float().cpu().clone()
