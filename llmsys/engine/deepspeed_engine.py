"""The DeepSpeed engine: every ZeRO stage around an elementwise optimizer, with our own expert
dispatcher.

Differences of DeepSpeed from the `Engine` protocol, and their treatment:

- It divides gradients by the world size: the loss is multiplied by it.
- It rounds the initial weights to the compute dtype before it makes masters: masters are set again
  from float32.
- It casts buffers: their values and dtypes are restored.
- It owns its shards: `get_state` gathers one parameter at a time and keeps a slice.
- In stage 0 it would sum gradients of micro-batches in bfloat16: it gets float32 parameters that
  the forward reads as bfloat16.

deepspeed_setup.py builds its inputs, deepspeed_state.py reads and writes its masters and moments.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from llmsys.config.optimizer import MuonConfig, OptimizerConfig
from llmsys.data.batch import Batch
from llmsys.engine.deepspeed_matrices import list_flat_matrices
from llmsys.engine.deepspeed_setup import (
    build_deepspeed_config,
    build_flat_optimizer,
    gather_full_gradient,
    initialize_deepspeed,
    materialize_full_parameters,
    materialize_partitioned_parameters,
)
from llmsys.engine.deepspeed_state import ZeroStage, build_deepspeed_state
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
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.model.initialization import Initializer, build_initializer
from llmsys.model.transformer import Transformer
from llmsys.optim.build_optimizer import MOMENTS, OptimizersContainer
from llmsys.optim.elementwise import STATE_KEYS, build_elementwise_rule, require_elementwise
from llmsys.optim.lr_schedule import set_rates
from llmsys.optim.parameter_groups import get_parameter_role
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.dtensor_slices import to_dtensor_shard
from llmsys.parallel.flat_muon import FlatMuon
from llmsys.parallel.mixed_precision import cast_parameters
from llmsys.parallel.process_group import get_world_size


class DeepSpeedEngine:
    """ZeRO around an elementwise optimizer. `model` is on the meta device; arguments as for
    `TorchEngine`.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        meshes: DeviceMeshes,
        zero_stage: ZeroStage,
        optimizer: OptimizerConfig,
        loss: Loss,
        compute_dtype: torch.dtype,
        seed: int,
        device: torch.device,
        initialize: bool = True,
        offload: Literal["none", "optimizer"] = "none",
    ) -> None:
        """Partition the model by ZeRO, and allocate and fill it.

        Args:
            model: A model on the meta device; it gets its initial values here.
            meshes: Sub-meshes of the run's layout.
            zero_stage: What is sharded. 0: nothing. 1: master weights and moments. 2: also
                gradients. 3: also weights.
            optimizer: The `optimizer:` section.
            loss: The loss at the head.
            compute_dtype: Dtype of the forward; in float16 the loss is scaled.
            seed: Seed of the initial values.
            device: Device of this rank.
            initialize: Draw the initial values. False: a checkpoint will replace them.
            offload: "optimizer" keeps master weights and moments in host memory and runs the
                optimizer there. Default: "none".
        """
        self.device = device
        self.module = model
        self._meshes = meshes
        self.observe_gradients: ObserveGradients | None = None
        self._loss = loss
        self._scale = GradScaler() if compute_dtype == torch.float16 else None
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        clip = optimizer.max_grad_norm
        offloads = offload == "optimizer"
        initial = build_initializer(model.config, seed, draws=initialize)
        settings = build_deepspeed_config(
            model, zero_stage=zero_stage, offload=offloads, clip=clip, compute_dtype=compute_dtype
        )
        if zero_stage == 3:
            materialize_partitioned_parameters(model, settings, device, compute_dtype, initial)
        else:
            materialize_full_parameters(model, meshes, device, initial)
        named = dict(model.named_parameters())
        sections = meshes, optimizer, model.config, compute_dtype
        stepper = build_flat_optimizer(named, self._shapes, *sections, has_matrices=zero_stage == 0)
        self._engine = initialize_deepspeed(model, stepper, settings)
        if zero_stage == 0:
            cast_parameters(model, compute_dtype)
        moments = (
            {} if isinstance(stepper, OptimizersContainer) else self._list_flat_moments(optimizer)
        )
        self._state = build_deepspeed_state(self._engine, zero_stage, clip, meshes, moments=moments)
        if isinstance(stepper, FlatMuon):
            stepper.matrices = list_flat_matrices(self._engine.optimizer, device)
        self._set_masters(initial)
        self._with_gradient: set[str] = set()
        for name, parameter in named.items():
            parameter.register_post_accumulate_grad_hook(partial(self._record_gradient, name))

    def _record_gradient(self, name: str, parameter: Tensor) -> None:
        """Record that a backward pass of this rank gave a gradient; DeepSpeed takes it away."""
        self._with_gradient.add(name)

    def _list_flat_moments(self, optimizer: OptimizerConfig) -> dict[Tensor, tuple[str, ...]]:
        """Return the keys of each parameter's moments in flat shards."""
        found: dict[Tensor, tuple[str, ...]] = {}
        for name, parameter in self.module.named_parameters():
            if isinstance(optimizer, MuonConfig):
                count = optimizer.count_moments(name, len(self._shapes[name]))
                moments = ("first_moment", "second_moment")[:count]
            else:
                moments = build_elementwise_rule(require_elementwise(optimizer)).moments
            found[parameter] = tuple(STATE_KEYS[moment] for moment in moments)
        return found

    def _set_masters(self, initial: Initializer) -> None:
        """Set float32 masters to the initial values of every engine, not to those rounded to the
        compute dtype.
        """
        for name, parameter in self.module.named_parameters():
            value = initial(name, self._shapes[name], None)
            if self._is_split(name):
                rank = self._meshes.expert.get_local_rank()  # type: ignore[union-attr]
                value = value.chunk(self._meshes.expert.size())[rank]  # type: ignore[union-attr]
            self._state.set_tensor(parameter, value.to(self.device), None)
        self._state.sync_weights()

    def train_step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        accept: Accept = accept_all,
        extras: Sequence[float] = (),
    ) -> StepResult:
        """Implement `Engine.train_step`."""
        self._engine.train()
        self._with_gradient.clear()
        counts = reduce_token_counts(batches, self.device)
        set_rates(self._engine.optimizer.param_groups, learning_rate)
        # DeepSpeed divides by the world size, for experts too; the product undoes it exactly for
        # powers of two.
        factor = get_world_size() * (
            1.0 if self._scale is None else self._state.set_loss_scale(self._scale.scale)
        )
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            self._engine.set_gradient_accumulation_boundary(number == len(batches))
            total += self._train_micro_batch(batch.to(self.device), counts, factor)
        if self.observe_gradients is not None:
            self.observe_gradients(
                self._gather_gradients(), 1.0 if self._scale is None else self._scale.scale
            )
        loss, _, targets, sums = reduce_step_numbers(total, counts, extras)
        norm, applied = self._state.step_optimizer(loss, self._add_overflow_check(accept))
        absent = tuple(name for name in self._shapes if name not in self._with_gradient)
        return StepResult(loss, norm, targets, applied, sums, absent)

    def _train_micro_batch(self, batch: Batch, counts: Tensor, factor: float) -> Tensor:
        share, nats = compute_loss_share(self.module, self._engine, batch, self._loss, counts)
        # The loss is a share of the step already; DeepSpeed would divide by its accumulation steps.
        self._engine.backward(share * factor, scale_wrt_gas=False)
        return nats

    def _gather_gradients(self) -> dict[str, Tensor]:
        """Return the full gradient of every parameter, of split experts this rank's as a
        DTensor. Collective.
        """
        found = {
            name: gather_full_gradient(parameter)
            for name, parameter in self.module.named_parameters()
        }
        return {
            name: torch.zeros(self._shapes[name], device=self.device)
            if gradient is None
            else DTensor.from_local(gradient, self._meshes.expert, [Shard(0)], run_check=False)
            if self._is_split(name)
            else gradient
            for name, gradient in found.items()
        }

    def _add_overflow_check(self, accept: Accept) -> Accept:
        """Return `accept`, called in fp16 only for steps without overflow."""
        scale = self._scale
        return (
            accept
            if scale is None
            else lambda loss, norm: scale.update_scale(loss, norm) and accept(loss, norm)
        )

    @torch.no_grad()
    def compute_logits(self, batch: Batch) -> Tensor:
        """Implement `Engine.compute_logits`."""
        self._engine.eval()
        logits_BTV: Tensor = self._engine(**batch.to(self.device).to_model_inputs())
        return logits_BTV

    def get_state(self) -> EngineState:
        """Implement `Engine.get_state`. One parameter is gathered at a time; each rank keeps its
        rows.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            tensors[f"parameter/{name}"] = self._shard_tensor(
                name, self._state.get_tensor(parameter, None)
            )
            for ours, theirs in self._list_moments(parameter):
                tensors[f"{ours}/{name}"] = self._shard_tensor(
                    name, self._state.get_tensor(parameter, theirs)
                )
        tensors |= {
            f"buffer/{name}": buffer for name, buffer in iter_persistent_buffers(self.module)
        }
        tensors |= {} if self._scale is None else self._scale.state_dict()
        return EngineState(tensors, int(self._state.get_step_counters()[0]))

    def load_state(self, state: EngineState) -> None:
        """Implement `Engine.load_state`."""
        for name, parameter in self.module.named_parameters():
            self._state.set_tensor(
                parameter, self._gather_full_tensor(name, state.tensors[f"parameter/{name}"]), None
            )
            for ours, theirs in self._list_moments(parameter):
                self._state.set_tensor(
                    parameter,
                    self._gather_full_tensor(name, state.tensors[f"{ours}/{name}"]),
                    theirs,
                )
        for name, buffer in iter_persistent_buffers(self.module):
            buffer.copy_(state.tensors[f"buffer/{name}"])
        for name, tensor in {} if self._scale is None else self._scale.state_dict().items():
            # A state that was not saved in fp16 has no loss scale.
            tensor.copy_(state.tensors.get(name, tensor))
        for steps in self._state.get_step_counters():
            steps.fill_(state.steps)
        self._state.sync_weights()

    def _list_moments(self, parameter: nn.Parameter) -> list[tuple[str, str]]:
        """Return the names of a parameter's moments in a checkpoint, and here."""
        keys = self._state.list_moments(parameter)
        return [(ours, theirs) for ours, theirs in MOMENTS.items() if theirs in keys]

    def _is_split(self, name: str) -> bool:
        return self._meshes.expert is not None and get_parameter_role(name) == "experts"

    def _shard_tensor(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's rows: experts are sharded over the expert axis, everything else
        over all ranks.
        """
        if self._is_split(name):
            return DTensor.from_local(
                whole.clone(), self._meshes.expert, [Shard(0)], run_check=False
            )
        return to_dtensor_shard(whole, self._meshes.world)

    def _gather_full_tensor(self, name: str, share: Tensor) -> Tensor:
        if not isinstance(share, DTensor):
            return share
        return share.to_local() if self._is_split(name) else share.full_tensor()
