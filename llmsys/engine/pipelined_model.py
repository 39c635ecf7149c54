"""The training step and the evaluation of a model whose layers are on several ranks.

Invariants:
- Losses are summed and divided once by the targets of all ranks and micro-batches, as without a
  pipeline.
- A token embedding that first and last stage both need is one parameter: its gradients are summed,
  and its norm is counted once.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from llmsys.data.batch import Batch
from llmsys.engine.engine import Loss, iter_persistent_buffers
from llmsys.engine.micro_batch_loss import compute_loss_share, compute_stage_output
from llmsys.estimate.model_tensors import needs_embedding_copy
from llmsys.estimate.pipeline_stages import PipelineCut, cut_layers
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.pipeline import EnterBackward, PipelineRunner, remove_other_stages
from llmsys.parallel.sequence_sharding import SequenceSharding

# B rows, T positions

# (micro-batch, layers of the stage, sum of losses in nats after the last stage or None)
AfterForward = Callable[[int, range, Tensor | None], None]


class PipelinedModel:
    """The stages of this rank. The modules of other stages are removed from the model.

    Args:
        model: A full model on the meta device.
        meshes: Sub-meshes of the run's layout.
        cut: The layers of every stage; None: cut by cost.
        dtype: Dtype of hidden states.
        device: Device of this rank.
    """

    def __init__(
        self,
        model: Transformer,
        meshes: DeviceMeshes,
        cut: PipelineCut | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert meshes.pipeline is not None
        self._model = model
        self._layout = meshes.layout
        self._device = device
        model.run_pipeline = self._compute_next_logits
        self._cut = cut or cut_layers(
            model.config, meshes.layout, model.config.max_position_embeddings
        )
        model.shapes_elsewhere = _list_shapes(model)
        remove_other_stages(model, self._cut, meshes.pipeline.get_local_rank())
        for name in _list_shapes(model):
            del model.shapes_elsewhere[name]
        self._runner = PipelineRunner(
            self._cut,
            meshes.layout.pipeline_schedule,
            meshes.pipeline,
            hidden_size=model.config.hidden_size,
            dtype=dtype,
            device=device,
        )

    def report_passes(self, report: Callable[[str], None]) -> None:
        """Report the passes of the schedule, for instance to a watchdog.

        Args:
            report: Called with the name of each pass that begins, and with "" at its end.
        """
        self._runner.report_pass = report

    @property
    def stages(self) -> list[int]:
        """The stages of this rank, in order."""
        return self._runner.stages

    @property
    def is_first_rank(self) -> bool:
        """True on the rank that counts the batch for all ranks of its pipeline."""
        return self._runner.rank == 0

    def list_parameters(self, stage: int) -> list[nn.Parameter]:
        """List the parameters of a stage of this rank; the first and the last stage have those
        outside of blocks.
        """
        return [
            parameter
            for name, parameter in self._model.named_parameters()
            if self.find_stage(name) == stage
        ]

    def find_stage(self, name: str) -> int | None:
        """Return the stage of this rank that uses a parameter or a module.

        Args:
            name: Its name in the model; "" is the model itself, with what it has outside of blocks.

        Returns:
            The stage of a block; for all else the first or the last stage, None on a rank that has
            neither. No rank has both: there are two ranks or more, and stages are assigned to them
            in turns.
        """
        found = re.match(r"blocks\.(\d+)(\.|$)", name)
        if found is not None:
            layer = int(found.group(1))
            return next(stage for stage in self.stages if layer in self._cut.stages[stage])
        ends = (stage for stage in self.stages if stage == 0 or self._cut.is_last(stage))
        return next(ends, None)

    def add_gradients(
        self,
        batches: Sequence[Batch],
        forward: Callable[..., Tensor],
        loss: Loss,
        counts: Tensor,
        scale: float,
        *,
        enter_backward: EnterBackward,
        sharding: SequenceSharding | None = None,
        after_forward: AfterForward | None = None,
    ) -> Tensor:
        """Run the schedule of a step, which adds up gradients. Collective over the pipeline.

        Args:
            batches: The micro-batches of this data rank, on the device.
            forward: Runs the model, possibly inside a wrapper.
            loss: The loss at the head.
            counts: Counts of the step, see `reduce_token_counts`.
            scale: The loss scale.
            enter_backward: Returns the context of a backward pass.
            sharding: See `compute_loss_share`.
            after_forward: Called after each forward pass of a stage.

        Returns:
            The sum over targets in nats on the rank of the last stage, 0 on others.
        """
        model = self._model
        total = torch.zeros((), device=counts.device)

        def run_stage(stage: int, hidden_BTD: Tensor | None, number: int) -> Tensor:
            place = {"layers": self._cut.stages[stage], "hidden_BTD": hidden_BTD}
            nats = None
            if self._cut.is_last(stage):
                share, nats = compute_loss_share(
                    model, forward, batches[number], loss, counts, sharding, **place
                )
                total.add_(nats)
                result = share * scale
            else:
                result = compute_stage_output(
                    model, forward, batches[number], counts, scale, **place
                )
            if after_forward is not None:
                after_forward(number, self._cut.stages[stage], nats)
            return result

        rows, positions = batches[0].tokens_BT.shape
        # Stages exchange the positions of this rank.
        positions //= self._layout.sequence_parallel_size
        self._runner.run_step(len(batches), rows, positions, run_stage, enter_backward)
        return total

    def finish_gradients(self) -> tuple[Tensor, ...]:
        """Sum the gradients of the parameters that two stages have, and return those. Collective
        over the pipeline.
        """
        weights = self._list_doubled_parameters()
        for weight in weights:
            self._runner.sum_with_other_end(weight)
        return weights

    def _list_doubled_parameters(self) -> tuple[Tensor, ...]:
        if not needs_embedding_copy(self._model.config) or "embed" not in self._model._modules:
            return ()
        return (self._model.embed.weight,)

    @contextmanager
    def enter_finished_gradients(self) -> Iterator[tuple[Tensor, ...]]:
        """Sum the gradients that two stages have, as `finish_gradients`, and take the sums back at
        the end: further micro-batches follow. Collective over the pipeline.

        Yields:
            The parameters that two stages have.
        """
        weights = self._list_doubled_parameters()
        own = [None if weight.grad is None else weight.grad.clone() for weight in weights]
        yield self.finish_gradients()
        for weight, gradient in zip(weights, own, strict=True):
            weight.grad = gradient

    def compute_logits(self, batch: Batch) -> Tensor | None:
        """Implement `Engine.compute_logits`: the rank of the last stage has the logits.
        Collective.
        """

        def run_stage(stage: int, hidden_BTD: Tensor | None) -> Tensor:
            inputs = batch.to_model_inputs() | {
                "layers": self._cut.stages[stage],
                "hidden_BTD": hidden_BTD,
            }
            output: Tensor = self._model(**inputs)
            return output

        rows, positions = batch.tokens_BT.shape
        return self._runner.run_forward(rows, positions, run_stage)

    def _compute_next_logits(self, tokens_BT: Tensor, cache: KeyValueCache) -> Tensor:
        """Implement `Transformer.run_pipeline`. Collective over the pipeline."""
        tokens_BT = self._model.select_input_tokens(tokens_BT.to(self._device), cache)
        filled = cache.length

        def run_stage(stage: int, hidden_BTD: Tensor | None) -> Tensor:
            cache.length = filled  # every stage of a rank fills its own layers from there
            layers = self._cut.stages[stage]
            output: Tensor = self._model(
                tokens_BT, cache=cache, layers=layers, hidden_BTD=hidden_BTD
            )
            return output

        rows, positions = tokens_BT.shape
        logits_BTV = self._runner.run_forward(rows, positions, run_stage)
        last_BV = None if logits_BTV is None else logits_BTV[:, -1].float().contiguous()
        return self._runner.broadcast_result(last_BV, (rows, self._model.config.vocab_size))


def _list_shapes(model: Transformer) -> dict[str, torch.Size]:
    """Return the shapes of parameters and persistent buffers, by their names in `EngineState`."""
    shapes = {f"parameter/{name}": parameter.shape for name, parameter in model.named_parameters()}
    return shapes | {
        f"buffer/{name}": buffer.shape for name, buffer in iter_persistent_buffers(model)
    }
