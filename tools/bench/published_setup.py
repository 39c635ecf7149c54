"""Types and builders of published setups: a config, a layout, a device, a software, and the measured number.

Reads data/published_tables.yaml (software generations, devices, shapes) and tests/data/estimate/published_models.json.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from llmsys.config.load import load_model_config
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import LlmsysError
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.software_profile import COMPILED, EAGER, SoftwareProfile

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "estimate"
SHAPES = DATA / "published_models.json"
TABLES = Path(__file__).resolve().parent / "data" / "published_tables.yaml"
BASES = {"eager": EAGER, "compiled": COMPILED}
Row = dict[str, Any]


@cache
def _read_tables() -> Row:
    values: Row = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
    return values


@cache
def load_software(name: str) -> SoftwareProfile:
    """Return a software generation by its name in data/published_tables.yaml, or `eager` or `compiled`."""
    if name in BASES:
        return BASES[name]
    values = dict(_read_tables()["software"][name])
    base = load_software(values.pop("base")).model_dump() if "base" in values else {}
    return SoftwareProfile.model_validate(base | values)


def load_shapes() -> dict[str, dict[str, int]]:
    """Return the shapes and memory settings of Korthikanti's models, by name."""
    shapes: dict[str, dict[str, int]] = _read_tables()["shapes"]
    return shapes


@dataclass(frozen=True)
class Setup:
    """One measured number and the setup that predicts it: seconds per step, or accelerator-hours of a run."""

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
        """Number of devices."""
        return self.layout.world_size * self.pipeline


def load_published_model(name: str, row: Row) -> ModelConfig:
    """Return a model by name: one of our configs, a shape of published_models.json, or a dense one by its size."""
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


def resolve_device_name(name: str) -> str:
    """Return our name of a device; raise ConfigError when it has no profile."""
    ours: str = _read_tables()["devices"].get(name, name.lower())
    load_device_profile(ours)
    return ours


def build_dense_model(parameters: float) -> ModelConfig:
    """Return a decoder of about that many parameters, 128 channels of width per layer (Kaplan 2020, figure 5)."""
    layers = max(2, round((parameters / (12 * 128**2)) ** (1 / 3)))
    return build_gpt_model(128 * layers, layers, layers, 50_304, 2048)


def build_gpt_model(hidden: int, layers: int, heads: int, vocabulary: int, length: int) -> ModelConfig:
    """Return GPT-2's architecture in that size, as in Megatron's tables."""
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
    """Return a run of that model under FSDP, or ZeRO-1 as pipelines use it."""
    model = model.model_copy(update={"max_position_embeddings": max(length, model.max_position_embeddings)})
    engines: dict[str, Row] = {"fsdp": {"kind": "torch"}, "zero1": {"kind": "deepspeed", "zero_stage": 1}}
    train = {"precision": precision, "activation_checkpoint": recompute, "tokens": max(int(tokens), length * sequences)}
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
