"""Build the model on the meta device, and the engine that trains it."""

from collections.abc import Callable
from typing import Any, assert_never

import torch

from llmsys.config.engine import AccelerateEngineConfig, DeepSpeedEngineConfig, TorchEngineConfig
from llmsys.config.objective import NextSentenceConfig
from llmsys.config.optimizer import ScheduleFreeConfig
from llmsys.config.python_blocks import PythonAttentionConfig
from llmsys.config.run import RunConfig
from llmsys.engine.ema_engine import EmaEngine
from llmsys.engine.engine import Engine
from llmsys.engine.pipelined_model import PipelinedModel
from llmsys.engine.schedule_free_engine import ScheduleFreeEngine
from llmsys.errors import ConfigError
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.pipeline_stages import PipelineCut, cut_layers
from llmsys.model.output_head import get_next_sentence_head
from llmsys.model.python_block_check import get_python_block
from llmsys.model.transformer import Transformer
from llmsys.parallel.block_wrapping import wrap_blocks
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.fp8 import convert_experts_to_fp8, convert_to_fp8
from llmsys.parallel.fsdp import DataParallel
from llmsys.train.auto_data_parallel import resolve_data_parallel
from llmsys.train.cross_entropy import build_training_loss
from llmsys.train.gradient_noise_scale import NoiseScaleMeter
from llmsys.train.precision import DTYPES


def build_model(config: RunConfig) -> Transformer:
    """Build the model on the meta device, without storage: engines materialize it in shards.

    Args:
        config: The config of the run.

    Returns:
        The model.

    Raises:
        ConfigError: Its number of parameters differs from the estimate, which would then be
            wrong in everything else.
    """
    with torch.device("meta"):
        model = Transformer(config.model)
    _check_documents(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    estimated = count_parameters(config.model).total
    if built != estimated:
        raise ConfigError(
            f"The model has {built} parameters, the estimate says {estimated}. This is a bug: "
            "report it."
        )
    return model


def _check_documents(config: RunConfig) -> None:
    """Raise ConfigError for rows of several documents, which a class of the user's own does not
    mask.
    """
    attention = config.model.attention
    if not isinstance(attention, PythonAttentionConfig):
        return
    needs_mask = config.batch.attention_scope == "document" or config.objective.has_padding
    block = get_python_block(attention)
    if needs_mask and not block.can_read_documents:
        raise ConfigError(
            f"model.attention: {type(block).__name__} does not mask documents, and rows hold "
            "several, or padding. Mask context.documents_BT and set masks_documents = True, or use "
            "batch.attention_scope=window with an objective without padding."
        )


def build_engine(
    config: RunConfig,
    meshes: DeviceMeshes,
    device: torch.device,
    noise: NoiseScaleMeter | None = None,
    *,
    initialize: bool = True,
    report_pass: Callable[[str], None] | None = None,
) -> Engine:
    """Build the engine of `engine.kind` with initialized weights.

    Args:
        config: the config with its precision resolved.
        meshes: device meshes of the resolved layout.
        device: device of this rank.
        noise: meter of the gradient noise scale, which the torch engine calls after each
            micro-batch.
        initialize: draw the initial weights. False: a checkpoint will replace them, and they are
            NaN until then.
        report_pass: called with each pass of a pipeline stage that begins, and with "" at its end.

    Returns:
        The engine, wrapped into an exponential moving average where the config asks for one.
    """
    # A run has resolved it before; checks of one step leave it to this.
    config = resolve_data_parallel(config, device)
    engine: Engine = _build_base_engine(config, meshes, device, noise, initialize)
    if report_pass is not None and isinstance(
        pipeline := getattr(engine, "pipeline", None), PipelinedModel
    ):
        pipeline.report_passes(report_pass)
    if isinstance(config.optimizer, ScheduleFreeConfig):
        return ScheduleFreeEngine(engine, config.optimizer.betas[0])
    half_life = config.train.ema_half_life_tokens
    return EmaEngine(engine, half_life) if half_life else engine


def _build_base_engine(
    config: RunConfig,
    meshes: DeviceMeshes,
    device: torch.device,
    noise: NoiseScaleMeter | None,
    initialize: bool,
) -> Engine:
    common: dict[str, Any] = {
        "meshes": meshes,
        "optimizer": config.optimizer,
        "loss": build_training_loss(config.loss),
        "compute_dtype": DTYPES[config.train.resolved_precision],
        "seed": config.run.seed,
        "device": device,
        "initialize": initialize,
    }
    model = build_model(config)
    if isinstance(config.objective, NextSentenceConfig):
        get_next_sentence_head(model).is_trained = True
    # Before checkpointing and compilation, which wrap the converted modules.
    if config.train.matmul_dtype != "compute":
        convert_to_fp8(model, config.train.matmul_dtype, tensor_ranks=meshes.layout.tensor)
    if config.train.expert_matmul_dtype != "compute":
        convert_experts_to_fp8(model, config.train.expert_matmul_dtype)
    wrap_blocks(
        model,
        config.train.activation_checkpoint,
        compiles=config.train.compile == "block",
        tensor_ranks=meshes.layout.tensor,
        separates_experts=meshes.has_separate_experts,
    )
    # Engines are imported where they are built: deepspeed and accelerate are optional and slow to
    # import.
    match config.engine:
        case AccelerateEngineConfig():
            from llmsys.engine.accelerate_engine import AccelerateEngine

            return AccelerateEngine(model, **common)
        case DeepSpeedEngineConfig() as settings:
            from llmsys.engine.deepspeed_engine import DeepSpeedEngine

            return DeepSpeedEngine(
                model, zero_stage=settings.zero_stage, offload=settings.cpu_offload, **common
            )
        case TorchEngineConfig() as settings if config.train.reproducibility == "bitwise":
            from llmsys.engine.bitwise_engine import BitwiseEngine

            bitwise = BitwiseEngine(
                model,
                **common,
                cut=_cut_stages(config, meshes),
                data_parallel=_get_data_parallel(settings),
            )
            if noise is not None:
                noise.engine = bitwise
            return bitwise
        case TorchEngineConfig() as settings:
            from llmsys.engine.torch_engine import TorchEngine

            engine = TorchEngine(
                model,
                **common,
                cut=_cut_stages(config, meshes),
                data_parallel=_get_data_parallel(settings),
                offload=settings.cpu_offload,
                gradients=settings.gradient_accumulation,
                reshard=settings.reshard,
                reduce_dtype=DTYPES[settings.reduce_dtype],
            )
            if noise is not None:
                noise.engine = engine
            return engine
        case unreachable:
            assert_never(unreachable)


def _get_data_parallel(settings: TorchEngineConfig) -> DataParallel:
    assert settings.data_parallel != "auto"
    return settings.data_parallel


def _cut_stages(config: RunConfig, meshes: DeviceMeshes) -> PipelineCut | None:
    return (
        None
        if meshes.pipeline is None
        else cut_layers(config.model, meshes.layout, config.batch.sequence_length)
    )
