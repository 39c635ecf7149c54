"""The stages of a pipeline on one rank, run by the schedules of torch.distributed.pipelining.

A rank keeps the modules of its stages, under the names that they have in the full model, so a
checkpoint does not depend on the pipeline. Every rank reads the batch of its data rank: stages
exchange hidden states and their gradients and nothing else.

Invariants:
- Backward passes of a stage run in the order of the micro-batches, so gradients are summed as in
  one process.
- Stages run as plain modules: FSDP2 gathers, reshards and reduces by its own hooks, as without a
  pipeline.
- Shapes are given in advance. Otherwise torch would run a first pass to find them, and experts
  would count it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from llmsys.config.pipeline import (
    GPipeScheduleConfig,
    InterleavedScheduleConfig,
    OneForwardOneBackwardConfig,
    PipelineScheduleConfig,
)
from llmsys.estimate.model_tensors import needs_embedding_copy
from llmsys.estimate.pipeline_stages import PipelineCut
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer import Transformer

logging.getLogger("torch.distributed.pipelining").setLevel(logging.WARNING)

# B rows, L positions of this rank, D width

# (stage, hidden states of the stage before or None, number of the micro-batch) → hidden states, or
# the loss.
RunStage = Callable[[int, Tensor | None, int], Tensor]


# (stage, whether it is the last backward pass of this stage in the step) → the context of a
# backward pass.
EnterBackward = Callable[[int, bool], AbstractContextManager[None]]


# A step, and its two parts where the gradient noise scale is measured.
MAX_SCHEDULES = 3


def remove_other_stages(model: Transformer, cut: PipelineCut, rank: int) -> None:
    """Remove the modules that the stages of one rank do not need.

    Args:
        model: A full model on the meta device; changed in place.
        cut: The layers of every stage.
        rank: Index on the pipeline axis.
    """
    stages = cut.list_rank_stages(rank)
    kept = {layer for stage in stages for layer in cut.stages[stage]}
    for name in [name for name in model.blocks._modules if int(name) not in kept]:
        del model.blocks._modules[name]
    is_first, is_last = 0 in stages, any(map(cut.is_last, stages))
    if not is_first:
        model.positions = model.sinusoids = model.embedding_norm = model.token_types = None
        model.bigram_embed = None
    if not is_last:
        model.norm = model.head = None
        model.prediction = nn.ModuleList()
        for name in ("pooler", "next_sentence"):
            model._modules.pop(name, None)
    if not is_first and not (is_last and needs_embedding_copy(model.config)):
        del model.embed


class PipelineRunner:
    """The stages of this rank, and the messages between ranks.

    Args:
        cut: The layers of every stage.
        schedule: The `layout.pipeline_schedule`.
        mesh: The pipeline axis.
        hidden_size: Width of hidden states.
        dtype: Their dtype.
        device: Device of this rank.
    """

    def __init__(
        self,
        cut: PipelineCut,
        schedule: PipelineScheduleConfig,
        mesh: DeviceMesh,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.cut = cut
        self.rank = mesh.get_local_rank()
        self.stages = cut.list_rank_stages(self.rank)
        self._config = schedule
        self._mesh = mesh
        self._group = mesh.get_group()
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        # By (micro-batches, rows, positions).
        self._schedules: dict[tuple[int, int, int], Any] = {}
        self._run_stage: RunStage | None = None
        self._enter_backward: EnterBackward | None = None
        self._backwards_left: dict[int, int] = {}
        self.report_pass: Callable[[str], None] = _ignore_pass
        """Called with each pass that begins, and with "" at its end."""

    def run_step(
        self,
        num_micro_batches: int,
        rows: int,
        positions: int,
        run_stage: RunStage,
        enter_backward: EnterBackward,
    ) -> None:
        """Run all forward and backward passes of a step. Collective over the pipeline.

        Args:
            num_micro_batches: Micro-batches of this rank.
            rows: Sequences of each, B.
            positions: Positions of a sequence on this rank, L.
            run_stage: Runs the forward of a stage; for the last stage it returns the loss to send
                backward.
            enter_backward: Returns the context of a backward pass.
        """
        shape = num_micro_batches, rows, positions
        if shape not in self._schedules:
            # A schedule keeps the buffers of its messages.
            if len(self._schedules) == MAX_SCHEDULES:
                self._schedules.clear()
            self._schedules[shape] = self._build_schedule(*shape)
        self._run_stage = run_stage
        self._enter_backward = enter_backward
        # By stage: of several stages of a rank each ends at another time, and then its gradients
        # are complete.
        self._backwards_left = dict.fromkeys(self.stages, num_micro_batches)
        # torch splits these numbers into micro-batches; the batches themselves are looked up by
        # `run_stage`.
        numbers = torch.arange(num_micro_batches)
        first = (numbers,) if 0 in self.stages else ()
        target = numbers if any(map(self.cut.is_last, self.stages)) else None
        self._schedules[shape].step(*first, number=numbers, target=target, return_outputs=False)
        self._run_stage = self._enter_backward = None

    def _build_schedule(self, num_micro_batches: int, rows: int, positions: int) -> Any:
        shape = rows, positions, self._hidden_size
        hidden_BLD = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        number = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            _Stage(
                self,
                index,
                number if index == 0 else hidden_BLD,
                loss if self.cut.is_last(index) else hidden_BLD,
                self._device,
                self._group,
            )
            for index in self.stages
        ]
        common: dict[str, Any] = {
            "n_microbatches": num_micro_batches,
            # The last stage returns the loss itself.
            "loss_fn": lambda output, target: output,
            # The loss is divided by the targets of the whole step already.
            "scale_grads": False,
        }
        match self._config:
            # torch's 1F1B fills the pipeline. A part of a step that cannot holds no more by GPipe.
            case OneForwardOneBackwardConfig() if num_micro_batches < self.cut.ranks:
                return ScheduleGPipe(stages[0], **common)
            case GPipeScheduleConfig():
                return ScheduleGPipe(stages[0], **common)
            case OneForwardOneBackwardConfig():
                return Schedule1F1B(stages[0], **common)
            case InterleavedScheduleConfig():
                return ScheduleInterleaved1F1B([*stages], **common)
            case unreachable:
                assert_never(unreachable)

    def compute_stage(self, stage: int, hidden_BLD: Tensor | None, number: int) -> Tensor:
        """Run the forward of a stage in the current step."""
        assert self._run_stage is not None
        self.report_pass(f"forward of micro-batch {number} in stage {stage}")
        result = self._run_stage(stage, hidden_BLD, number)
        self.report_pass("")
        return result

    @contextmanager
    def enter_backward(self, stage: int, number: int) -> Iterator[None]:
        """Enter the next backward pass of a stage in the current step."""
        assert self._enter_backward is not None
        self._backwards_left[stage] -= 1
        self.report_pass(f"backward of micro-batch {number} in stage {stage}")
        is_last = self._backwards_left[stage] == 0
        with self._enter_backward(stage, is_last):
            yield
        self.report_pass("")

    @torch.no_grad()
    def run_forward(
        self, rows: int, positions: int, run_stage: Callable[[int, Tensor | None], Tensor]
    ) -> Tensor | None:
        """Run the stages of this rank on one batch. For all ranks of the pipeline, with the same
        batches in order.

        A rank is done after its own stages, so it runs the next batch while later stages run this
        one.

        Args:
            rows: Sequences, B.
            positions: Positions of each, T.
            run_stage: (stage, hidden states of the stage before or None) → hidden states (B, T, D),
                or logits.

        Returns:
            The result of the last stage on its rank; None on others.
        """
        result: Tensor | None = None
        for stage in self.stages:
            hidden_BTD: Tensor | None = None
            if stage > 0:
                hidden_BTD = torch.empty(
                    rows, positions, self._hidden_size, dtype=self._dtype, device=self._device
                )
                dist.recv(hidden_BTD, group=self._group, group_src=(self.rank - 1) % self.cut.ranks)
            result = run_stage(stage, hidden_BTD)
            if not self.cut.is_last(stage):
                dist.send(
                    result.contiguous(),
                    group=self._group,
                    group_dst=(self.rank + 1) % self.cut.ranks,
                )
                result = None
        return result

    def broadcast_result(self, result: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return the float32 result of the last stage on all ranks. Collective over the pipeline.

        Args:
            result: The result on the rank of the last stage; None on others.
            shape: Its shape.
        """
        received = (
            torch.empty(shape, dtype=torch.float32, device=self._device)
            if result is None
            else result
        )
        dist.broadcast(received, group=self._group, group_src=self.cut.ranks - 1)
        return received

    @torch.no_grad()
    def sum_with_other_end(self, parameter: Tensor) -> None:
        """Sum the gradients of a parameter that the first and the last rank of the pipeline have.

        For these two ranks: each sends its own. Both get the same sum, so both copies make the same
        step.

        Args:
            parameter: The copy of this rank.
        """
        if parameter.grad is None:
            # The peer waits for a message in any case.
            parameter.grad = torch.zeros_like(parameter)
        peer = self.cut.ranks - 1 if self.rank == 0 else 0
        own = get_local_tensor(parameter.grad).contiguous()
        other = torch.empty_like(own)
        messages = [
            dist.P2POp(dist.isend, own, group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        get_local_tensor(parameter.grad).add_(other)  # a + b = b + a to the last bit


def _ignore_pass(text: str) -> None:
    pass


class _StageModule(nn.Module):
    """The module that torch runs as a stage. It has no parameters, so torch leaves
    FSDP to FSDP.
    """

    def __init__(self, runner: PipelineRunner, index: int) -> None:
        super().__init__()
        self._runner = runner
        self._index = index

    def forward(self, x: Tensor, *, number: Tensor) -> Tensor:
        return self._runner.compute_stage(self._index, None if self._index == 0 else x, int(number))


class _Stage(PipelineStage):
    """A stage that says before each backward pass whether it is the last one."""

    def __init__(
        self,
        runner: PipelineRunner,
        index: int,
        taken: Tensor,
        given: Tensor,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        count = len(runner.cut.stages)
        super().__init__(
            _StageModule(runner, index), index, count, device, taken, given, group=group
        )
        self._runner = runner

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._runner.enter_backward(self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
