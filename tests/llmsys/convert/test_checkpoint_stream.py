"""What an export reads of a checkpoint: the running average where there is one, or the mean of
several checkpoints.
"""

from pathlib import Path

import torch

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.convert.checkpoint_stream import AverageReader, CheckpointReader
from llmsys.convert.conversion_plan import TensorPart
from llmsys.engine.engine import EngineState
from llmsys.train.checkpoint_saver import CheckpointSaver

SHAPE = (3, 4, 2)


def save(folder: Path, step: int, **tensors: torch.Tensor) -> Path:
    """Save `parameter/w` and the like, named `parameter_w`."""
    saver = CheckpointSaver(folder, CheckpointConfig(keep_last=9))
    state = {name.replace("_", "/", 1): tensor for name, tensor in tensors.items()}
    saver.save_state(EngineState(state, step), step, {})
    saver.finish_saves()
    return folder / f"step-{step:08d}"


def test_an_export_reads_the_average_of_weights_and_each_expert_at_its_place(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    weights, average, bias = torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(4)
    reader = CheckpointReader(
        save(tmp_path, 1, parameter_w=weights, average_w=average, buffer_b=bias)
    )
    assert torch.equal(reader.read(TensorPart("parameter/w", SHAPE)), average)
    for expert in (2, 0, 1):
        assert torch.equal(reader.read(TensorPart("parameter/w", SHAPE, expert)), average[expert])
    assert torch.equal(reader.read(TensorPart("buffer/b", (4,))), bias)


def test_a_mean_of_checkpoints_is_that_of_their_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights, average = [torch.randn(SHAPE) for _ in range(3)], torch.randn(SHAPE)
    folders = [
        save(tmp_path, n, parameter_w=one, average_w=average) for n, one in enumerate(weights, 1)
    ]
    found = AverageReader(folders).read(TensorPart("parameter/w", SHAPE))
    torch.testing.assert_close(found, torch.stack(weights).mean(0))
