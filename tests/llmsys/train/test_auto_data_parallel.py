"""A run with `engine.data_parallel=auto`: what is chosen, by which rank, and said."""

import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llmsys.config.run import RunConfig
from llmsys.engine.bitwise_engine import BitwiseEngine
from llmsys.engine.torch_engine import TorchEngine
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.fsdp import FsdpModel
from llmsys.parallel.plain import PlainModel
from llmsys.train import auto_data_parallel
from llmsys.train.auto_data_parallel import resolve_data_parallel
from llmsys.train.build_engine import build_engine
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import build_tiny_config

CPU = torch.device("cpu")


def run(**sections: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "model": build_tiny_config(),
        "engine": {"kind": "torch", "data_parallel": "auto"},
        "batch": {"sequence_length": 16, "sequences": 8, "micro_sequences": 2},
        "train": {"precision": "fp32", "threads_per_process": 1},
    }
    return RunConfig.model_validate(settings | sections)


def build_each(rank: int) -> list[str]:
    ranks = torch.distributed.get_world_size()
    sections: tuple[dict[str, Any], ...] = (
        {},
        {"layout": {"expert": ranks}},
        {"train": {"precision": "fp32", "threads_per_process": 1, "reproducibility": "bitwise"}},
    )
    found = []
    with patch.dict("os.environ", {"LOCAL_WORLD_SIZE": str(ranks)}):
        for one in sections:
            config = run(**one)
            meshes = build_device_meshes(config.resolve_layout(ranks), CPU)
            engine: Any = build_engine(config, meshes, CPU)
            if isinstance(engine, BitwiseEngine):
                found.append("bitwise" if engine._plain is None else "bitwise plain")
            else:
                assert isinstance(engine, TorchEngine)
                kinds = {FsdpModel: "fsdp", PlainModel: "plain"}
                found.append(kinds[type(engine._data_parallel)])
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "expected"), [
    (1, ["plain", "plain", "bitwise plain"]),
    (2, ["plain", "fsdp", "bitwise plain"]),
])  # fmt: skip
def test_an_engine_is_built_without_a_wrapper_where_nothing_forbids_it(
    ranks: int, expected: list[str]
) -> None:
    assert run_ranks(build_each, ranks) == [expected] * ranks


def choose_with_little_memory_on_one_rank(rank: int) -> list[str]:
    config, found = run(), []
    for memories in ((1 << 40, 1 << 40), (1 << 40, 1 << 10)):
        with (
            patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "2"}),
            patch.object(auto_data_parallel, "get_rank_memory", lambda _, m=memories: m[rank]),
        ):
            engine: Any = resolve_data_parallel(config, CPU).engine
        found.append(engine.data_parallel)
    # Ranks of run_ranks say that each is on a machine by itself.
    engine = resolve_data_parallel(config, CPU).engine
    return [*found, engine.data_parallel]


@pytest.mark.distributed
def test_the_rank_with_the_least_memory_and_the_machines_decide() -> None:
    assert run_ranks(choose_with_little_memory_on_one_rank, 2) == [["plain", "fsdp", "fsdp"]] * 2


def test_the_choice_is_said_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="llmsys"):
        resolve_data_parallel(run(), CPU)
        resolve_data_parallel(run(engine={"kind": "torch", "data_parallel": "fsdp"}), CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "engine.data_parallel=auto is plain: whole weights fit, and no wrapper is in their way"
    ]
