"""In bf16 every engine keeps fp32 masters that start with the same bits, and all learn alike from the same rows."""

from typing import Any

import pytest
import torch

from llmsys.config.layout import Layout
from llmsys.model.init import initial_value
from tests.engine.test_parity import LEARNING_RATE, build, share_of, whole_state
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config

# DeepSpeed's first stage has another optimizer in bf16, and another one again with offload.
KINDS = {
    1: ["torch bf16", "accelerate bf16", "zero0 bf16", "zero1 bf16", "zero1 bf16 offload", "zero2 bf16", "zero3 bf16",
        "zero3 bf16 offload"],
    2: ["torch bf16", "zero0 bf16", "zero1 bf16", "zero2 bf16", "zero2 bf16 offload"],
}  # fmt: skip
CASES = [(kind, expert) for expert, kinds in KINDS.items() for kind in kinds]


def three_steps(rank: int, cases: list[tuple[str, int]]) -> list[Any]:
    results = []
    for kind, expert in cases:
        engine = build(kind, Layout(expert=expert), 0.5, 2)
        start = whole_state(engine)
        steps = [engine.train_step(share_of(step, rank, 2, 2), LEARNING_RATE) for step in range(3)]
        dtype = str(engine.logits(share_of(0, rank, 2, 2)[0]).dtype)
        results.append((start, [(s.loss, s.gradient_norm) for s in steps], whole_state(engine), dtype))
    return results


@pytest.fixture(scope="module")
def finished() -> dict[tuple[str, int], Any]:
    return dict(zip(CASES, run_ranks(three_steps, 2, CASES)[0], strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "expert"), CASES)
def test_masters_stay_in_fp32_and_all_engines_learn_alike(
    kind: str, expert: int, finished: dict[tuple[str, int], Any]
) -> None:
    start, steps, state, dtype = finished[kind, expert]
    _, expected_steps, expected, _ = finished["torch bf16", expert]
    assert dtype == "torch.bfloat16"
    for key, value in start.items():
        name = key.removeprefix("parameter/")
        if key.startswith("parameter/"):
            assert (value == initial_value(tiny_config(), name, value.shape, 7).numpy()).all(), name
            assert value.dtype == "float32"
            rounded = torch.from_numpy(state[key]).bfloat16().float().numpy()
            assert (state[key] != rounded).any(), f"{name} has been rounded"
    torch.testing.assert_close(steps, expected_steps, rtol=1e-4, atol=1e-5)
    for key, value in expected.items():
        allowed = 0.1 * LEARNING_RATE if key.startswith("parameter/") else 1e-2 * abs(value).max()
        assert abs(state[key] - value).max() <= allowed, key
