"""The inputs of DeepSpeed: its config, the model with initial values, and the optimizer.

Under ZeRO-3 a parameter is sharded as soon as it has a value, so no rank ever holds the full model.
Under the other stages every rank holds it.
"""

import contextlib
import io
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig
from llmsys.errors import ConfigError
from llmsys.model.initialization import Initializer
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.optim.build_optimizer import build_optimizer
from llmsys.optim.elementwise import ElementwiseOptimizer, require_elementwise
from llmsys.optim.parameter_groups import build_parameter_groups
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.expert_parallel import AllToAllTokenDispatcher
from llmsys.parallel.flat_muon import FlatMuon

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups, safe_get_full_grad

# Users cannot act on DeepSpeed's use of torch's older names.
warnings.filterwarnings(
    "ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning
)

# DeepSpeed would compile a shared-memory all-reduce for CPUs at start-up: minutes on a slow
# machine, an error without a compiler, and other sums than gloo's.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# Largest bucket of gradients that is reduced at once, in elements.
BUCKET = 1 << 28


class DeepSpeedExpertGroup(MoE):  # type: ignore[misc]
    """A module that tells DeepSpeed about the expert axis, without parameters or forward: our own
    layers do the work.

    DeepSpeed looks for an instance of its MoE among the modules and lets it create the process
    groups.
    """

    def __init__(self, num_experts: int, size: int) -> None:
        nn.Module.__init__(self)
        self.num_experts = num_experts
        self.ep_size = size
        self.num_local_experts = num_experts // size
        self.expert_group_name = f"ep_size_{size}"

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Create the expert process groups. DeepSpeed calls it while it builds its engine."""
        if self.expert_group_name not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(
                self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
            )


def build_deepspeed_config(
    model: Transformer, *, zero_stage: int, offload: bool, clip: float, compute_dtype: torch.dtype
) -> dict[str, Any]:
    """Build the dictionary that DeepSpeed takes as its config.

    Args:
        model: The model; its parameters decide sizes of buckets.
        zero_stage: 0 to 3. Stage 0 gets float32 parameters and does not clip, see `Zero0State`.
        offload: Keep masters and moments in host memory.
        clip: Maximum gradient norm.
        compute_dtype: Dtype of the forward pass.

    Returns:
        The config.

    Raises:
        ConfigError: fp16 on a device for which DeepSpeed does not support it.
    """
    if compute_dtype == torch.float16 and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            "train.precision=fp16 under engine.kind=deepspeed needs a device with fp16, and "
            "DeepSpeed finds none here. Use train.precision=bf16, or engine.kind=torch."
        )
    sizes = [parameter.numel() for parameter in model.parameters()]
    zero: dict[str, Any] = {
        "stage": zero_stage,
        "reduce_bucket_size": min(BUCKET, max(sum(sizes), 1)),
        # Vectors stay unsharded: gathering them costs more than keeping them.
        "stage3_param_persistence_threshold": max(
            (p.numel() for p in model.parameters() if p.ndim == 1), default=0
        ),
        # it would replace torch's linear function for the whole process
        "memory_efficient_linear": False,
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    mixed = zero_stage > 0
    return {
        # for its own accounting only: micro-batches may differ in size
        "train_micro_batch_size_per_gpu": 1,
        # more than one, so that it keeps sums; the engine sets the boundary
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clip if mixed else 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": mixed and compute_dtype == torch.bfloat16, "check_grad_overflow": True},
        # A constant: the engine scales the loss.
        "fp16": {"enabled": mixed and compute_dtype == torch.float16, "loss_scale": 1.0},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own is compiled at start; torch's has the same numbers
        "zero_force_ds_cpu_optimizer": False,
    }


def initialize_deepspeed(
    model: Transformer, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> Any:
    """Build DeepSpeed's engine around a model.

    Args:
        model: A model with storage. Its buffers keep their values and dtypes, which DeepSpeed
            would cast.
        optimizer: The optimizer that it steps.
        settings: The result of `build_deepspeed_config`.

    Returns:
        DeepSpeed's engine.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if "RANK" not in os.environ:
        os.environ.setdefault("LOCAL_RANK", "0")  # one process without a launcher
    # it prints its memory use, and our stdout may be JSON
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name]
    if settings["zero_optimization"]["stage"] == 3:
        _register_head_parameters(model)
    return engine


def _register_head_parameters(model: Transformer) -> None:
    """Tell ZeRO-3 that the model's forward reads the weight and bias of its head, as the fused
    loss does.

    It finds such a parameter by itself only when a forward meets it sharded. A bias is unsharded
    until a step is refused; found so late, it is missing in the order of parameters that DeepSpeed
    has recorded, and the step ends in its "tracing error".
    """
    for parameter in () if model.head is None else model.head.parameters(recurse=False):
        deepspeed.zero.register_external_parameter(model, parameter)


