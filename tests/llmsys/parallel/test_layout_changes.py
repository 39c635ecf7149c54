"""A run that changes its layout at every checkpoint, with what is measured and generated on the
way, in four ranks.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import Batch
from llmsys.engine.engine import iter_persistent_buffers
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.transformer import Transformer
from llmsys.train import checkpoint_load
from llmsys.train.evaluator import RowRanks, sum_over_rows
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    build_engine,
    run_reference,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_steps import gather_full_tensor
from tests.helpers.tiny_training import LENGTH, build_sequences, build_tiny_config

LAYOUTS = [
    ParallelLayout(context=2, tensor=2, expert=2),
    ParallelLayout(tensor=2),
    ParallelLayout(),
    ParallelLayout(tensor=4, expert=4),
]
CLIP, HELD = 0.5, 11
CHANGES: dict[str, Any] = {"tie_word_embeddings": True}


class HeldRows:
    """Held-back rows of an odd length, the same whoever asks."""

    num_rows = HELD

    def get_batch(self, first: int, count: int) -> Batch:
        found = [build_sequences(99, row, 1) for row in range(first, first + count)]
        tokens, targets = (
            torch.cat([getattr(one, name) for one in found]) for name in ("tokens_BT", "targets_BT")
        )
        return Batch(tokens[:, :-3].contiguous(), targets[:, :-3].contiguous())


def continued(model: Transformer) -> Tensor:
    """Logits after a prompt padded on the left and one more token, from a cache."""
    model.eval()
    cache = KeyValueCache(model.config, 2, LENGTH, padding_B=torch.tensor([2, 0]))
    with torch.no_grad():
        model(build_sequences(5, 0, 2).tokens_BT[:, :7], cache=cache)
        logits: Tensor = model(torch.tensor([[3], [4]]), cache=cache)
    return logits


def asked(engine: Any, layout: ParallelLayout) -> dict[str, Any]:
    """What a trained engine makes of held-back rows and of a prompt."""
    sums = sum_over_rows(
        HeldRows(), engine.compute_logits, engine.device, RowRanks(layout.sequence_parallel_size)
    )
    return {
        "sums": [sums.nats, sums.correct, sums.targets],
        "logits": engine.compute_logits(HeldRows().get_batch(0, 2)).numpy(),
        "continued": continued(engine.module).numpy(),
    }


def journey(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Two steps under each layout, each begun from the checkpoint of the one before."""
    found: list[dict[str, Any]] = []
    for leg, layout in enumerate(LAYOUTS):
        engine = build_engine("torch", layout, CLIP, 1, **CHANGES)
        fitted = layout.resolve(4, engine.module.config)
        if leg:
            newest = checkpoint_load.find_newest_checkpoint(folder)
            assert newest is not None
            checkpoint_load.load_checkpoint(engine, newest)
        losses = []
        for step in (2 * leg, 2 * leg + 1):
            batches = select_rank_batches(
                step, fitted.get_data_rank(rank), fitted.data_parallel_size, 1
            )
            losses.append(engine.train_step(batches, LEARNING_RATE).loss)
            update_expert_balance(engine.module)
        found.append(asked(engine, fitted) | {"losses": losses})
        save_checkpoint(engine, folder, {"leg": leg}, keep_last=len(LAYOUTS))
    state = {
        name: gather_full_tensor(tensor).numpy()
        for name, tensor in engine.get_state().tensors.items()
    }
    return [*found, state]


def loaded(path: Path) -> Transformer:
    """A plain model with the weights and buffers of a checkpoint."""
    model = Transformer(build_tiny_config(**CHANGES)).eval()
    held = {f"parameter/{name}": parameter.data for name, parameter in model.named_parameters()}
    checkpoint_load.load_tensors(
        held | {f"buffer/{name}": buffer for name, buffer in iter_persistent_buffers(model)}, path
    )
    return model


@torch.no_grad()
def whole_logits(model: Transformer, batch: Batch) -> Tensor:
    logits: Tensor = model(batch.tokens_BT)
    return logits


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """The folder of checkpoints, and what each rank found."""
    folder = tmp_path_factory.mktemp("journey")
    return folder, run_ranks(journey, 4, folder)


@pytest.mark.distributed
def test_layouts_may_change_at_every_checkpoint(
    travelled: tuple[Path, list[list[dict[str, Any]]]],
) -> None:
    *legs, state = travelled[1][0]
    losses, _, expected = run_reference(CLIP, steps=2 * len(LAYOUTS), **CHANGES)
    torch.testing.assert_close(
        [loss for leg in legs for loss in leg["losses"]], losses, rtol=2e-5, atol=2e-6
    )
    for key, value in expected.items():
        allowed = (
            0.05 * LEARNING_RATE
            if key.startswith("parameter/")
            else 1e-3 * float(value.abs().max())
        )
        assert float((torch.from_numpy(state[key]) - value).abs().max()) <= allowed, key


@pytest.mark.distributed
def test_checkpoints_of_divided_models_are_those_of_one_process(
    travelled: tuple[Path, list[list[dict[str, Any]]]],
) -> None:
    for leg, path in enumerate(sorted(travelled[0].glob("step-*"))):
        model = loaded(path)
        logits = whole_logits(model, HeldRows().get_batch(0, 2))
        sums = sum_over_rows(HeldRows(), partial(whole_logits, model), torch.device("cpu"))
        for found in (rank[leg] for rank in travelled[1]):
            torch.testing.assert_close(
                torch.from_numpy(found["logits"]), logits, rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(
                torch.from_numpy(found["continued"]), continued(model), rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(
                found["sums"], [sums.nats, sums.correct, sums.targets], rtol=1e-5, atol=1e-5
            )
