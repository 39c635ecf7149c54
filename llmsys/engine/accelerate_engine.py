"""The accelerate engine: data parallel in the processes that the user's accelerate config describes.

Every rank holds everything: fp32 parameters that the forward reads as the compute dtype, and their moments.
What accelerate does differently from the protocol, and how it is undone here: it averages gradients over ranks and
over accumulation steps (the loss is multiplied by both), would copy rank 0's buffers to all ranks before each step
(switched off), trains unconnected ranks without a word (refused), and brings plugins whose sharding knows nothing of
our state (refused by name).
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
    LogicalState,
    Loss,
    StepResult,
    always,
    counts_of,
    saved_buffers,
    sums_of,
)
from llmsys.engine.loss_scale import LossScale
from llmsys.engine.objective import shares_of
from llmsys.errors import ConfigError, LaunchError
from llmsys.model.init import initial_value
from llmsys.model.transformer import Transformer
from llmsys.optim.build import MOMENTS, make_optimizer
from llmsys.optim.rate import set_rates
from llmsys.parallel.apply import materialize
from llmsys.parallel.cast import compute_in
from llmsys.parallel.clip import clip_gradients
from llmsys.parallel.copies import unlearnt
from llmsys.parallel.group import world_size
from llmsys.parallel.mesh import Meshes

PLUGINS = {
    "ACCELERATE_USE_FSDP": ("FSDP", "engine.kind=torch, which shards by layout.shard"),
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "engine.kind=deepspeed, which has its stages"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "engine.kind=torch with layout.tensor"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("a parallelism_config", "engine.kind=torch with its layout"),
}
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class AccelerateEngine:
    """DDP by accelerate around AdamW. `model` is built on the meta device; see TorchEngine for the arguments."""

    def __init__(
        self,
        model: Transformer,
        *,
        meshes: Meshes,
        optimizer: OptimizerConfig,
        loss: Loss,
        compute_dtype: torch.dtype,
        seed: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.module = model
        self._loss = loss
        self._clip = optimizer.gradient_clip
        self._scale = LossScale() if compute_dtype == torch.float16 else None
        self._accelerator = connected(compute_dtype, device)
        materialize(model, device, lambda name, shape: initial_value(model.config, name, shape, seed))
        named = dict(model.named_parameters())
        compute_in(model, compute_dtype)
        self._optimizer = make_optimizer(named, optimizer, compute_dtype=compute_dtype)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, unlearnt(model))
        with warnings.catch_warnings():  # torch has a newer name for a setting that accelerate passes on
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            self._wrapped = self._accelerator.prepare_model(model)

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = always, extras: Sequence[float] = ()
    ) -> StepResult:
        """See Engine."""
        self._wrapped.train()
        counts = counts_of(batches, self.device)
        scale = 1.0 if self._scale is None else self._scale.value
        # accelerate divides by the accumulation steps that its config says, DDP by the ranks.
        factor = scale * world_size() * self._accelerator.gradient_accumulation_steps
        total = torch.zeros((), device=self.device)
        for place, batch in enumerate(batches, start=1):
            last = place == len(batches)
            with contextlib.nullcontext() if last else self._accelerator.no_sync(self._wrapped):
                total += self._backward(batch.to(self.device), counts, factor)
        norm = float(clip_gradients(self.module.parameters(), self._clip, scale))
        loss, sums = sums_of(total, counts[0], extras)
        fits = self._scale is None or self._scale.fits(loss, norm)
        applied = fits and accept(loss, norm)
        if applied:
            set_rates(self._optimizer.param_groups, learning_rate)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, int(counts[0]), applied, sums)

    def _backward(self, batch: Batch, counts: Tensor, factor: float) -> Tensor:
        share, nats = shares_of(self.module, self._wrapped, batch, self._loss, counts)
        self._accelerator.backward(share * factor)
        return nats

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """See Engine."""
        self._wrapped.eval()
        logits_BTV: Tensor = self._wrapped(**batch.to(self.device).inputs())
        return logits_BTV

    def state(self) -> LogicalState:
        """See Engine. The tensors are the living ones, the same on all ranks."""
        tensors: dict[str, Tensor] = {}
        states = self._optimizer.state
        for name, parameter in self.module.named_parameters():
            tensors[f"parameter/{name}"] = parameter.detach()
            moments = states[parameter]
            tensors |= {f"{ours}/{name}": moments[theirs] for ours, theirs in MOMENTS.items() if theirs in moments}
        tensors |= {f"buffer/{name}": buffer for name, buffer in saved_buffers(self.module)}
        tensors |= {} if self._scale is None else self._scale.state()
        return LogicalState(tensors, int(self._counters()[0]))

    def load(self, state: LogicalState) -> None:
        """See Engine."""
        own = self.state().tensors
        for name, tensor in state.tensors.items():
            if own[name] is not tensor:
                own[name].copy_(tensor)
        for steps in self._counters():
            steps.fill_(state.steps)

    def _counters(self) -> list[Tensor]:
        return [moments["step"] for moments in self._optimizer.state.values()]


def connected(compute_dtype: torch.dtype, device: torch.device) -> Accelerator:
    """An Accelerator in which the ranks of this run are one group.

    Raises ConfigError for what its config asks and this engine cannot keep, LaunchError for ranks that are not joined.
    """
    for problem in config_problems(os.environ, PRECISIONS[compute_dtype]):
        raise ConfigError(problem)
    handler = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[handler])
    kind = accelerator.distributed_type.value
    if world_size() > 1 and (kind == "NO" or accelerator.num_processes != world_size()):
        raise LaunchError(
            f"accelerate's distributed_type={kind} with {accelerator.num_processes} process in each group, and "
            f"{world_size()} ranks were started: each would train alone. Start them with `llmsys train` or "
            f"`accelerate launch --num_processes {world_size()}`, or use launch.processes=1."
        )
    if not (kind == "NO" or kind.startswith("MULTI_")):
        raise ConfigError(f"accelerate's distributed_type={kind} is not kept by engine.kind=accelerate. {_REMEDY}")
    return accelerator


_REMEDY = "Set distributed_type: MULTI_GPU with `accelerate config`, or use engine.kind=torch."


def config_problems(environment: Mapping[str, str], precision: str) -> list[str]:
    """What `accelerate launch` has passed on from the user's accelerate config, and this engine cannot keep."""
    problems = [
        f"The accelerate config asks for {what}, and engine.kind=accelerate cannot save its shards. Use {instead}."
        for name, (what, instead) in PLUGINS.items()
        if environment.get(name, "false").lower() in ("true", "1")
    ]
    mixed = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed not in ("no", precision):
        problems.append(
            f"The accelerate config says mixed_precision: {mixed}, and the run train.precision={precision}. "
            f"Set mixed_precision: 'no', which leaves it to the run, or train.precision=bf16 and the same there."
        )
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no":
        problems.append(
            f"The accelerate config says dynamo_backend: {backend}, which compiles the model in one piece. "
            f"Set dynamo_backend: 'no', and train.compile=block to compile it block by block."
        )
    return problems
