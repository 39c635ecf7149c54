"""The accelerate engine: DDP by Hugging Face accelerate, as the user's accelerate config describes.

Every rank holds float32 parameters, which the forward reads in the compute dtype, and their
moments.

Differences of accelerate from the `Engine` protocol, and their treatment:

- It averages gradients over ranks and accumulation steps: the loss is multiplied by both.
- It copies rank 0's buffers to all ranks before each step: disabled.
- It trains unconnected ranks separately without an error: LaunchError.
- Its plugins shard state that this engine cannot save: ConfigError.
"""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from llmsys.config.optimizer import OptimizerConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import (
    Accept,
    EngineState,
    Loss,
    ObserveGradients,
    StepResult,
    accept_all,
    iter_persistent_buffers,
    reduce_step_numbers,
    reduce_token_counts,
)
from llmsys.engine.grad_scaler import GradScaler
from llmsys.engine.logit_clip import LogitClip
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.errors import ConfigError, LaunchError
from llmsys.model.initialization import build_initializer
from llmsys.model.transformer import Transformer
from llmsys.optim.build_optimizer import MOMENTS, build_optimizer
from llmsys.optim.lr_schedule import set_rates
from llmsys.parallel.ddp import list_unused_parameters
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.gradient_clipping import (
    clip_gradients,
    collect_gradients,
    list_absent_gradients,
)
from llmsys.parallel.mixed_precision import cast_parameters
from llmsys.parallel.parallelize import materialize_parameters
from llmsys.parallel.process_group import get_world_size

