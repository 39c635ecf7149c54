"""Steps of a parity case with something between them that must not change them: an evaluation, a
text, a replay.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, assert_never, cast

from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.doctor.parity_check import gather_full_tensor
from llmsys.doctor.parity_models import SEQUENCES, ParityModel
from llmsys.doctor.parity_reference import RATE, SEED, STEPS, Trajectory
from llmsys.doctor.parity_rows import build_micro_batches
from llmsys.engine.engine import Engine
from llmsys.estimate.state_memory import resolve_planned_layout
from llmsys.generate.text_generation import generate_texts
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import (
    all_gather_object,
    get_local_device,
    get_rank,
    get_world_size,
)
from llmsys.train.build_engine import build_engine
from llmsys.train.expert_load import update_expert_balance

Settings = dict[str, Any]
Event = Literal["nothing", "evaluation", "text", "replay"]

# Relative differences from sums in another order, in a few steps of tiny models in fp32. Adam's
# step has the same length for a gradient of any size, so where a gradient is small its rounding is
# large in weights and later moments.
ROUNDING = {"losses": 1e-5, "norms": 1e-5, "gradients": 1e-5, "weights": 1e-4, "moments": 1e-4}


class Characters:
    """A tokenizer with one token per character."""

    vocab_size, bos_id, eos_id = 61, 0, 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 60 + 1 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(64 + token) for token in ids)


def build_case_config(
    parity_model: ParityModel, optimizer: Any, layout: Settings, **sections: Settings
) -> RunConfig:
    """The run of a parity model in micro-batches of one sequence on the ranks that have joined."""
    settings: Settings = {
        "model": parity_model.model,
        "optimizer": optimizer,
        "layout": layout,
        "launch": {"processes": get_world_size()},
        "run": {"seed": SEED},
        "batch": {
            "sequence_length": parity_model.length,
            "sequences": SEQUENCES,
            "micro_sequences": 1,
        },
        "train": {
            "precision": "fp32",
            "threads_per_process": 1,
            "tokens": 10 * SEQUENCES * parity_model.length,
        },
    }
    # FSDP2 unless a case names its engine: most of what happens between steps happens to it.
    engine = {"kind": "torch"} | sections.get("engine", {})
    if engine["kind"] == "torch":
        engine = {"data_parallel": "fsdp"} | engine
    for name, section in (sections | {"engine": engine}).items():
        settings[name] = settings.get(name, {}) | section
    return RunConfig.model_validate(settings)


def train_around_event(
    config: RunConfig, parity_model: ParityModel, event: Event, steps: int = STEPS
) -> Trajectory:
    """Train some steps with the event before each of them, and no save. Collective."""
    layout, device = resolve_planned_layout(config), get_local_device()
    engine = build_engine(config, build_device_meshes(layout, device), device)
    start = gather_tensors(engine, "parameter/")
    rank, ranks = layout.get_data_rank(get_rank()), layout.data_parallel_size
    losses, norms = [], []
    gradients: dict[str, Any] = {}
    for step in range(steps):
        # Every ranks-th one, as bitwise mode assigns them.
        batches = build_micro_batches(
            parity_model, step, rank=0, ranks=1, micro=1, is_bitwise=False
        )[rank::ranks]
        run_event(engine, event, batches, rank)
        result = engine.train_step(batches, RATE)
        update_expert_balance(engine.module)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        if step == 0:
            gradients = gather_tensors(engine, "first_moment/")
    moments = {
        f"1/{name}": value for name, value in gather_tensors(engine, "first_moment/").items()
    }
    moments |= {
        f"2/{name}": value for name, value in gather_tensors(engine, "second_moment/").items()
    }
    weights, buffers = gather_tensors(engine, "parameter/"), gather_tensors(engine, "buffer/")
    return Trajectory(losses, norms, start, gradients, weights, moments, buffers)


def run_event(engine: Engine, event: Event, batches: list[Batch], rank: int) -> None:
    """What a run does between steps, apart from a save."""
    match event:
        case "nothing":
            pass
        case "evaluation":
            engine.compute_logits(batches[0])
        case "text":
            generate_texts(
                engine.module, cast(Any, Characters()), ("AB", "longer"), max_new_tokens=2
            )
        case "replay":
            engine.compute_logits(batches[0])
            cast(Any, engine).repeat_gradients(batches, rank)
        case unreachable:
            assert_never(unreachable)


def gather_tensors(engine: Engine, prefix: str) -> dict[str, Any]:
    """Full tensors of all stages by name; copies on several ranks must have the same bits."""
    tensors = engine.get_state().tensors
    own = {name: gather_full_tensor(tensors[name]) for name in tensors if name.startswith(prefix)}
    merged: dict[str, Any] = {}
    for part in all_gather_object({name: tensor.numpy() for name, tensor in own.items()}):
        for name, value in part.items():
            known = merged.setdefault(name.removeprefix(prefix), value)
            assert (known == value).all(), f"{name} differs between ranks"
    return merged


def find_farthest(
    found: Trajectory, expected: Trajectory, bands: Mapping[str, float] | None = None
) -> tuple[float, str]:
    """The largest relative difference of two trajectories as a multiple of what is allowed, and its
    place.

    `bands` are other limits than `ROUNDING` for names that begin so, such as `2/` of second
    moments.
    """
    apart: dict[str, float] = {}
    for kind in ("losses", "norms"):
        for step, (one, other) in enumerate(
            zip(getattr(found, kind), getattr(expected, kind), strict=True), start=1
        ):
            apart[f"{kind}, step {step}"] = abs(one - other) / abs(other) / ROUNDING[kind]
    for kind in ("gradients", "moments", "weights"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        # A tensor that is rounding and nothing else is compared with the largest one.
        small = 1e-3 * max(_compute_norm(value) for value in theirs.values())
        for name, value in theirs.items():
            wide = [band for prefix, band in (bands or {}).items() if name.startswith(prefix)]
            allowed = (wide or [ROUNDING[kind]])[0] * max(_compute_norm(value), small)
            apart[f"{kind}, {name}"] = (
                _compute_norm(_to_array(ours[name]) - _to_array(value)) / allowed
            )
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"))
    return apart[worst], worst


def convert_to_arrays(trajectory: Trajectory) -> Trajectory:
    """A trajectory of numpy arrays: a process that is forked from a server takes few tensors."""
    parts: dict[str, Any] = {
        kind: {name: _to_array(value) for name, value in getattr(trajectory, kind).items()}
        for kind in ("start", "gradients", "weights", "moments", "buffers")
    }
    return replace(trajectory, **parts)


def _to_array(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value


def _compute_norm(value: Any) -> float:
    return float((_to_array(value).astype("float64") ** 2).sum() ** 0.5)
