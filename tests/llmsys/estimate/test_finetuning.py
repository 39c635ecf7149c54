"""Fine-tuning: parameters and operations against a model of transformers that is frozen or has
adapters.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.loading.load import build_model_config, load_run_config
from llmsys.config.serving import FinetuneConfig
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.finetuning import (
    count_finetune_flops,
    estimate_finetuning,
    select_trained_part,
)
from llmsys.estimate.json_output import EstimateOutput
from llmsys.estimate.run_cost import PricingRequest, add_costs
from llmsys.estimate.run_estimate import estimate_run
from llmsys.launch.main import main

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SEQUENCES, LENGTH = 2, 7
DATA = Path(__file__).parents[2] / "data/estimate"
BIASES = {"attention_bias": True, "mlp_bias": True}
SUFFIXES = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "feed_forward": ("gate_proj", "up_proj", "down_proj"),
}
SUFFIXES["all"] = SUFFIXES["attention"] + SUFFIXES["feed_forward"]


class Adapted(nn.Module):
    """A frozen linear map and B A x."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def build_oracle(settings: FinetuneConfig, biases: dict[str, Any]) -> Any:
    """A Llama of transformers of which only the wanted part is trained."""
    config = transformers.AutoConfig.for_model(**LLAMA | biases)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    wanted = {
        "none": lambda name: False,
        "all": lambda name: True,
        "norms": lambda name: "norm" in name,
        "head": lambda name: "lm_head" in name,
        "last": lambda name: "lm_head" in name or "model.norm" in name
        or any(f"layers.{3 - i}." in name for i in range(1, settings.layers + 1)),
    }[settings.train]  # fmt: skip
    for name, one in model.named_parameters():
        one.requires_grad = wanted(name)
    if settings.rank:
        for name, module in list(model.named_modules()):
            if name.endswith(SUFFIXES[settings.targets]):
                parent = model.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], Adapted(module, settings.rank))
    return model


CASES = [
    {"train": "all"}, {"train": "norms"}, {"train": "head"}, {"train": "last"}, {"train": "last",
        "layers": 2},
    {"rank": 3}, {"rank": 3, "targets": "attention"}, {"rank": 2, "targets": "feed_forward"},
    {"rank": 2, "train": "norms"},
]  # fmt: skip


