"""What a published measurement becomes: a config, a layout, a device, a software, and the number.

Gives `Setup`, the generations that the tables were measured with, and the shapes of their models.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmsys.config.load import load_model_config
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import LlmsysError
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.software_profile import COMPILED, EAGER, SoftwareProfile

DATA = Path(__file__).resolve().parents[2] / "tests" / "estimate" / "data"
SHAPES = DATA / "published_models.json"
Row = dict[str, Any]

MEGATRON_2020 = SoftwareProfile(name="Megatron 2020", attention="unfused", traffic=1.4, loss_bytes=28, data_overlap=0.0)
MEGATRON_2021 = MEGATRON_2020.model_copy(update={"name": "Megatron 2021", "traffic": 1.15})
MEGATRON_2022 = MEGATRON_2021.model_copy(update={"name": "Megatron 2022", "traffic": 1.0, "data_overlap": 0.5})
PYTORCH_2022 = EAGER.model_copy(update={"name": "PyTorch 2022", "data_overlap": 0.6})
MEGATRON = SoftwareProfile(
    name="Megatron since 2023", attention="native", data_overlap=0.8, tensor_overlap=0.4, expert_overlap=0.2
)
TITAN_EAGER = EAGER.model_copy(update={"name": "torchtitan eager", "recomputed_matmuls": 0.5, "context": "ring"})
TITAN = COMPILED.model_copy(update={"name": "torchtitan compiled", "recomputed_matmuls": 0.5, "context": "ring"})
# A traced graph whose norms, rotations and activations are run piece by piece.
TITAN_GRAPH = TITAN_EAGER.model_copy(update={"name": "torchtitan graph trainer", "traffic": 4.0, "loss_bytes": 40})
ZERO_3_2022 = MEGATRON_2022.model_copy(update={"name": "DeepSpeed ZeRO-3 2022", "data_overlap": 0.3, "traffic": 1.4})


@dataclass(frozen=True)
class Setup:
    """One measured number and all that is needed to predict it: seconds of a step, or accelerator-hours of a run."""

    name: str
    table: str
    config: RunConfig
    layout: ParallelLayout
    device: str
    software: SoftwareProfile
    measured: float
    kind: Literal["step", "run"] = "step"
    pipeline: int = 1
    interleave: int = 1

    @property
    def num_ranks(self) -> int:
        """Devices."""
        return self.layout.world_size * self.pipeline


def load_published_model(name: str, row: Row) -> ModelConfig:
    """Return the model of that name: one of ours, one of the shapes kept for this table, or a dense one of that many.
    """
    shapes: dict[str, Row] = json.loads(SHAPES.read_text(encoding="utf-8"))
    plain = re.sub(r"\(.*\)| .*", "", name).lower()
    if plain in shapes:
        return ModelConfig.model_validate({key: value for key, value in shapes[plain].items() if key != "source"})
    try:
        return load_model_config(f"model/{plain}")
    except LlmsysError:
        if "params_active" not in row:
            raise
        return build_dense_model(float(row["params_active"]))


DEVICES = {
    "A100": "a100-80gb",
    "TPUv3": "tpu-v3",
    "TPUv4": "tpu-v4",
    "H100": "h100-sxm",
    "P100fp32": "p100",
}


def resolve_device_name(name: str) -> str:
    """Return our name of a device; ConfigError when there is no profile of it."""
    ours = DEVICES.get(name, name.lower())
    load_device_profile(ours)
    return ours


def build_dense_model(parameters: float) -> ModelConfig:
    """Return a plain decoder of about that many parameters, 128 channels of width for each layer (Kaplan 2020, figure
    5).
    """
    layers = max(2, round((parameters / (12 * 128**2)) ** (1 / 3)))
    return build_gpt_model(128 * layers, layers, layers, 50_304, 2048)


def build_gpt_model(hidden: int, layers: int, heads: int, vocabulary: int, length: int) -> ModelConfig:
    """GPT-2's architecture in that size, as Megatron's tables have it."""
    return ModelConfig.model_validate(
        {
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": length,
            "tie_word_embeddings": True,
            "norm": {"kind": "layernorm"},
            "position": {"kind": "learned"},
            "attention": {"kind": "multi_head", "qkv_bias": True, "output_bias": True},
            "feed_forward": {"kind": "gelu_tanh", "bias": True},
        }
    )


def build_run_config(
    model: ModelConfig,
    length: int,
    sequences: int,
    micro: int,
    *,
    recompute: str = "none",
    precision: str = "bf16",
    engine: str = "zero1",
    tokens: float = 0,
) -> RunConfig:
    """Return a run of that model; its engine is FSDP, or ZeRO-1 as pipelines have it."""
    model = model.model_copy(update={"max_position_embeddings": max(length, model.max_position_embeddings)})
    engines: dict[str, Row] = {"fsdp": {"kind": "torch"}, "zero1": {"kind": "deepspeed", "zero_stage": 1}}
    train = {"precision": precision, "recompute": recompute, "tokens": max(int(tokens), length * sequences)}
    return RunConfig.model_validate(
        {
            "model": model,
            "batch": {"sequence_length": length, "sequences": sequences, "micro_sequences": micro},
            "engine": engines[engine],
            "train": train,
            "schedule": {"kind": "cosine", "warmup_tokens": 0},
        }
    )


def build_layout(shard: int, tensor: int = 1, context: int = 1, expert: int = 1) -> ParallelLayout:
    """Return a resolved layout."""
    return ParallelLayout(shard=max(1, shard), tensor=tensor, context=context, expert=expert)
