"""When FSDP2 frees weights and in which type it sums gradients: the first changes no bit and the
number of gathers, the second is one rounding of each sum over ranks.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmsys.config.objective import LossConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.engine.state_hash import hash_state
from llmsys.engine.torch_engine import TorchEngine
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train.cross_entropy import build_training_loss
from tests.helpers.parity_runs import LEARNING_RATE, OPTIMIZER, select_rank_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import build_sequences, build_tiny_config

POLICIES = ("after_forward", "never", "after_step")
DENSE = build_tiny_config(moe=None, multi_token_prediction=None, tie_word_embeddings=True)
LAYOUTS: dict[str, tuple[ParallelLayout, dict[str, Any]]] = {
    "shards": (ParallelLayout(), {}),
    "whole gradients": (ParallelLayout(), {"gradients": "whole"}),
    "replicas": (ParallelLayout(replicate=2), {}),
    "experts": (ParallelLayout(expert=2), {"config": build_tiny_config()}),
    "tensor": (ParallelLayout(tensor=2), {}),
}


def make(layout: ParallelLayout, config: Any = DENSE, **ways: Any) -> TorchEngine:
    device, ranks = torch.device("cpu"), torch.distributed.get_world_size()
    with torch.device("meta"):
        model = Transformer(config)
    return TorchEngine(
        model,
        meshes=build_device_meshes(layout.resolve(ranks, config), device),
        optimizer=OPTIMIZER,
        loss=build_training_loss(LossConfig()),
        compute_dtype=torch.bfloat16,
        seed=7,
        device=device,
        **ways,
    )


def train_by_policies(rank: int) -> dict[str, list[Any]]:
    ranks, found = torch.distributed.get_world_size(), {}
    for name, (layout, ways) in LAYOUTS.items():
        data_ranks = 1 if layout.tensor > 1 else ranks
        runs = []
        for policy in POLICIES:
            engine = make(layout, **ways, reshard=policy)
            steps: list[Any] = []
            for step in range(3):
                batches = select_rank_batches(step, rank % data_ranks, data_ranks, 2)
                steps.append(engine.train_step(batches, LEARNING_RATE))
                # Gathered weights of before the step would show here.
                logits = engine.compute_logits(build_sequences(9, 0, 2))
                assert logits is not None
                steps.append(logits.tolist())
            runs.append((steps, hash_state(engine.get_state())))
        found[name] = runs
    return found


@pytest.mark.distributed
def test_no_bit_depends_on_when_weights_are_freed() -> None:
    for found in run_ranks(train_by_policies, 2):
        for name, runs in found.items():
            assert runs[0] == runs[1] == runs[2], name


class GatherCounter(TorchDispatchMode):
    """Counts all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.count += "allgather" in str(operation)
        return operation(*arguments, **(named or {}))


def count_gathers(rank: int) -> list[int]:
    counts = []
    for policy in POLICIES:
        engine = make(ParallelLayout(), reshard=policy)
        engine.train_step(select_rank_batches(0, rank, 2, 2), LEARNING_RATE)
        with GatherCounter() as counter:
            engine.train_step(select_rank_batches(1, rank, 2, 2), LEARNING_RATE)
        counts.append(counter.count)
    return counts


@pytest.mark.distributed
def test_weights_are_gathered_as_often_as_the_policy_says() -> None:
    blocks = DENSE.num_hidden_layers
    for counts in run_ranks(count_gathers, 2):
        # Two micro-batches; what is outside of blocks is one unit, and gathered once in each.
        assert counts == [2 * (1 + 2 * blocks), 2 * (1 + blocks), 1 + blocks]


def collect_reduced(rank: int, reduce_dtype: torch.dtype) -> dict[str, Any]:
    engine = make(ParallelLayout(), reduce_dtype=reduce_dtype)
    found = {}

    def observe(gradients: Any, scale: float) -> None:
        found.update({name: one.full_tensor().tolist() for name, one in gradients.items()})

    engine.observe_gradients = observe
    engine.train_step(select_rank_batches(0, rank, 2, 2), LEARNING_RATE)
    return found


