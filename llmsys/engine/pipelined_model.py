"""The training step and the evaluation of a model whose layers are on several ranks.

Invariants:
- Losses are summed and divided once by the targets of all ranks and micro-batches, as without a pipeline.
- A token embedding that first and last stage both need is one parameter: its gradients are summed, and its norm is
  counted once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmsys.data.batch import Batch
from llmsys.engine.engine import Loss, iter_persistent_buffers
from llmsys.engine.micro_batch_loss import compute_loss_share, compute_stage_output
from llmsys.estimate.model_tensors import needs_embedding_copy
from llmsys.estimate.pipeline_stages import PipelineCut, cut_layers
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.fsdp import DataParallelModel
from llmsys.parallel.pipeline import PipelineRunner, remove_other_stages

# B rows, T positions


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
        self._model, self._layout = model, meshes.layout
        self._cut = cut or cut_layers(model.config, meshes.layout, model.config.max_position_embeddings)
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
        """Call `report` with each pass that begins, and with "" at its end."""
        self._runner.report_pass = report

    @property
    def is_first_rank(self) -> bool:
        """True on the rank that counts the batch for all ranks of its pipeline."""
        return self._runner.rank == 0

    def add_gradients(
        self, batches: Sequence[Batch], data_parallel: DataParallelModel, loss: Loss, counts: Tensor, scale: float
    ) -> Tensor:
        """Run the schedule of a step, which adds up gradients. Collective over the pipeline.

        Args:
            batches: The micro-batches of this data rank, on the device.
            data_parallel: Runs the model, and reduces gradients.
            loss: The loss at the head.
            counts: Counts of the step, see `reduce_token_counts`.
            scale: The loss scale.

        Returns:
            The sum over targets in nats on the rank of the last stage, 0 on others.
        """
        model, forward, sharding = self._model, data_parallel.forward, data_parallel.sharding
        total = torch.zeros((), device=counts.device)

        def run_stage(stage: int, hidden_BTD: Tensor | None, number: int) -> Tensor:
            place = {"layers": self._cut.stages[stage], "hidden_BTD": hidden_BTD}
            if not self._cut.is_last(stage):
                return compute_stage_output(model, forward, batches[number], counts, scale, **place)
            share, nats = compute_loss_share(model, forward, batches[number], loss, counts, sharding, **place)
            total.add_(nats)
            return share * scale

        rows, positions = batches[0].tokens_BT.shape
        # Stages exchange the positions of this rank.
        positions //= self._layout.sequence_parallel_size
        self._runner.run_step(len(batches), rows, positions, run_stage, data_parallel.enter_micro_batch)
        return total

    def finish_gradients(self) -> tuple[Tensor, ...]:
        """Sum the gradients of the parameters that two stages have, and return those. Collective over the pipeline."""
        if not needs_embedding_copy(self._model.config) or "embed" not in self._model._modules:
            return ()
        weight = self._model.embed.weight
        self._runner.sum_with_other_end(weight)
        return (weight,)

    def compute_logits(self, batch: Batch) -> Tensor:
        """Implement `Engine.compute_logits`: every rank gets the logits of the last stage. Collective."""

        def run_stage(stage: int, hidden_BTD: Tensor | None) -> Tensor:
            inputs = batch.to_model_inputs() | {"layers": self._cut.stages[stage], "hidden_BTD": hidden_BTD}
            logits_BTV: Tensor = self._model(**inputs)
            return logits_BTV

        return self._runner.compute_logits(run_stage, (*batch.tokens_BT.shape, self._model.config.vocab_size))


def _list_shapes(model: Transformer) -> dict[str, torch.Size]:
    """Return the shapes of parameters and persistent buffers, by their names in `EngineState`."""
    shapes = {f"parameter/{name}": parameter.shape for name, parameter in model.named_parameters()}
    return shapes | {f"buffer/{name}": buffer.shape for name, buffer in iter_persistent_buffers(model)}
