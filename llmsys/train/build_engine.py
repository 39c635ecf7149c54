"""From a config to a model without storage, and to the engine that trains it."""

from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.engine.ema_engine import EmaEngine
from llmsys.engine.engine import Engine
from llmsys.errors import ConfigError
from llmsys.estimate.parameter_count import count_parameters
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import apply_activation_checkpoint
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.fp8 import convert_to_fp8
from llmsys.parallel.parallelize import compile_blocks
from llmsys.train.gradient_noise_scale import NoiseScaleMeter
from llmsys.train.linear_cross_entropy import build_training_loss
from llmsys.train.precision import DTYPES


def build_model(config: RunConfig) -> Transformer:
    """The model without storage, its size checked against the estimate to the last parameter."""
    with torch.device("meta"):
        model = Transformer(config.model)
    built = sum(parameter.numel() for parameter in model.parameters())
    estimated = count_parameters(config.model).total
    if built != estimated:
        raise ConfigError(f"The model has {built} parameters, the estimate says {estimated}. This is a bug: report it.")
    return model


def build_engine(
    config: RunConfig, meshes: DeviceMeshes, device: torch.device, noise: NoiseScaleMeter | None = None
) -> Engine:
    """The engine that the config names, with starting values; `noise` looks at its gradients."""
    engine: Engine = _build_base_engine(config, meshes, device, noise)
    half_life = config.train.ema_half_life_tokens
    return EmaEngine(engine, half_life) if half_life else engine


def _build_base_engine(
    config: RunConfig, meshes: DeviceMeshes, device: torch.device, noise: NoiseScaleMeter | None
) -> Engine:
    common: dict[str, Any] = {
        "meshes": meshes,
        "optimizer": config.optimizer,
        "loss": build_training_loss(config.loss),
        "compute_dtype": DTYPES[config.train.resolved_precision],
        "seed": config.run.seed,
        "device": device,
    }
    model = build_model(config)
    if config.train.matmul_dtype == "fp8":
        convert_to_fp8(model)
    apply_activation_checkpoint(model, config.train.activation_checkpoint, compiled=config.train.compile == "block")
    if config.train.compile == "block":
        compile_blocks(model)
    if config.engine.kind == "accelerate":
        from llmsys.engine.accelerate_engine import AccelerateEngine

        return AccelerateEngine(model, **common)
    if config.engine.kind == "deepspeed":
        from llmsys.engine.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, zero_stage=config.engine.zero_stage, offload=config.engine.cpu_offload, **common)
    if config.train.reproducibility == "bitwise":
        from llmsys.engine.bitwise_engine import BitwiseEngine

        return BitwiseEngine(model, **common)
    from llmsys.engine.torch_engine import TorchEngine

    engine = TorchEngine(
        model,
        **common,
        data_parallel=config.engine.data_parallel,
        offload=config.engine.cpu_offload,
        gradients=config.engine.gradient_accumulation,
    )
    if noise is not None:
        noise.engine = engine
    return engine
