"""What an engine cannot keep is refused by name, with what would do; ranks that are not joined
do not train alone.
"""

import os
import re
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.engine.accelerate_engine import find_config_violations
from llmsys.errors import ConfigError
from tests.helpers.parity_runs import build_engine
from tests.helpers.ranks import run_ranks

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine": {"kind": "deepspeed", "zero_stage": 3}, "layout": {"expert": 2}},
     r"engine\.zero_stage.*layout\.expert=2.*Use engine\.kind=torch"),
    ({"engine": {"kind": "deepspeed", "zero_stage": 0, "cpu_offload": "optimizer"}},
     r"engine\.cpu_offload.*zero_stage=0.*Use zero_stage=1, 2 or 3, or cpu_offload=none"),
    ({"engine": {"kind": "deepspeed", "zero_stage": 1}, "layout": {"replicate": 2}},
     r"layout\.replicate.*2 replicas.*shards over all ranks.*Use layout\.replicate=1, or "
     r"engine\.kind=torch"),
    ({"engine": {"kind": "accelerate"}, "layout": {"expert": 2}},
     r"layout\.expert.*a replica that engine\.kind=accelerate keeps unsharded.*Use "
     r"layout\.expert=1, or engine"),
    ({"engine": {"kind": "accelerate"}, "layout": {"shard": 2}},
     r"layout\.shard.*engine\.kind=accelerate keeps unsharded.*Use layout\.shard=1, or "
     r"engine\.kind=torch"),
    ({"engine": {"kind": "accelerate"}, "layout": {"tensor": 2}},
     r"engine\.kind=accelerate does not shard matrices.*Use engine\.kind=torch"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_configs_that_an_engine_cannot_keep_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    model = shape | {"num_attention_heads": 4, "num_key_value_heads": 2, "moe": EXPERTS}
    with pytest.raises((ConfigError, ValueError), match=f"(?s){message}"):
        RunConfig.model_validate({"model": model} | changes)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "enables FSDP, .* Use engine.kind=torch"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "enables DeepSpeed, .* Use engine.kind=deepspeed"),
        (
            {"ACCELERATE_USE_MEGATRON_LM": "True"},
            "enables Megatron-LM, .* Use engine.kind=torch with layout.tensor",
        ),
        (
            {"ACCELERATE_MIXED_PRECISION": "fp8"},
            "has mixed_precision: fp8, but the run has train.precision=bf16. Set",
        ),
        (
            {"ACCELERATE_DYNAMO_BACKEND": "inductor"},
            "dynamo_backend: inductor, .* train.compile=block",
        ),
    ],
)
def test_an_accelerate_config_that_cannot_be_kept_is_refused(
    environment: dict[str, str], message: str
) -> None:
    (problem,) = find_config_violations(environment, "bf16")
    assert re.search(message, problem), problem


def test_a_plain_accelerate_config_is_kept() -> None:
    said = {
        "ACCELERATE_USE_FSDP": "false",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "no",
    }
    assert find_config_violations(said, "bf16") == find_config_violations({}, "bf16") == []


def refused(rank: int) -> tuple[str, str]:
    """Return the messages for ranks that accelerate does not know of, and for fp16 where
    DeepSpeed has none.
    """
    messages = []
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    get_accelerator().is_fp16_supported = lambda: False  # some processors have fp16
    for kind in ("accelerate", "zero2 fp16"):
        try:
            build_engine(kind, ParallelLayout(), 0.0, 1)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        os.environ["LOCAL_RANK"] = str(rank)
    return messages[0], messages[1]


@pytest.mark.distributed
def test_unconnected_ranks_and_fp16_on_cpus_are_refused() -> None:
    for alone, fp16 in run_ranks(refused, 2):
        assert alone.startswith("LaunchError: accelerate's distributed_type=NO with 1 process")
        assert "each would train alone. Start them with `llmsys train`" in alone
        assert fp16.startswith(
            "ConfigError: train.precision=fp16 under engine.kind=deepspeed needs a device with fp16"
        )
        assert "Use train.precision=bf16, or engine.kind=torch" in fp16