PLUGINS = {
    "ACCELERATE_USE_FSDP": ("FSDP", "engine.kind=torch with layout.shard"),
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "engine.kind=deepspeed with zero_stage"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "engine.kind=torch with layout.tensor"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "a parallelism_config",
        "engine.kind=torch with layout.tensor",
    ),
}
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class AccelerateEngine:
    """DDP by accelerate around AdamW or Muon. `model` is on the meta device; arguments as for
    `TorchEngine`.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        meshes: DeviceMeshes,
        optimizer: OptimizerConfig,
        loss: Loss,
        compute_dtype: torch.dtype,
        seed: int,
        device: torch.device,
        initialize: bool = True,
    ) -> None:
        """Allocate and fill the parameters, and wrap the model.

        Args:
            model: A model on the meta device; it gets its initial values here.
            meshes: Sub-meshes of the run's layout.
            optimizer: The `optimizer:` section.
            loss: The loss at the head.
            compute_dtype: Dtype of the forward; in float16 the loss is scaled.
            seed: Seed of the initial values.
            device: Device of this rank.
            initialize: Draw the initial values. False: a checkpoint will replace them.
        """
        self.device = device
        self.module = model
        self.observe_gradients: ObserveGradients | None = None
        self._loss = loss
        self._clip = optimizer.max_grad_norm
        self._scale = GradScaler() if compute_dtype == torch.float16 else None
        self._accelerator = build_accelerator(compute_dtype, device)
        materialize_parameters(
            model, device, build_initializer(model.config, seed, draws=initialize)
        )
        self._named = list(model.named_parameters())
        # Before accelerate wraps the model: DDP then sums the float32 gradients of the parameters
        # themselves.
        cast_parameters(model, compute_dtype)
        limit = optimizer.max_attention_logit
        self._logit_clip = None if limit is None else LogitClip(model, limit)
        self._optimizer = build_optimizer(
            dict(self._named), optimizer, compute_dtype=compute_dtype, model=model.config
        )
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, list_unused_parameters(model)
        )
        # torch has a newer name for a setting that accelerate passes on
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning
            )
            self._wrapped = self._accelerator.prepare_model(model)

    def train_step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        accept: Accept = accept_all,
        extras: Sequence[float] = (),
    ) -> StepResult:
        """Implement `Engine.train_step`."""
        self._wrapped.train()
        counts = reduce_token_counts(batches, self.device)
        scale = 1.0 if self._scale is None else self._scale.scale
        # accelerate divides by the accumulation steps that its config says, DDP by the ranks.
        factor = scale * get_world_size() * self._accelerator.gradient_accumulation_steps
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            # Otherwise DDP reduces after every backward, not only after the last.
            with contextlib.nullcontext() if last else self._accelerator.no_sync(self._wrapped):
                total += self._train_micro_batch(batch.to(self.device), counts, factor)
        absent = list_absent_gradients(self._named)
        if self.observe_gradients is not None:
            self.observe_gradients(collect_gradients(self.module.named_parameters()), scale)
        clipped = clip_gradients(self.module.parameters(), self._clip, scale)
        loss, norm, targets, sums = reduce_step_numbers(total, counts, extras, clipped)
        fits = self._scale is None or self._scale.update_scale(loss, norm)
        # An overflow is cured by a smaller scale: the step guard is not asked.
        applied = fits and accept(loss, norm)
        if applied:
            set_rates(self._optimizer.param_groups, learning_rate)
            self._optimizer.step()
        if self._logit_clip is not None:
            self._logit_clip.finish_step(applied=applied)
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, targets, applied, sums, absent)

    def _train_micro_batch(self, batch: Batch, counts: Tensor, factor: float) -> Tensor:
        share, nats = compute_loss_share(self.module, self._wrapped, batch, self._loss, counts)
        self._accelerator.backward(share * factor)
        return nats

    @torch.no_grad()
    def compute_logits(self, batch: Batch) -> Tensor:
        """Implement `Engine.compute_logits`."""
        self._wrapped.eval()
        logits_BTV: Tensor = self._wrapped(**batch.to(self.device).to_model_inputs())
        return logits_BTV

    def get_state(self) -> EngineState:
        """Implement `Engine.get_state`. The tensors are not copies, and equal on all ranks."""
        tensors: dict[str, Tensor] = {}
        states = self._optimizer.state
        for name, parameter in self.module.named_parameters():
            tensors[f"parameter/{name}"] = parameter.detach()
            moments = states[parameter]
            # Muon has no second moment.
            tensors |= {
                f"{ours}/{name}": moments[theirs]
                for ours, theirs in MOMENTS.items()
                if theirs in moments
            }
        tensors |= {
            f"buffer/{name}": buffer for name, buffer in iter_persistent_buffers(self.module)
        }
        tensors |= {} if self._scale is None else self._scale.state_dict()
        tensors |= self._optimizer.get_shared_state()
        return EngineState(tensors, int(self._list_step_counters()[0]))

    def load_state(self, state: EngineState) -> None:
        """Implement `Engine.load_state`."""
        own = self.get_state().tensors
        for name, tensor in state.tensors.items():
            # Loaders fill the engine's own tensors in place; others are copied.
            if own[name] is not tensor:
                own[name].copy_(tensor)
        for steps in self._list_step_counters():
            steps.fill_(state.steps)

    def _list_step_counters(self) -> list[Tensor]:
        return [moments["step"] for moments in self._optimizer.state.values()]


def build_accelerator(compute_dtype: torch.dtype, device: torch.device) -> Accelerator:
    """Build an Accelerator in which the ranks of this run are one group.

    Args:
        compute_dtype: Dtype of the forward pass.
        device: Device of this rank.

    Returns:
        The Accelerator, with the settings of the user's `accelerate config`.

    Raises:
        ConfigError: The accelerate config asks for a feature that this engine does not support.
        LaunchError: The ranks are not joined.
    """
    for problem in find_config_violations(os.environ, PRECISIONS[compute_dtype]):
        raise ConfigError(problem)
    handler = DistributedDataParallelKwargs(broadcast_buffers=False)
    # mixed_precision="no": cast_parameters replaces autocast, which keeps other dtypes per
    # operation.
    accelerator = Accelerator(
        cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[handler]
    )
    kind = accelerator.distributed_type.value
    if get_world_size() > 1 and (kind == "NO" or accelerator.num_processes != get_world_size()):
        raise LaunchError(
            f"accelerate's distributed_type={kind} with {accelerator.num_processes} process per "
            f"group, but {get_world_size()} ranks were started: each would train alone. Start "
            f"them with `llmsys train` or `accelerate launch --num_processes {get_world_size()}`, "
            "or use launch.processes=1."
        )
    if not (kind == "NO" or kind.startswith("MULTI_")):
        raise ConfigError(
            f"accelerate's distributed_type={kind} is not supported by engine.kind=accelerate. "
            f"{_REMEDY}"
        )
    return accelerator


_REMEDY = "Set distributed_type: MULTI_GPU with `accelerate config`, or use engine.kind=torch."


def find_config_violations(environment: Mapping[str, str], precision: str) -> list[str]:
    """List the settings of the user's accelerate config that this engine does not support.

    Args:
        environment: The environment variables, by which `accelerate launch` passes settings on.
        precision: `train.precision` of the run.

    Returns:
        A message for each; empty when all are supported.
    """
    problems = [
        f"The accelerate config enables {plugin}, but engine.kind=accelerate cannot save its "
        f"shards. Use {instead}."
        for name, (plugin, instead) in PLUGINS.items()
        if environment.get(name, "false").lower() in ("true", "1")
    ]
    mixed = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed not in ("no", precision):
        problems.append(
            f"The accelerate config has mixed_precision: {mixed}, but the run has "
            f"train.precision={precision}. Set mixed_precision: 'no', so that the run decides, or "
            "set both to bf16."
        )
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no":
        problems.append(
            f"The accelerate config has dynamo_backend: {backend}, which compiles the whole "
            "model. Set dynamo_backend: 'no', and train.compile=block to compile it block by "
            "block."
        )
    return problems
