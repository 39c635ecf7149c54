"""Copies that data parallelism makes in a rank's own memory, and the host's time around blocks."""

from typing import Any

import pytest

from llmsys.config.engine import DeepSpeedEngineConfig, EngineConfig, TorchEngineConfig
from llmsys.config.loading.load import load_model_config
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.local_copies import count_copied_bytes, count_frozen_bytes
from llmsys.estimate.program_profile import load_program_profile
from llmsys.estimate.step_time import estimate_step_time

H100 = load_device_profile("h100-sxm")
PLAIN = TorchEngineConfig(data_parallel="plain")
FSDP = TorchEngineConfig(data_parallel="fsdp")
DDP = TorchEngineConfig(data_parallel="ddp")


def fsdp(**changes: Any) -> TorchEngineConfig:
    return FSDP.model_copy(update=changes)


@pytest.mark.parametrize(("engine", "size", "shards", "is_root", "expected"), [
    # Two micro-batches. A first gradient is cast, the second added; masters are rounded once.
    (PLAIN, 2, 1, False, 6 + 10 + 6),
    (PLAIN, 2, 4, False, 6 + 10 + 6 / 4),
    # In float32 on one rank autograd adds the second gradient to the first.
    (PLAIN, 4, 1, False, 12),
    # A gather casts the shard, copies it into a message and the message into parameters; a
    # reduction casts into a message, which one rank copies to itself, and adds it to the last one.
    (FSDP, 2, 1, False, 4 * (6 + 4 + 4) + 2 * (6 + 8) + 12),
    (FSDP, 2, 1, True, 2 * (6 + 4 + 4) + 2 * (6 + 8) + 12),
    (FSDP, 2, 4, False, 4 * (10 / 4 + 4) + 2 * 6 + 12 / 4),
    (fsdp(reshard="never"), 2, 4, False, 2 * (10 / 4 + 4) + 2 * 6 + 12 / 4),
    (fsdp(reshard="after_step"), 2, 4, False, 10 / 4 + 4 + 2 * 6 + 12 / 4),
    (fsdp(reduce_dtype="bf16"), 2, 4, False, 4 * (10 / 4 + 4) + 2 * 4 + 12 / 4),
    (fsdp(gradient_accumulation="whole"), 2, 4, False, 4 * (10 / 4 + 4) + 6 + 10 + 8),
    (DDP, 2, 1, False, 4 * 6 + 12),
    (DDP, 2, 2, False, 4 * 6 + 12 + 8),
    (DeepSpeedEngineConfig(zero_stage=1), 2, 2, False, 6 + 10 + 3),
    (DeepSpeedEngineConfig(zero_stage=2), 2, 2, False, 2 * (4 + 6) + 6 + 3),
])  # fmt: skip
def test_bytes_of_a_parameter_are_those_of_each_copy(
    engine: EngineConfig, size: int, shards: int, is_root: bool, expected: float
) -> None:
    assert count_copied_bytes(engine, size, shards, 2, is_root=is_root) == expected


@pytest.mark.parametrize(("engine", "shards", "is_root", "expected"), [
    # A shard goes into the message, and the message into the parameters; nothing is cast.
    (FSDP, 4, False, 4 * (4 / 4 + 4)),
    (FSDP, 4, True, 2 * (4 / 4 + 4)),
    (fsdp(reshard="after_step"), 4, False, 4 / 4 + 4),
    # One rank alone has them all, and other engines keep them whole.
    (FSDP, 1, False, 0),
    (PLAIN, 4, False, 0),
    (DDP, 2, False, 0),
])  # fmt: skip
def test_frozen_parameters_are_copied_to_gather_them_alone(
    engine: EngineConfig, shards: int, is_root: bool, expected: float
) -> None:
    assert count_frozen_bytes(engine, 2, shards, 2, is_root=is_root) == expected


def price(
    model: str, engine: EngineConfig, layers: int, length: int, program: str | None = None
) -> dict[str, float]:
    config = RunConfig.model_validate(
        {
            "model": load_model_config(model).model_copy(update={"num_hidden_layers": layers}),
            "batch": {"sequence_length": length, "sequences": 2, "micro_sequences": 1},
            "train": {"precision": "bf16", "compile": "block"},
            "engine": engine,
        }
    )
    profile = None if program is None else load_program_profile(program)
    step = estimate_step_time(config, ParallelLayout(shard=1), H100, program=profile)
    return {name: seconds / step.factor for name, seconds in step.parts.items()}


def test_copies_of_fsdp_on_one_rank_take_as_long_as_measured() -> None:
    llama = "model/llama3.1-8b"
    # docs/measurements/model.md: 50 of 315 ms.
    assert price(llama, FSDP, 4, 8192)["copies"] == pytest.approx(0.050, rel=0.15)
    assert price(llama, PLAIN, 4, 8192)["copies"] < 0.02
    # What other programs copy is in what was fitted.
    assert price(llama, FSDP, 4, 8192, "megatron-fsdp")["copies"] == 0


def test_a_small_model_waits_for_the_hooks_of_its_wrapper() -> None:
    waits = [
        price("model/qwen2.5-0.5b", engine, 12, 2048)["host"]
        for engine in (PLAIN, DDP, fsdp(reshard="after_step"), FSDP)
    ]
    assert waits == sorted(waits)
    assert waits[0] < 0.4 * waits[-1]
    # Long kernels hide all of it.
    assert price("model/llama3.1-8b", FSDP, 4, 8192)["host"] == 0


def test_the_price_is_that_of_the_wrapper_that_training_chooses() -> None:
    llama = "model/llama3.1-8b"
    assert price(llama, TorchEngineConfig(), 4, 8192) == price(llama, PLAIN, 4, 8192)
    assert price(llama, TorchEngineConfig(), 32, 8192) == price(llama, FSDP, 32, 8192)