def materialize_full_parameters(
    model: Transformer, meshes: DeviceMeshes, device: torch.device, initial: Initializer
) -> None:
    """Set the initial values of every parameter on every rank.

    Args:
        model: The model on the meta device.
        meshes: The sub-meshes; of split experts a rank keeps its own, marked as DeepSpeed
            expects.
        device: Device of this rank.
        initial: Computes initial values.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.to_empty(device=device)
    model.reset_buffers()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial(name, shapes[name], None))
    if meshes.expert is None:
        return
    size = meshes.expert.size()
    rank = meshes.expert.get_local_rank()
    for layer in model.list_moe_layers():
        layer.dispatcher = AllToAllTokenDispatcher(meshes.expert.get_group(), layer.config)
        for name, parameter in list(layer.experts.named_parameters(recurse=False)):
            local = nn.Parameter(parameter.data.chunk(size, dim=0)[rank].clone())
            local.allreduce = False  # type: ignore[attr-defined]
            local.group_name = f"ep_size_{size}"  # type: ignore[attr-defined]
            layer.experts.register_parameter(name, local)
    model.expert_axis = DeepSpeedExpertGroup(model.list_moe_layers()[0].config.num_experts, size)


def materialize_partitioned_parameters(
    model: Transformer,
    settings: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    initial: Initializer,
) -> None:
    """Set the initial values of the parameters and shard each over all ranks before the next one.

    No rank holds the model: DeepSpeed alone would shard a full one.

    Args:
        model: The model on the meta device.
        settings: The result of `build_deepspeed_config`.
        device: Device of this rank.
        dtype: Dtype of the shards.
        initial: Computes initial values.
    """
    partitioner = deepspeed.zero.Init(config_dict_or_path=settings, dtype=dtype)
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = (
                None if buffer is None else torch.empty_like(buffer, device=device)
            )
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                full_name = f"{module_name}.{name}".lstrip(".")
                value = initial(full_name, parameter.shape, None).to(device, dtype)
                module.register_parameter(name, nn.Parameter(value))
                partitioner._convert_to_zero_parameters([module._parameters[name]])
        # The registration has untied the head.
        model._tie_weights()
    model.reset_buffers()
    # Gather and reduce one block at a time, as FSDP2 does. By default ZeRO-3 hooks every layer
    # inside of blocks, where compilation and activation checkpointing allow no hooks. It finds
    # parameters outside of blocks by itself.
    deepspeed.utils.set_z3_leaf_modules(model, [TransformerBlock])


def build_flat_optimizer(
    named: dict[str, nn.Parameter],
    shapes: dict[str, torch.Size],
    meshes: DeviceMeshes,
    config: OptimizerConfig,
    model: ModelConfig,
    compute_dtype: torch.dtype,
    *,
    has_matrices: bool,
) -> torch.optim.Optimizer:
    """Build an optimizer with the parameter groups of every engine, for DeepSpeed's flat shards.

    Args:
        named: Parameters by name.
        shapes: Full shape of each, which a partitioned parameter does not know.
        meshes: The sub-meshes; groups of split experts are marked for DeepSpeed.
        config: The section `optimizer`.
        model: The model's config, for learning rates by parametrization.
        compute_dtype: Dtype of the forward pass.
        has_matrices: Every rank has parameters in full (stage 0), as optimizers of full matrices
            need them.

    Returns:
        The optimizer.
    """
    if has_matrices and not config.can_update_flat_shards:
        return build_optimizer(named, config, compute_dtype=compute_dtype, model=model)
    like = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
    param_groups: list[dict[str, Any]] = []
    for group in build_parameter_groups(like.items(), config, model):
        entry: dict[str, Any] = {
            "params": [named[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "rate_scale": group.lr_multiplier,
            "name": group.name,
            "algorithm": group.algorithm,
        }
        if meshes.expert is not None and group.role == "experts":
            entry |= {"moe": True, "name": f"ep_size_{meshes.expert.size()}"}
        param_groups.append(entry)
    if isinstance(config, MuonConfig):
        # fp16 would overflow in the Newton-Schulz products.
        return FlatMuon(
            param_groups,
            config,
            torch.float32 if compute_dtype == torch.float32 else torch.bfloat16,
        )
    elementwise = require_elementwise(config)
    # torch's kernel decays every element.
    if not isinstance(elementwise, AdamWConfig) or config.cautious_weight_decay:
        return ElementwiseOptimizer(param_groups, elementwise)
    return torch.optim.AdamW(
        param_groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
    )


def gather_full_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter before the optimizer step, in any ZeRO stage. Collective.

    Args:
        parameter: The parameter.

    Returns:
        The full gradient on every rank; None without one.
    """
    gradient: Tensor | None = safe_get_full_grad(parameter)
    return gradient