@pytest.mark.parametrize("biases", [{}, BIASES], ids=["no biases", "biases"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_and_operations_are_those_that_torch_counts(
    case: dict[str, Any], biases: dict[str, Any]
) -> None:
    settings = FinetuneConfig.model_validate(case)
    ours, model = build_model_config(LLAMA | biases), build_oracle(settings, biases)
    part = select_trained_part(ours, settings)
    assert part.parameters + part.adapters == sum(
        one.numel() for one in model.parameters() if one.requires_grad
    )
    with FlopCounterMode(display=False) as counter:
        model(torch.full((SEQUENCES, LENGTH), 5), use_cache=False).logits.sum().backward()
    assert (
        sum(count_finetune_flops(ours, settings, SEQUENCES, LENGTH).values())
        == counter.get_total_flops()
    )


def test_memory_has_states_for_the_trained_part_alone(capsys) -> None:
    config = load_run_config("train/llama-8b-8xh100")
    full = estimate_run(config)
    found = {
        name: estimate_finetuning(config, FinetuneConfig.model_validate(one), full).memory
        for name, one in {"all": {"train": "all"}, "lora": {"rank": 16}, "qlora": {"rank": 16,
            "weights": "int4"},
                          "last": {"train": "last", "layers": 2}}.items()
    }  # fmt: skip
    assert found["all"].peak_bytes == full.memory.peak_bytes, "all of it is the full run"
    assert found["lora"].peak_bytes < found["all"].peak_bytes
    # 8.03B weights in 2 bytes and 41,943,040 parameters of adapters, over eight ranks
    assert found["lora"].state_bytes["frozen weights"] == pytest.approx(2 * 8_030_261_248 / 8)
    assert found["lora"].state_bytes["moments"] == pytest.approx(8 * 41_943_040 / 8)
    assert found["qlora"].peak_bytes < found["lora"].peak_bytes
    saved = {"last": found["last"].peak_bytes, "all": found["all"].peak_bytes}
    assert saved["last"] < 0.5 * saved["all"], "30 of 32 blocks save nothing for backward"
    assert (
        main(["estimate", "train/llama-8b-8xh100", "--finetune", "rank=16", "--device", "h100-sxm"])
        == 0
    )
    text = capsys.readouterr().out
    assert "41,943,040  0.52% of all, 41.9M in adapters" in text
    assert "times as fast as full training" in text


def test_a_frozen_part_makes_a_step_faster_and_a_bare_model_has_no_memory(capsys) -> None:
    words = ["estimate", "train/llama-8b-8xh100", "--device", "h100-sxm", "--json", "--finetune"]
    speed = {}
    for settings in ("train=all", "rank=16", "train=last,layers=2", "train=head"):
        assert main([*words, settings]) == 0
        speed[settings] = json.loads(capsys.readouterr().out)["finetune"]["speedup"]
    assert speed["train=all"] == pytest.approx(1)
    assert 1 < speed["rank=16"] < speed["train=last,layers=2"] < speed["train=head"]
    assert main(["estimate", "model/llama3.1-8b", "--finetune", "rank=8", "--json"]) == 0
    assert "memory" not in json.loads(capsys.readouterr().out)["finetune"]


def test_adapters_spare_no_attention_and_read_what_they_multiply() -> None:
    config, device = load_run_config("train/llama-8b-8xh100"), load_device_profile("h100-sxm")
    wanted = FinetuneConfig.model_validate({"rank": 16, "targets": "attention"})
    full = add_costs(
        estimate_run(config), config, PricingRequest(device, ClusterCosts(), 8), model_only=False
    )
    parts = full.time.parts_seconds

    def price(**seconds: float) -> EstimateOutput:
        only = dict.fromkeys(parts, 0.0) | seconds
        time = full.time.model_copy(update={"parts_seconds": only})
        return full.model_copy(update={"time": time})

    # every block has an adapter, so every backward of attention is computed
    assert estimate_finetuning(config, wanted, price(attention=1.0)).speedup == pytest.approx(1)
    last = FinetuneConfig.model_validate({"train": "last", "layers": 8})
    # 2 products of all 32 blocks and 5 of 8, of 7
    assert estimate_finetuning(config, last, price(attention=1.0)).speedup == pytest.approx(
        7 / (2 + 5 * 8 / 32)
    )
    # A frozen matrix has two of three products; the head is frozen too.
    products = estimate_finetuning(config, wanted, price(products=1.0)).speedup
    assert 1.45 < products < 1.5
    # 4096 to 4096 twice, and to 1024 twice, in 32 blocks of Llama 3.1 8B; 2 bytes. Of I inputs and
    # O outputs a forward moves I + 4 O, and a backward 5 I + 2 O.
    widths = ((4096, 4096), (4096, 4096), (4096, 1024), (4096, 1024))
    tokens = config.batch.sequences_per_step * config.batch.sequence_length / 8
    rate = device.memory_bandwidth * device.efficiency.memory
    for policy, forwards in (("none", 1), ("full", 2)):
        train = config.train.model_copy(update={"activation_checkpoint": policy})
        one = config.model_copy(update={"train": train})
        moved = sum(forwards * (i + 4 * o) + 5 * i + 2 * o for i, o in widths)
        seconds = 2 * 32 * moved * tokens / rate * full.time.residual_factor
        found = estimate_finetuning(one, wanted, price(elementwise=1.0), device).speedup
        assert found == pytest.approx(1 / (1 + seconds))


def price_copies(*words: str, gpus: int) -> tuple[float, float]:
    """Seconds of local copies of a full step, and of one with adapters alone."""
    config = load_run_config(
        "train/llama-8b-8xh100",
        ["batch.sequence_length=4096", "batch.sequences=32", "engine.data_parallel=fsdp", *words],
    )
    device = load_device_profile("h100-sxm")
    request = PricingRequest(device, ClusterCosts(), gpus)
    full = add_costs(estimate_run(config), config, request, model_only=False)
    parts = dict.fromkeys(full.time.parts_seconds, 0.0) | {"copies": 1.0}
    time = full.time.model_copy(update={"parts_seconds": parts})
    only = full.model_copy(update={"time": time})
    wanted = FinetuneConfig.model_validate({"rank": 16})
    found = estimate_finetuning(config, wanted, only)
    assert found.step_seconds is not None
    return full.time.parts_seconds["copies"], 1 / found.speedup


def test_frozen_weights_are_gathered_without_a_cast_and_have_no_gradient_to_sum() -> None:
    trained = 41_943_040 / 8_030_261_248
    _, alone = price_copies("layout.shard=1", "batch.micro_sequences=2", gpus=1)
    assert alone == pytest.approx(trained, rel=0.01)  # one rank has all frozen weights
    _, shared = price_copies("layout.shard=8", "batch.micro_sequences=2", gpus=8)
    # Two micro-batches gather blocks four times: 2 bytes into the message for each 8 ranks, and 2
    # out, each read and written. A trained weight also casts 6 bytes, and reduces a gradient of 6
    # twice and adds 12 for 8 ranks once.
    gathered, trained_bytes = 4 * (4 / 8 + 4), 4 * (10 / 8 + 4) + 2 * 6 + 12 / 8
    assert shared == pytest.approx(
        trained + (1 - trained) * gathered / trained_bytes, abs=0.03
    )  # embedding and head are gathered half as often


def test_published_steps_of_adapters_lie_within_the_interval(capsys) -> None:
    found = yaml.safe_load((DATA / "adapter_steps.yaml").read_text())
    errors = []
    for row in found["rows"]:
        tensor = row["tensor"]
        words = [
            "estimate",
            row["model"],
            "batch.sequence_length=4096",
            "batch.sequences=32",
            f"batch.micro_sequences={row['micro']}",
            f"train.activation_checkpoint={row['recompute']}",
            f"train.compile={row['compile']}",
            "train.precision=bf16",
            f"layout.tensor={tensor}",
            f"layout.shard={row['gpus'] // tensor}",
        ]
        device = ["--device", "h100-sxm", "--gpus", str(row["gpus"])]
        assert main([*words, *device, "--finetune", "rank=16", "--json"]) == 0
        seconds = json.loads(capsys.readouterr().out)["finetune"]["step_seconds"]
        assert seconds["p10"] < row["seconds"] < seconds["p90"], row["name"]
        errors.append(abs(row["seconds"] / seconds["p50"] - 1))
    assert median(errors) < 0.12


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ("model/llama3.1-8b", "rank=0", "nothing is trained. Set rank=16, or train=last"),
        (
            "model/llama3.1-8b",
            "train=last,layers=40",
            "layers=40 is more than num_hidden_layers=32",
        ),
        ("train/t5-tiny", "rank=4", "needs one stack of blocks"),
        ("model/llama3.1-8b", "rank=x", "rank"),
    ],
)
def test_what_cannot_be_estimated_is_refused(config, settings, message, capsys) -> None:
    assert main(["estimate", config, "--finetune", settings]) == 2
    assert message in capsys.readouterr().err
