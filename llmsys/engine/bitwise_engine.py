"""The torch engine in bitwise mode: the same weights and moments, bit for bit, on any number of
processes.

FSDP2 or plain data parallelism as in fast mode, with every sum in a fixed order:

- A step is a fixed list of micro-batches. Rank r of W computes the micro-batches r, W + r, 2W + r,
  …, each with the same shapes, kernels and dropout on any rank (experts too, see
  reproducible_sharding.py).
- Gradients are summed over micro-batches by one binary tree (reproducible_sum.py), across ranks and
  in time. In a pipeline every stage has a tree, whose leaves arrive as its backward passes end.
- The norm is summed over the rows of all parameters, the optimizer consists of operations that
  round once (elementwise.py), and metrics are gathered by micro-batch and summed in float64.

W counts the groups of ranks with different sequences. It must be a power of two that divides the
micro-batches of a step. Compared machines must have the same kind of device, the same libraries
and, on CPUs, the same number of threads.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise, starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmsys.config.optimizer import OptimizerConfig
from llmsys.data.batch import Batch
from llmsys.data.shuffle import derive_order_key
from llmsys.engine.engine import (
    Accept,
    EngineState,
    GradientProbe,
    Loss,
    ObserveGradients,
    StepResult,
    accept_all,
    drop_counts,
    enter_training,
    iter_persistent_buffers,
    reduce_token_counts,
)
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.engine.pipelined_model import PipelinedModel
from llmsys.errors import LlmsysError
from llmsys.estimate.pipeline_stages import PipelineCut
from llmsys.model.initialization import build_initializer
from llmsys.model.transformer import AuxiliaryLayer, Transformer
from llmsys.optim.bitwise_optimizer import BitwiseOptimizer
from llmsys.optim.elementwise import require_elementwise
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.fsdp import DataParallel, reshard_parameters
from llmsys.parallel.gradient_clipping import list_local_gradients
from llmsys.parallel.parallelize import materialize_parameters
from llmsys.parallel.plain import PlainModel
from llmsys.parallel.process_group import all_gather_tensor, get_rank
from llmsys.parallel.reproducible_sharding import (
    apply_reproducible_fsdp,
    build_reproducible_plain,
)
from llmsys.parallel.reproducible_sum import (
    StreamingTreeSum,
    compute_gradient_norm,
    sum_rows_pairwise,
)

# J numbers of one micro-batch, M micro-batches of a step


class BitwiseEngine:
    """FSDP2, or plain data parallelism, with sums in a fixed order; arguments as for `TorchEngine`.
    `train_step` gets every W-th micro-batch.

    Numbers of layers and rows of parameters have the places that they have in one process, also
    where a rank of a pipeline has some of them only: the others are zeros there.
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
        cut: PipelineCut | None = None,
        data_parallel: DataParallel = "fsdp",
    ) -> None:
        """Shard the model, allocate and fill it, and switch torch to deterministic kernels.

        Args:
            model: A model on the meta device; it gets its initial values here.
            meshes: Sub-meshes of the run's layout.
            optimizer: The `optimizer:` section; only elementwise kinds keep their bits over shards.
            loss: The loss at the head.
            compute_dtype: Dtype of the forward; masters and sums are float32.
            seed: Seed of the initial values.
            device: Device of this rank.
            initialize: Draw the initial values. False: a checkpoint will replace them.
            cut: The layers of every stage of a pipeline. Default: None, cut by cost.
            data_parallel: FSDP2, or whole weights without a wrapper.
        """
        self.device = device
        self.module = model
        self.observe_gradients: ObserveGradients | None = None
        self.gradient_probe: GradientProbe | None = None
        # The gradients so far, while the probe looks.
        self._partial: list[Tensor] = []
        self._without_gradient: set[nn.Parameter] = set()
        self._loss = loss
        self._seed = seed
        self._clip = optimizer.max_grad_norm
        self._layout = meshes.layout
        place = get_rank() % meshes.layout.ranks_per_stage
        # Replicas hold the same rows, of which the norm counts one copy.
        self._first_copy = place < meshes.layout.ranks_per_replica
        self._is_first_of_stage = place == 0
        self._data_rank = meshes.layout.get_data_rank(get_rank())
        ends = list(accumulate((len(parameter) for parameter in model.parameters()), initial=0))
        starts = dict(zip((name for name, _ in model.named_parameters()), ends, strict=False))
        self._slots = _number_counters(model.list_auxiliary_layers())
        self.pipeline = (
            None
            if meshes.pipeline is None
            else PipelinedModel(model, meshes, cut, compute_dtype, device)
        )
        self._rows: dict[str, Any] = {
            "first_rows": [starts[name] for name, _ in model.named_parameters()],
            "num_rows": ends[-1],
        }
        use_deterministic_kernels(device)
        initial = build_initializer(model.config, seed, draws=initialize)
        self._plain: PlainModel | None = None
        if data_parallel == "plain":
            self._plain = build_reproducible_plain(model, meshes, compute_dtype, device, initial)
            self._masters = self._plain.masters
        else:
            apply_reproducible_fsdp(model, meshes, compute_dtype)
            materialize_parameters(model, device, initial)
            self._masters = dict(model.named_parameters())
        self._optimizer = BitwiseOptimizer(
            self._masters, require_elementwise(optimizer), model.config
        )

    def train_step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        accept: Accept = accept_all,
        extras: Sequence[float] = (),
    ) -> StepResult:
        """Implement `Engine.train_step`."""
        enter_training(self.module)
        self._require_masters()
        has_own_rows = self.pipeline is None or self.pipeline.is_first_rank
        counts = reduce_token_counts(batches if has_own_rows else (), self.device)
        batches = [batch.to(self.device) for batch in batches]
        numbers = [self._allocate_numbers() for _ in batches]
        if self.pipeline is None:
            gradients = self._add_gradients(batches, counts, numbers, self._data_rank)
        else:
            gradients = self._add_stage_gradients(self.pipeline, batches, counts, numbers)
        if self.observe_gradients is not None:
            self.observe_gradients(self._wrap_gradients(gradients), 1.0)
        norm = self._compute_norm(gradients)
        nats, extra_sums = self._sum_step_numbers(numbers, extras)
        loss = nats / float(counts[0])
        applied = accept(loss, norm)
        if applied:
            # 1e-6 as in torch.nn.utils.clip_grad_norm_.
            scale = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
            self._optimizer.step(gradients, learning_rate, scale)
        absent = self._list_absent_gradients()
        return StepResult(loss, norm, int(counts[0]), applied, extra_sums, absent)

    def _list_absent_gradients(self) -> tuple[str, ...]:
        if self._plain is not None:
            return self._plain.list_absent_gradients()
        named = self._masters.items()
        return tuple(name for name, parameter in named if parameter in self._without_gradient)

    def _require_masters(self) -> None:
        """Check that the parameters of the model are the masters, whose gradients this engine
        takes.

        Raises:
            LlmsysError: FSDP2 has gathered some. Their gradients would be lost, or a rank would
                fail in the middle of a step while the others wait for it.
        """
        if self._plain is not None:
            return
        gathered = [
            name
            for (name, master), parameter in zip(
                self._masters.items(), self.module.parameters(), strict=True
            )
            if parameter is not master
        ]
        if gathered:
            raise LlmsysError(
                f"train.reproducibility=bitwise: {len(gathered)} parameters "
                f"({', '.join(gathered[:3])}) are gathered at the start of a step, so their "
                "gradients would be lost. No weight was changed. This is a bug: report it with "
                "the config. With evaluation.every_steps equal to checkpoint.every_steps, or "
                "with train.reproducibility=fast, the same command continues from the last "
                "checkpoint."
            )

    def _seed_dropout(self, micro_batch: int) -> None:
        """Seed dropout by (seed, step, micro-batch of the step)."""
        # torch takes seeds of 63 bits.
        torch.manual_seed(
            derive_order_key("dropout", self._seed, self._optimizer.steps, micro_batch) >> 1
        )

    def repeat_gradients(self, batches: Sequence[Batch], data_rank: int) -> None:
        """Implement `RepeatingEngine.repeat_gradients`."""
        enter_training(self.module)
        self._require_masters()
        counts = reduce_token_counts(batches, self.device)
        batches = [batch.to(self.device) for batch in batches]
        self._add_gradients(batches, counts, [self._allocate_numbers() for _ in batches], data_rank)
        drop_counts(self.module)

    def _add_gradients(
        self, batches: Sequence[Batch], counts: Tensor, numbers: list[Tensor], data_rank: int
    ) -> list[Tensor]:
        """Return the gradients of the step, and write the J metrics of each micro-batch."""
        self._without_gradient = set(self._optimizer.named.values())
        sums = StreamingTreeSum()
        probe = self.gradient_probe
        parameters = list(self._masters.values())
        for index, (batch, numbers_J) in enumerate(zip(batches, numbers, strict=True)):
            self._seed_dropout(index * self._layout.data_parallel_size + data_rank)
            with self._enter_micro_batch():
                share, nats = compute_loss_share(
                    self.module, self.module, batch, self._loss, counts
                )
                share.backward()
            self._take_numbers(numbers_J, self.module.list_auxiliary_layers(), nats)
            sums.add_leaf(_take_gradients(parameters, self._without_gradient))
            if probe is not None and probe.count == index + 1:
                self._partial = sums.get_subtree()
                probe.look()
                self._partial = []
        if self._plain is not None:
            self._plain.finish_gradients()
        return sums.compute_total()

    def _enter_micro_batch(self) -> AbstractContextManager[None]:
        """Return the context of a micro-batch, after which its gradients are those of the
        masters.
        """
        if self._plain is None:
            return nullcontext()
        # Every micro-batch is a leaf of the tree.
        return self._plain.enter_micro_batch(last=True)

    def compute_partial_norm(self) -> float:
        """Return the norm of the gradients of the step's micro-batches so far, a full subtree, for
        a probe. Collective.
        """
        return self._compute_norm(self._partial)

    def _compute_norm(self, gradients: list[Tensor]) -> float:
        return compute_gradient_norm(
            list(self._masters.values()), gradients, counts=self._first_copy, **self._rows
        )

    def _add_stage_gradients(
        self,
        pipeline: PipelinedModel,
        batches: Sequence[Batch],
        counts: Tensor,
        numbers: list[Tensor],
    ) -> list[Tensor]:
        """As `_add_gradients`, in the order of a schedule. No dropout is drawn: the config
        rejects it.
        """
        self._without_gradient = set(self._optimizer.named.values())
        sums = {stage: StreamingTreeSum() for stage in pipeline.stages}
        parameters = {stage: pipeline.list_parameters(stage) for stage in pipeline.stages}

        @contextmanager
        def enter_backward(stage: int, last: bool) -> Iterator[None]:
            yield
            sums[stage].add_leaf(_take_gradients(parameters[stage], self._without_gradient))

        def add_part(first: int, last: int) -> None:
            def finish_forward(number: int, layers: range, nats: Tensor | None) -> None:
                counters = self.module.list_auxiliary_layers(layers)
                self._take_numbers(numbers[first + number], counters, nats)

            options: dict[str, Any] = {
                "enter_backward": enter_backward,
                "after_forward": finish_forward,
            }
            pipeline.add_gradients(
                batches[first:last], self.module, self._loss, counts, 1.0, **options
            )

        def join_stages(take: Callable[[StreamingTreeSum], list[Tensor]]) -> list[Tensor]:
            found = {
                id(parameter): total
                for stage, tree in sums.items()
                for parameter, total in zip(parameters[stage], take(tree), strict=True)
            }
            return [found[id(parameter)] for parameter in self._masters.values()]

        probed = 0
        if (probe := self.gradient_probe) is not None:
            probed = probe.count
            add_part(0, probed)
            self._partial = join_stages(StreamingTreeSum.get_subtree)
            probe.look()
            self._partial = []
        add_part(probed, len(batches))
        return join_stages(StreamingTreeSum.compute_total)

    def _wrap_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return shards of gradients, one per parameter, as DTensors by name."""
        return {
            name: DTensor.from_local(
                shard,
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )
            if isinstance(p, DTensor)
            else shard
            for (name, p), shard in zip(self._masters.items(), gradients, strict=True)
        }

    def _allocate_numbers(self) -> Tensor:
        """Return the J metrics of one micro-batch, zero: loss in nats, and the counters of every
        layer.
        """
        last = max((slot.stop for slot in self._slots.values()), default=1)
        return torch.zeros(last, dtype=torch.float64, device=self.device)

    def _take_numbers(
        self,
        numbers_J: Tensor,
        layers: Sequence[AuxiliaryLayer],
        nats: Tensor | None,
    ) -> None:
        """Write the metrics of a forward pass, and reset the counters of its layers."""
        if nats is not None:
            numbers_J[0] = nats
        for layer in layers:
            numbers_J[self._slots[layer]] = torch.cat(
                [part.double().flatten() for part in layer.get_step_counters()]
            )
            layer.reset_counts()

    def _sum_step_numbers(
        self, numbers: list[Tensor], extras: Sequence[float]
    ) -> tuple[float, tuple[float, ...]]:
        """Return the loss sum of the step in nats and the sums of `extras`.

        Sets the layers' counters to those of the step on the first rank of a stage, and to zero
        elsewhere.
        """
        own = torch.cat([*numbers, torch.tensor(extras, dtype=torch.float64, device=self.device)])
        gathered = all_gather_tensor(own)
        by_rank, extra_sums = gathered.split([own.numel() - len(extras), len(extras)], dim=1)
        # zeros but for one stage
        by_rank = by_rank.unflatten(0, (self._layout.pipeline, -1)).sum(0)
        # Micro-batch i of rank r is number i · W + r of the step.
        numbers_JM = by_rank.unflatten(1, (len(numbers), -1)).transpose(0, 1).flatten(0, 1).T
        totals_J = sum_rows_pairwise(numbers_JM.clone())
        for layer in self.module.list_auxiliary_layers() if self._is_first_of_stage else ():
            counted = layer.get_step_counters()
            sizes = [sums.numel() for sums in counted]
            for sums, total in zip(counted, totals_J[self._slots[layer]].split(sizes), strict=True):
                sums.copy_(total.view_as(sums))
        return float(totals_J[0]), tuple(extra_sums.sum(0).tolist())

    @torch.no_grad()
    def compute_logits(self, batch: Batch) -> Tensor | None:
        """Implement `Engine.compute_logits`."""
        self.module.eval()
        batch = batch.to(self.device)
        if self.pipeline is not None:
            return self.pipeline.compute_logits(batch)
        logits_BTV: Tensor = self.module(**batch.to_model_inputs())
        return logits_BTV

    def get_state(self) -> EngineState:
        """Implement `Engine.get_state`. The tensors are not copies: loading into them loads into
        the engine.
        """
        reshard_parameters(self.module)
        if self._plain is not None:
            self._plain.reshard_parameters()
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._masters.items():
            tensors[f"parameter/{name}"] = parameter.detach()
            tensors |= {
                f"{moment}/{name}": by_name[name]
                for moment, by_name in self._optimizer.moments.items()
            }
        tensors |= {
            f"buffer/{name}": buffer for name, buffer in iter_persistent_buffers(self.module)
        }
        return EngineState(tensors | self._optimizer.get_shared_state(), self._optimizer.steps)

    def load_state(self, state: EngineState) -> None:
        """Implement `Engine.load_state`."""
        own = self.get_state().tensors
        for name, tensor in state.tensors.items():
            if own[name] is not tensor:
                own[name].copy_(tensor)
        self._optimizer.steps = state.steps


def _number_counters(
    layers: Sequence[AuxiliaryLayer],
) -> dict[AuxiliaryLayer, slice]:
    """Return the places of each layer's counters in the metrics of a micro-batch, after the
    loss.
    """
    ends = accumulate(
        (sum(sums.numel() for sums in layer.get_step_counters()) for layer in layers), initial=1
    )
    return dict(zip(layers, starmap(slice, pairwise(ends)), strict=True))


def _take_gradients(parameters: Sequence[nn.Parameter], without: set[nn.Parameter]) -> list[Tensor]:
    """Take the gradients of a micro-batch, and take parameters that have one out of `without`."""
    for parameter in parameters:
        if parameter.grad is None:  # unused by this micro-batch on every rank
            parameter.grad = torch.zeros_like(parameter)
        else:
            without.discard(parameter)
    gradients = list_local_gradients(parameters)
    for parameter in parameters:
        parameter.grad = None
    return gradients


def use_deterministic_kernels(device: torch.device) -> None:
    """Select kernels without atomic additions, and one cuBLAS workspace, on accelerators.

    Args:
        device: Device of this rank. CPU kernels have neither, so nothing changes there.
    """
    if device.type != "cpu":
        # One of the two settings with which cuBLAS is deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