def compute_reduced_gradients(dtype: torch.dtype) -> dict[str, Any]:
    """Return the gradients of a step of two ranks with two micro-batches, computed one by one:
    rounded to `dtype`, added over ranks in it, and over micro-batches in float32.
    """
    batches = [select_rank_batches(0, rank, 2, 2) for rank in range(2)]
    targets = float(sum(batch.num_valid_targets for own in batches for batch in own))
    loss = build_training_loss(LossConfig())
    model = Transformer(DENSE)
    initialize_parameters(model, 7)
    model = model.bfloat16()
    sums: dict[str, torch.Tensor] = {}
    for number in range(2):
        by_rank = []
        for own in batches:
            batch = own[number]
            total = model(
                **batch.to_model_inputs(),
                finish=lambda head, x, _, batch=batch: loss(head, x, batch.targets_BT),
            )
            (total / targets).backward()
            gradients = {name: one.grad for name, one in model.named_parameters()}
            by_rank.append(
                {name: one.to(dtype) for name, one in gradients.items() if one is not None}
            )
            model.zero_grad()
        for name, first in by_rank[0].items():
            reduced = (first + by_rank[1][name]).float()
            sums[name] = sums[name] + reduced if name in sums else reduced
    return {name: one.tolist() for name, one in sums.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_over_ranks_in_the_reduce_dtype(dtype: torch.dtype) -> None:
    expected = compute_reduced_gradients(dtype)
    assert run_ranks(collect_reduced, 2, dtype) == [expected, expected]
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    assert compute_reduced_gradients(other) != expected


@pytest.mark.parametrize(("settings", "message"), [
    ({"engine": {"kind": "torch", "data_parallel": "plain", "reshard": "never"}},
     "engine.reshard: never says when FSDP frees gathered weights, and engine.data_parallel=plain "
     "gathers none. Use engine.data_parallel=fsdp, or engine.reshard=after_forward."),
    ({"engine": {"kind": "torch", "cpu_offload": "state", "reshard": "after_step"}},
     "engine.reshard: after_step keeps gathered weights on the device"),
    ({"engine": {"kind": "torch", "reshard": "never"}, "train": {"reproducibility": "bitwise",
      "threads_per_process": 1}, "batch": {"micro_sequences": 1}},
     "engine.reshard: never is not proven in bitwise mode"),
    ({"engine": {"kind": "torch", "data_parallel": "ddp", "reduce_dtype": "bf16"}},
     "engine.reduce_dtype: bf16 is the type of FSDP's messages"),
    ({"engine": {"kind": "torch", "reduce_dtype": "bf16"}, "train": {"precision": "fp32"}},
     "engine.reduce_dtype: bf16 would round gradients that train.precision=fp32 computes"),
    ({"engine": {"kind": "torch", "reduce_dtype": "bf16"}, "layout": {"replicate": 2}},
     "engine.reduce_dtype: bf16 would sum micro-batches too, which wait for their reduction under "
     "layout.replicate=2."),
    ({"engine": {"kind": "torch", "reduce_dtype": "bf16", "gradient_accumulation": "whole"}},
     "engine.reduce_dtype: bf16 would sum micro-batches too"),
    ({"engine": {"kind": "torch", "data_parallel": "plain"}, "layout": {"replicate": 2}},
     "layout.replicate: 2 replicas have nothing to repeat: engine.data_parallel=plain keeps whole"),
    ({"engine": {"kind": "torch", "data_parallel": "plain"}, "layout": {"expert": 2},
      "model": build_tiny_config().model_dump()},
     "layout.expert: 2 ranks cannot shard experts that engine.data_parallel=plain keeps whole"),
    ({"engine": {"kind": "torch", "data_parallel": "plain"}, "layout": {"tensor": 2}},
     "layout.tensor: engine.kind=torch with data_parallel=plain does not shard matrices"),
    ({"engine": {"kind": "torch", "data_parallel": "plain"}, "layout": {"pipeline": 2}},
     "engine.kind: torch with data_parallel=plain runs no stages"),
    ({"engine": {"kind": "torch", "data_parallel": "plain", "cpu_offload": "state"}},
     "engine.cpu_offload: state needs FSDP: engine.data_parallel=plain keeps masters and"),
])  # fmt: skip
def test_what_a_path_does_not_have_is_refused_with_the_next_step(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"(?s).*") as refused:
        RunConfig.model_validate(settings)
    assert message in str(refused.value)
